"""What an error says about a batch of the journal that could not be written."""

from __future__ import annotations

import psycopg

from holdfast.db.answer_timeout import NoAnswer
from holdfast.db.outages import CONFIGURATION_LIMIT_EXCEEDED
from holdfast.engine.outcome import Ended
from holdfast.journal.entries import CheckpointEntry, Entry, EventEntry, Portion, ProgressEntry, UsageEntry, size_of


def kind_of(error: Exception) -> str:
    """An error for logs: without its message, which quotes the refused data."""
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    return type(error).__name__ if state is None else f"{type(error).__name__} ({state})"


def is_refusal(error: Exception) -> bool:
    """Whether the data is the cause, so that trying again cannot help.

    psycopg calls class 54 (a limit of the server was exceeded) and 53400 (a limit of the operator, such as
    `temp_file_limit`) operational, but they are about the data. Class 25 (the server is read-only, as after a
    fail-over) is not.
    """
    if isinstance(error, psycopg.OperationalError):
        return (error.sqlstate or "").startswith(("54", CONFIGURATION_LIMIT_EXCEEDED))
    if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("25"):
        return False
    return not isinstance(error, (psycopg.InterfaceError, TimeoutError, OSError))


def is_temporary(error: Exception) -> bool:
    """Whether the cause is a state of the server, although it answers: it is read-only, has no connection left, is
    starting, or another transaction has a lock."""
    state = (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""
    return state.startswith(("25", "40")) or state in ("53300", "55P03", "57P03")


def is_lock_timeout(error: Exception) -> bool:
    """Whether another transaction kept a lock for too long."""
    return isinstance(error, psycopg.errors.LockNotAvailable)


def is_timeout(error: Exception) -> bool:
    """Whether the server was working on it and did not finish in time."""
    return isinstance(error, TimeoutError | NoAnswer | psycopg.errors.QueryCanceled)


def describe_largest_part(portion: Portion) -> str:
    """Which of a run's writes is the largest, in words for the run's error."""
    sizes = [(size_of(entry), _name(entry)) for entry in portion.entries]
    if isinstance(portion.outcome, Ended) and portion.outcome.values is not None:
        sizes.append((len(portion.outcome.values), "its last values"))
    size, name = max(sizes, default=(0, "its end"))
    return f"the largest part is {name}, {size} bytes."


def _name(entry: Entry) -> str:
    match entry:
        case EventEntry(kind=kind):
            return f"an event ({kind})"
        case CheckpointEntry():
            return "a checkpoint"
        case UsageEntry():
            return "its usage"
        case ProgressEntry():
            return "its progress"
        case _:
            return "what a node returned"

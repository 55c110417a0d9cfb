"""What is to be done about a batch of the journal that could not be written."""

from __future__ import annotations

from typing import assert_never

import psycopg
from psycopg.rows import DictRow

from holdfast.db.answer_timeout import NoAnswer
from holdfast.db.outages import CONFIGURATION_LIMIT_EXCEEDED
from holdfast.engine.outcome import Ended, RolledBack
from holdfast.errors import Cancelled, LeaseLost, RunSignal
from holdfast.journal.batch import CheckpointEntry, Entry, EventEntry, Portion, ProgressEntry, UsageEntry, WritesEntry


def kind_of(error: Exception) -> str:
    """What a log may say of it: not its message, which quotes what was refused."""
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    return type(error).__name__ if state is None else f"{type(error).__name__} ({state})"


def is_refusal(error: Exception) -> bool:
    """Whether the data is at fault, so that trying again cannot help. Class 54 (a limit of the server was exceeded) and
    53400 (one that the operator has set, such as `temp_file_limit`) count as operational for psycopg; class 25 (a
    server that is read-only for now, as after a fail-over) does not."""
    if isinstance(error, psycopg.OperationalError):
        return (error.sqlstate or "").startswith(("54", CONFIGURATION_LIMIT_EXCEEDED))
    if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("25"):
        return False
    return not isinstance(error, (psycopg.InterfaceError, TimeoutError, OSError))


def waits_for_others(error: Exception) -> bool:
    """Whether no data is at fault, although the server answers: it is read-only, has no connection left, is starting,
    or another transaction has a lock."""
    state = (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""
    return state.startswith(("25", "40")) or state in ("53300", "55P03", "57P03")


def is_locked(error: Exception) -> bool:
    """Whether another transaction has a lock, and kept it for too long."""
    return isinstance(error, psycopg.errors.LockNotAvailable)


def is_too_slow(error: Exception) -> bool:
    """Whether the server was at it, and not ready in time."""
    return isinstance(error, TimeoutError | NoAnswer | psycopg.errors.QueryCanceled)


def largest_part(portion: Portion) -> str:
    """Which of a run's writes is the largest, in words for its error."""
    sizes = [_size(entry) for entry in portion.entries]
    if isinstance(portion.outcome, Ended) and portion.outcome.values is not None:
        sizes.append((len(portion.outcome.values), "its last values"))
    size, what = max(sizes, default=(0, "its end"))
    return f"the largest part is {what}, {size} bytes."


def _size(entry: Entry) -> tuple[int, str]:
    match entry:
        case EventEntry(kind=kind, data=data):
            return len(data), f"an event ({kind})"
        case CheckpointEntry(row=row, blobs=blobs):
            return len(row[4]) + len(row[5]) + sum(len(blob[5] or b"") for blob in blobs), "a checkpoint"
        case WritesEntry(rows=rows):
            return sum(len(row[3]) for _, row in rows), "what a node returned"
        case UsageEntry(usage=usage):
            return len(usage), "its usage"
        case ProgressEntry():
            return 0, "its progress"
        case _:
            assert_never(entry)


def judge(portion: Portion, row: DictRow | None, *, repeat: bool) -> RunSignal | bool | None:
    """What to do with one run of a batch that failed as a whole: None to write it, True if an earlier try has
    written it already, or the signal to give it."""
    lost = LeaseLost(f"run {portion.run_id} is no longer held")
    if row is None:
        # Only its owner deletes a started run, by a rollback; this may be that owner's second try.
        return True if repeat and isinstance(portion.outcome, RolledBack) else lost
    if row["fence"] != portion.fence:
        return lost
    if row["status"] != "running":
        # The fence is ours, so it was us who moved it.
        return True if repeat and portion.outcome is not None else lost
    if isinstance(portion.outcome, Ended) and row["cancel_action"] == "rollback":
        return Cancelled("rollback")
    return None

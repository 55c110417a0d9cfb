"""What is to be done about a batch of the journal that could not be written."""

from __future__ import annotations

import psycopg
from psycopg.rows import DictRow

from holdfast.engine.outcome import Ended, RolledBack
from holdfast.errors import Cancelled, LeaseLost, RunSignal
from holdfast.worker.batch import Portion


def kind_of(error: Exception) -> str:
    """What a log may say of it: not its message, which quotes what was refused."""
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    return type(error).__name__ if state is None else f"{type(error).__name__} ({state})"


def is_refusal(error: Exception) -> bool:
    """Whether the data is at fault, so that trying again cannot help. Class 54 (a limit of the server was exceeded)
    counts as operational for psycopg; class 25 (a server that is read-only for now, as after a fail-over) does not."""
    if isinstance(error, psycopg.OperationalError):
        return (error.sqlstate or "").startswith("54")
    if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("25"):
        return False
    return not isinstance(error, (psycopg.InterfaceError, TimeoutError, OSError))


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

"""Records in the database that a process of this supervisor has ended, so that its runs are taken over at once.

Each report is tried once, in a thread, with a short timeout: an unreachable database must not block the supervisor. If
the report fails, upkeep takes the runs over later, when the sessions are missing or the lease has expired.
"""

from __future__ import annotations

import threading

import psycopg
import structlog

from holdfast.db.connect import open_blocking_session, with_session_options
from holdfast.engine.lease import report_ended
from holdfast.settings import Settings
from holdfast.telemetry.exceptions import describe

log = structlog.get_logger(__name__)

REPORT_TIMEOUT_SECONDS = 2.0


class EndedProcessReporter:
    """Call it with the token of a process that has ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.model_copy(update={"database_timeout": REPORT_TIMEOUT_SECONDS})

    def __call__(self, token: str) -> None:
        threading.Thread(target=self._report, args=(token,), name="report", daemon=True).start()

    def _report(self, token: str) -> None:
        try:
            with (
                open_blocking_session(self._settings, "supervisor") as connection,
                with_session_options(connection, self._settings),
            ):
                report_ended(connection, token)
        except (psycopg.Error, OSError) as error:
            log.warning("child.end_not_reported", error=describe(error))

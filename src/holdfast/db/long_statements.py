"""A connection without a statement timeout that still notices a server that hangs.

Building an index on a large table may take hours, so the timeout of `db/answer_timeout.py` does not suit it. Instead, a
second connection asks at intervals whether the server is still executing the statement.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Self, TypeVar

import psycopg
from psycopg import Connection
from psycopg.abc import PQGen
from psycopg.errors import ConnectionTimeout
from psycopg.rows import TupleRow

from holdfast.db.answer_timeout import (
    CANCEL_TIMEOUT_SECONDS,
    WAIT_INTERVAL_SECONDS,
    NoAnswer,
    TimedConnection,
    has_timed_out,
)

Result = TypeVar("Result")

# A standby cannot report on the primary's sessions: assume that the statement is being executed. A primary without the
# session is another server, after a fail-over.
AT_WORK = """
SELECT pg_is_in_recovery()
       OR EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = %s AND coalesce(state, '') NOT LIKE 'idle%%')
"""


class LongStatementConnection(Connection[TupleRow]):
    """While a statement runs, a check asks the server about it every `check_seconds`. After two failed checks in a row
    the connection closes itself and raises NoAnswer. A check fails if the server does not answer, or is not executing
    the statement.

    `has_session`: the connection leads to the same server process in each transaction. Behind PgBouncer it does not.
    There the check only asks whether the server accepts connections.
    """

    check_seconds: float
    _conninfo: str
    _process: int | None

    @classmethod
    def connect(  # type: ignore[override]
        cls, conninfo: str, *, check_seconds: float, has_session: bool, **options: Any
    ) -> Self:
        connection = super().connect(conninfo, **options)
        connection.check_seconds = check_seconds
        connection._conninfo = conninfo
        connection._process = None
        if has_session:
            # Asked with a statement: the process id of the connection's handshake is made up by some proxies.
            try:
                row = connection.execute("SELECT pg_backend_pid()").fetchone()
            except BaseException:
                connection.pgconn.finish()
                raise
            connection._process = row[0] if row is not None else None
        return connection

    def wait(self, gen: PQGen[Result], interval: float = WAIT_INTERVAL_SECONDS, timeout: float | None = None) -> Result:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        failed = False
        while True:
            began = time.monotonic()
            try:
                return super().wait(gen, interval, self.check_seconds)
            except psycopg.OperationalError:
                if self.closed or not has_timed_out(began, self.check_seconds):
                    raise
                # One failed check is not enough: the answer may arrive during it.
                failed_before, failed = failed, not self._is_at_work()
                if failed and failed_before:
                    break
        with suppress(Exception):
            self.cancel_safe(timeout=CANCEL_TIMEOUT_SECONDS)
        self.pgconn.finish()
        raise NoAnswer("the server does not answer, or has lost the session")

    def _is_at_work(self) -> bool:
        """Whether the server is executing the statement. False also if it does not answer in time."""
        try:
            with TimedConnection.connect(
                self._conninfo, answer_timeout=self.check_seconds, autocommit=True, prepare_threshold=None
            ) as other:
                if self._process is None:
                    return True
                row: Any = other.execute(AT_WORK, (self._process,)).fetchone()
                return bool(row[0])
        except (ConnectionTimeout, NoAnswer):
            return False
        except psycopg.Error:
            # The server has answered, for example that it has too many connections. If the server is down, the
            # connection of the statement is broken, too, and psycopg raises its own error there.
            return True

"""A connection whose statements may take as long as they need, while a server that hangs is still noticed.

The build of an index takes hours on a large table, so no limit is right for it, unlike for the connections of
`db/answer_timeout.py`. Instead, a second connection asks from time to time whether the server still works on the
statement.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Self, TypeVar

import psycopg
from psycopg import Connection
from psycopg.abc import PQGen
from psycopg.errors import ConnectionTimeout, _WaitTimeout
from psycopg.rows import TupleRow

from holdfast.db.answer_timeout import CANCEL_TIMEOUT_SECONDS, WAIT_INTERVAL_SECONDS, NoAnswer, TimedConnection

Result = TypeVar("Result")

# A standby cannot say what the primary does. A primary without the session is another server, after a fail-over.
AT_WORK = """
SELECT pg_is_in_recovery()
       OR EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = %s AND coalesce(state, '') NOT LIKE 'idle%%')
"""


class LongStatementConnection(Connection[TupleRow]):
    """While a statement takes long, the server is asked about it each `check_seconds`. When the server twice did not
    answer, or twice did not work on the statement, the connection is closed and NoAnswer is raised.

    `has_session`: the connection is the same server process from one transaction to the next. Behind PgBouncer it is
    not, and all that is asked is whether connections are accepted.
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
            # Not the one that the client was given when it connected: some proxies make that up.
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
        in_doubt = False
        while True:
            try:
                return super().wait(gen, interval, self.check_seconds)
            except _WaitTimeout:
                # Once is not enough: the answer may have been sent between the two looks.
                was_in_doubt, in_doubt = in_doubt, not self._is_at_work()
                if in_doubt and was_in_doubt:
                    break
        with suppress(Exception):
            self.cancel_safe(timeout=CANCEL_TIMEOUT_SECONDS)
        self.pgconn.finish()
        raise NoAnswer("the server does not answer, or has lost the session")

    def _is_at_work(self) -> bool:
        """False also if there is no answer in time."""
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
            # The server has answered, for example that it has no connection to spare. If it is down, the connection of
            # the statement is broken, too, and that is noticed without us.
            return True

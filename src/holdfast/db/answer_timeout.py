"""Connections that limit each wait for the server's answer.

libpq waits for an answer as long as the socket is open. A server that hangs, or a network that drops packets, leaves
the socket open: TCP detects some of these cases, a Unix socket none. So each connection has a timeout on the client's
side.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Self, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.abc import PQGen
from psycopg.rows import DictRow

Result = TypeVar("Result")

# How often psycopg checks for an interrupt. This is its own default.
WAIT_INTERVAL_SECONDS = 0.1
# How long to wait for the server to accept the cancellation of a statement that timed out.
CANCEL_TIMEOUT_SECONDS = 1.0


class NoAnswer(psycopg.OperationalError):
    """The server did not answer within the timeout. The connection is closed."""


def has_timed_out(began: float, limit: float) -> bool:
    """Whether a wait that failed had taken all the time that it may take. psycopg has no public error for that. Another
    failure at the same moment is treated alike: the connection is of no use after it either."""
    return time.monotonic() - began >= limit


def _no_answer(seconds: float) -> NoAnswer:
    return NoAnswer(f"the server has not answered for {seconds:g} seconds")


class TimedAsyncConnection(AsyncConnection[DictRow]):
    """`answer_timeout`: seconds that one statement, or one pipeline, may take. None: no limit. After the timeout the
    connection asks the server to cancel the statement, closes itself and raises NoAnswer.

    Before it raises, it awaits `on_no_answer`: other connections to the same server may hang as well.
    """

    answer_timeout: float | None = None
    on_no_answer: Callable[[], Awaitable[None]] | None = None

    @classmethod
    async def connect(  # type: ignore[override]
        cls,
        conninfo: str = "",
        *,
        answer_timeout: float | None,
        on_no_answer: Callable[[], Awaitable[None]] | None = None,
        **options: Any,
    ) -> Self:
        connection = await super().connect(conninfo, **options)
        connection.answer_timeout = answer_timeout
        connection.on_no_answer = on_no_answer
        return connection

    async def wait(
        self, gen: PQGen[Result], interval: float = WAIT_INTERVAL_SECONDS, timeout: float | None = None
    ) -> Result:
        limit = self.answer_timeout
        if timeout is not None or limit is None:
            return await super().wait(gen, interval, timeout)
        began = time.monotonic()
        try:
            return await super().wait(gen, interval, limit)
        except psycopg.OperationalError:
            if not has_timed_out(began, limit):
                raise
            with suppress(Exception):
                await self.cancel_safe(timeout=CANCEL_TIMEOUT_SECONDS)
            self.pgconn.finish()
            if self.on_no_answer is not None:
                await self.on_no_answer()
            raise _no_answer(limit) from None

    def shut_down(self) -> None:
        """Shut down the socket. A statement that waits for its answer fails at once, and so does the next one. The
        socket is not closed: another task may be waiting on its descriptor."""
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.pgconn.socket)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


class TimedConnection(Connection[DictRow]):
    """The blocking counterpart of TimedAsyncConnection, without `on_no_answer`."""

    answer_timeout: float | None = None

    @classmethod
    def connect(  # type: ignore[override]
        cls, conninfo: str = "", *, answer_timeout: float | None, **options: Any
    ) -> Self:
        connection = super().connect(conninfo, **options)
        connection.answer_timeout = answer_timeout
        return connection

    def wait(self, gen: PQGen[Result], interval: float = WAIT_INTERVAL_SECONDS, timeout: float | None = None) -> Result:
        limit = self.answer_timeout
        if timeout is not None or limit is None:
            return super().wait(gen, interval, timeout)
        began = time.monotonic()
        try:
            return super().wait(gen, interval, limit)
        except psycopg.OperationalError:
            if not has_timed_out(began, limit):
                raise
            with suppress(Exception):
                self.cancel_safe(timeout=CANCEL_TIMEOUT_SECONDS)
            self.pgconn.finish()
            raise _no_answer(limit) from None

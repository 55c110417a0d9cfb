"""Connections that do not wait for ever.

libpq waits for an answer as long as the socket is open. A server that hangs, or a network that swallows packets, leaves
it open: TCP notices some of that, a Unix socket nothing. So each wait of a connection ends on this side, after the
seconds that it was opened with.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Self, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.abc import PQGen
from psycopg.errors import _WaitTimeout
from psycopg.rows import DictRow

Result = TypeVar("Result")

# How often psycopg looks whether it was interrupted. Its own default.
WAIT_INTERVAL_SECONDS = 0.1
# Seconds for asking the server to end a statement that nobody waits for any more.
CANCEL_SECONDS = 1.0


class NoAnswer(psycopg.OperationalError):
    """The server did not answer in time. The connection is closed."""


def _no_answer(seconds: float) -> NoAnswer:
    return NoAnswer(f"the server has not answered for {seconds:g} seconds")


class BoundedAsyncConnection(AsyncConnection[DictRow]):
    """`answer_timeout`: seconds that one statement, or one pipeline, may take. None: no limit. When they are over, the
    server is asked to end the statement, the connection is closed, and NoAnswer is raised.

    `on_silence` is awaited then: other connections to the same server may hang as well.
    """

    answer_timeout: float | None = None
    on_silence: Callable[[], Awaitable[None]] | None = None

    @classmethod
    async def connect(  # type: ignore[override]
        cls,
        conninfo: str = "",
        *,
        answer_timeout: float | None,
        on_silence: Callable[[], Awaitable[None]] | None = None,
        **options: Any,
    ) -> Self:
        connection = await super().connect(conninfo, **options)
        connection.answer_timeout = answer_timeout
        connection.on_silence = on_silence
        return connection

    async def wait(
        self, gen: PQGen[Result], interval: float = WAIT_INTERVAL_SECONDS, timeout: float | None = None
    ) -> Result:
        limit = self.answer_timeout
        if timeout is not None or limit is None:
            return await super().wait(gen, interval, timeout)
        try:
            return await super().wait(gen, interval, limit)
        except _WaitTimeout:
            with suppress(Exception):
                await self.cancel_safe(timeout=CANCEL_SECONDS)
            self.pgconn.finish()
            if self.on_silence is not None:
                await self.on_silence()
            raise _no_answer(limit) from None

    def hang_up(self) -> None:
        """End the connection for both sides at once. A statement that waits for its answer fails, and so does the
        next one. Not by closing the socket, which another task may be waiting for."""
        with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(self.pgconn.socket)) as same:
            same.shutdown(socket.SHUT_RDWR)


class BoundedConnection(Connection[DictRow]):
    """The same for a plain thread."""

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
        try:
            return super().wait(gen, interval, limit)
        except _WaitTimeout:
            with suppress(Exception):
                self.cancel_safe(timeout=CANCEL_SECONDS)
            self.pgconn.finish()
            raise _no_answer(limit) from None

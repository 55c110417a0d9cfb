"""Resolves the host names of webhooks in threads of their own.

The DNS server of a name decides how long its lookup takes, and a lookup cannot be cancelled. The event loop has few
threads for lookups, two with uvloop. With these, a few webhooks to names whose DNS server does not answer would keep
the process from connecting to its own database.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

# Concurrent lookups, as many as webhooks are sent at once. A lookup whose caller gave up counts until it ends.
MAX_LOOKUPS = 100

_begun: ContextVar[set[asyncio.Future[None]] | None] = ContextVar("lookups of this task", default=None)


@contextmanager
def lookups_begun() -> Iterator[set[asyncio.Future[None]]]:
    """The lookups that this task begins within the block and that have not ended yet."""
    begun: set[asyncio.Future[None]] = set()
    token = _begun.set(begun)
    try:
        yield begun
    finally:
        _begun.reset(token)


class NameLookups:
    def __init__(self, limit: int = MAX_LOOKUPS) -> None:
        self._free = asyncio.Semaphore(limit)

    async def getaddrinfo(self, host: str, port: int) -> list[Any]:
        """`socket.getaddrinfo` for TCP, with its results and exceptions."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[Any]] = loop.create_future()
        ended: asyncio.Future[None] = loop.create_future()
        begun = _begun.get()

        def finish(outcome: list[Any] | Exception) -> None:
            self._free.release()
            ended.set_result(None)
            if begun is not None:
                begun.discard(ended)
            if found.done():
                return
            if isinstance(outcome, Exception):
                found.set_exception(outcome)
            else:
                found.set_result(outcome)

        def look_up() -> None:
            outcome: list[Any] | Exception
            try:
                outcome = list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except Exception as error:
                outcome = error
            with suppress(RuntimeError):  # The loop is closed: the process is stopping.
                loop.call_soon_threadsafe(finish, outcome)

        await self._free.acquire()
        try:
            # A daemon thread, so that the process does not wait for it when it stops.
            threading.Thread(target=look_up, name=f"lookup {host}", daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            raise OSError(f"no thread for the lookup: {error}") from None
        if begun is not None:
            begun.add(ended)
        return await found

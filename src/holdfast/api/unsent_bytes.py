"""Bound the bytes of responses that clients do not read. uvicorn buffers a response as long as its client is
connected."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from holdfast.api.connection_limits import ConnectionLimits
from holdfast.lifecycle.service import TaskService

log = structlog.get_logger(__name__)

# Seconds between two looks at what clients have not taken.
UNSENT_INTERVAL_SECONDS = 1.0


class UnsentBytes(TaskService):
    """Closes connections whose clients take nothing, while the process holds more for its clients than it may.

    A connection counts as stalled when its buffer has not shrunk since the last look, so a client that reads may be
    among them if it has been sent as much meanwhile. Clients of streams resume where they were.
    """

    name = "unsent"

    def __init__(self, connections: set[Any], limits: ConnectionLimits) -> None:
        super().__init__()
        self._connections = connections
        self._limits = limits
        self._seen: dict[Any, int] = {}

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(UNSENT_INTERVAL_SECONDS)
            self.look()

    def look(self) -> None:
        """Abort stalled connections, the largest buffer first, until the total fits."""
        held: dict[Any, int] = {}
        for connection in self._connections:
            transport = connection.transport
            if transport is not None and (size := transport.get_write_buffer_size()):
                held[connection] = size
        total = sum(held.values())
        stalled = sorted(
            (connection for connection, size in held.items() if size >= self._seen.get(connection, size + 1)),
            key=lambda connection: held[connection],
        )
        while total > self._limits.buffered_bytes and stalled:
            connection = stalled.pop()
            size = held.pop(connection)
            total -= size
            log.warning("connection.stalled", unsent_bytes=size)
            connection.transport.abort()
        self._seen = held

"""A client that watches a run the way browsers do: it remembers the last id it saw and, when a connection breaks,
goes on from there at the next web process."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx


@dataclass(frozen=True)
class Frame:
    """One Server-Sent Event."""

    id: int
    event: str
    data: Any


@dataclass(frozen=True)
class WatchedRun:
    run_id: UUID
    thread_id: UUID

    @property
    def path(self) -> str:
        return f"/threads/{self.thread_id}/runs/{self.run_id}"


class FrameReader:
    """Puts lines together. Comments are skipped; half a frame, cut off by a broken connection, is not one."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> Frame | None:
        if line == "" and self._fields:
            fields, self._fields = self._fields, {}
            return Frame(int(fields["id"]), fields["event"], json.loads(fields["data"]))
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            self._fields[name] = value
        return None


def parse_frames(lines: Iterable[str]) -> list[Frame]:
    reader = FrameReader()
    return [frame for line in lines if (frame := reader.feed(line)) is not None]


async def read_frames(response: httpx.Response) -> AsyncIterator[Frame]:
    """The frames of a stream, as they come."""
    reader = FrameReader()
    async for line in response.aiter_lines():
        if (frame := reader.feed(line)) is not None:
            yield frame


async def read_stream(client: httpx.AsyncClient, base: str, run: WatchedRun, after: int | None = None) -> list[Frame]:
    """A run's stream from a cursor (None: from its beginning) to its end, over one connection."""
    headers = {} if after is None else {"last-event-id": str(after)}
    async with client.stream("GET", f"{base}{run.path}/stream", headers=headers) as response:
        response.raise_for_status()
        return [frame async for frame in read_frames(response)]


class Watcher:
    """Follows one run to its end.

    `frames` is what came in, over all connections. `broken` counts connections that were cut or refused, `ended_early`
    those that the server ended properly although the run went on.
    """

    def __init__(self, client: httpx.AsyncClient, bases: Sequence[str], run: WatchedRun) -> None:
        self.frames: list[Frame] = []
        self.broken = 0
        self.ended_early = 0
        self.listening = False
        self._client = client
        self._bases = bases
        self._run = run

    def saw(self, event: str) -> list[Any]:
        """The data of every frame of this kind so far."""
        return [frame.data for frame in self.frames if frame.event == event]

    async def follow(self) -> None:
        """Return when the run has ended and its stream with it."""
        for place in itertools.count():
            # Looked up each time: processes may have been added.
            base = self._bases[place % len(self._bases)]
            try:
                if await self._listen(base):
                    return
                self.ended_early += 1
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code != 503:
                    raise
                self.broken += 1
                await asyncio.sleep(0.1)

    async def _listen(self, base: str) -> bool:
        headers = {"last-event-id": str(self.frames[-1].id)} if self.frames else {}
        async with self._client.stream("GET", f"{base}{self._run.path}/stream", headers=headers) as response:
            response.raise_for_status()
            self.listening = True
            async for frame in read_frames(response):
                self.frames.append(frame)
        return await self._has_ended(base)

    async def _has_ended(self, base: str) -> bool:
        while True:
            response = await self._client.get(f"{base}{self._run.path}")
            if response.status_code == 404:
                return True  # Rolled back.
            if response.status_code != 503:
                response.raise_for_status()
                return response.json()["status"] not in ("pending", "running")
            await asyncio.sleep(0.1)

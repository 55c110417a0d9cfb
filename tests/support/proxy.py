"""A proxy between a process and a server that can be told to misbehave like a network."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Proxy(ABC):
    """Relays connections. `url` is the server as seen through it."""

    url: str

    def __init__(self) -> None:
        self._refusing = False
        # How fast answers arrive on each connection. None: as fast as they can.
        self.bytes_per_second: int | None = None
        # Connections that were refused.
        self.refused = 0
        self._held_from: bytes | None = None
        self._held = asyncio.Event()
        self._requests = asyncio.Event()
        self._answers = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self.restore()

    def restore(self) -> None:
        """Be a good network. What was held back arrives."""
        self._refusing = False
        self._held_from = None
        self._requests.set()
        self._answers.set()

    def hold_answers_from(self, text: str) -> asyncio.Event:
        """Hold back the first answer that contains `text`, and all that come later. The event is set when it came."""
        self._held_from = text.encode()
        self._held = asyncio.Event()
        return self._held

    def fall_silent(self) -> None:
        """Nothing arrives, in either direction, and nobody is told."""
        self._requests.clear()
        self._answers.clear()

    def strand(self) -> None:
        """Nothing arrives any more on the connections there are; new ones work. So it is after a fail-over from a
        server that hangs."""
        self.fall_silent()
        self._requests, self._answers = asyncio.Event(), asyncio.Event()
        self.restore()

    def refuse(self) -> None:
        """Refuse new connections until `restore`."""
        self._refusing = True

    def cut(self) -> None:
        """Break every connection, with whatever was held back, and refuse new ones until `restore`."""
        self.refuse()
        for writer in self._writers:
            writer.transport.abort()

    @abstractmethod
    async def _listen(self) -> asyncio.Server: ...

    @abstractmethod
    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...

    async def __aenter__(self) -> Self:
        self._listener = await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            self.refused += 1
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, server_writer}
        for relay in (
            self._relay(reader, server_writer, self._requests),
            self._relay(server_reader, writer, self._answers),
        ):
            task = asyncio.create_task(relay)
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: asyncio.Event) -> None:
        try:
            while data := await reader.read(65536):
                if passing is self._answers and self._held_from is not None and self._held_from in data:
                    passing.clear()
                    self._held.set()
                await passing.wait()
                if passing is self._answers and self.bytes_per_second is not None:
                    await asyncio.sleep(len(data) / self.bytes_per_second)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

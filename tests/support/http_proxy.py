"""A proxy between a client and a server that breaks a connection in the middle of an answer."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class HttpProxy:
    """Relays TCP to the server at `target`, which may change for connections to come. `url` is the server as seen
    through it."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._cuts: list[bytes] = []
        self.requests: list[str] = []
        self.cut = 0
        self._relays: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def cut_at(self, *texts: str) -> None:
        """Break the connection whose answer shows the first of the texts, in the middle of it; then the one that shows
        the second, and so on."""
        self._cuts += [text.encode() for text in texts]

    def break_all(self) -> None:
        """Break every connection there is."""
        self.cut += 1
        for writer in self._writers:
            writer.transport.abort()

    def heads(self, path_part: str) -> list[str]:
        """The heads of the requests whose first line has this in it."""
        return [head for head in self.requests if path_part in head.split("\r\n", 1)[0]]

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit(self.target)
        try:
            server_reader, server_writer = await asyncio.open_connection(target.hostname, target.port)
        except OSError:
            writer.transport.abort()
            return
        for relay in (self._ask(reader, server_writer), self._answer(server_reader, writer)):
            task = asyncio.create_task(relay)
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                head = data.partition(b"\r\n\r\n")[0]
                if b" HTTP/1.1\r\n" in head:
                    self.requests.append(head.decode())
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(65536):
                if self._cuts and self._cuts[0] in data:
                    middle = data.index(self._cuts.pop(0))
                    self.cut += 1
                    writer.write(data[: middle + 2])
                    await writer.drain()
                    return
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            # What has been written still arrives, as it would from a server that fell over.
            writer.close()
            self._writers.discard(writer)

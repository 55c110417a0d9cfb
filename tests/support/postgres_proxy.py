"""A proxy between a process and Postgres that can be told to misbehave like a network."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class PostgresProxy:
    """Relays a Unix socket. `url` is the database as seen through it."""

    def __init__(self, database_url: str) -> None:
        parameters = conninfo_to_dict(database_url)
        socket_name = f".s.PGSQL.{parameters.get('port', 5432)}"
        # The name of a socket may be 107 bytes long, which a test's own directory often exceeds.
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-proxy-"))
        self._server_socket = Path(str(parameters["host"])) / socket_name
        self._socket = self._directory / socket_name
        self.url = make_conninfo(database_url, host=str(self._directory))
        self._refusing = False
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

    def cut(self) -> None:
        """Break every connection, with whatever was held back, and refuse new ones until `restore`."""
        self._refusing = True
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_unix_server(self._accept, self._socket)
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
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_unix_connection(self._server_socket)
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
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

"""A proxy between a process and Postgres."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.proxy import Proxy


class PostgresProxy(Proxy):
    """Relays a Unix socket. `url` is the database as seen through it."""

    def __init__(self, database_url: str) -> None:
        super().__init__()
        parameters = conninfo_to_dict(database_url)
        socket_name = f".s.PGSQL.{parameters.get('port', 5432)}"
        # The name of a socket may be 107 bytes long, which a test's own directory often exceeds.
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-proxy-"))
        self._server_socket = Path(str(parameters["host"])) / socket_name
        self._socket = self._directory / socket_name
        self.url = make_conninfo(database_url, host=str(self._directory))

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._accept, self._socket)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._server_socket)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        shutil.rmtree(self._directory, ignore_errors=True)

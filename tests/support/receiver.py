"""Somebody who receives webhooks: a small HTTP server on this machine that notes what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.support.waiting import until


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(self.body)
        return found


@dataclass
class Receiver:
    """`answer` gives a status, and headers if it likes, for what was received; `hold`: it answers nobody meanwhile."""

    port: int = 0
    host: str = "127.0.0.1"
    received: list[Received] = field(default_factory=list)
    answer: Callable[[Received], int | tuple[int, dict[str, str]]] = lambda _: 200
    hold: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/hook"

    async def get(self, count: int = 1, patience: float = 60) -> list[Received]:
        """What came, once that many have."""

        async def enough() -> bool:
            return len(self.received) >= count

        await until(enough, f"{count} webhooks come, not {len(self.received)}", patience=patience)
        return self.received

    async def about(self, run_id: str, patience: float = 60) -> Received:
        """The first that is about a run, once it has come."""

        async def found() -> Received | None:
            return next((one for one in self.received if one.json.get("run_id") == run_id), None)

        result = await until(found, f"a webhook about {run_id} comes", patience=patience)
        assert result is not None
        return result

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length") or 0))
            assert method == "POST", method
            got = Received(path, headers, body)
            self.received.append(got)
            if self.hold is not None:
                await self.hold.wait()
            said = self.answer(got)
            status, more = said if isinstance(said, tuple) else (said, {})
            lines = [f"HTTP/1.1 {status} Said", "content-length: 0", *(f"{key}: {more[key]}" for key in more), "", ""]
            writer.write("\r\n".join(lines).encode())
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """A receiver, for the length of the block."""
    receiver = Receiver()
    server = await asyncio.start_server(receiver._serve, "127.0.0.1", 0)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        if receiver.hold is not None:
            receiver.hold.set()
        server.close()

"""A real web process that clients attack over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.support.fleet import Fleet, Member

MEGABYTE = 1024 * 1024

GRAPHS = """
from typing import Any, TypedDict
from langgraph.graph import StateGraph

class State(TypedDict, total=False):
    text: str

def reply(state: State) -> dict[str, Any]:
    return {}

graph = StateGraph(State).add_node(reply).set_entry_point("reply").compile()
"""

APP = """
import asyncio
from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute

async def hello(request):
    return PlainTextResponse("hello")

async def large_message(socket):
    await socket.accept()
    Path(__file__).with_suffix(".begun").touch()
    await socket.send_bytes(bytes(32 * 1024 * 1024))
    Path(__file__).with_suffix(".sent").touch()

async def late_accept(socket):
    Path(__file__).with_suffix(".asked").touch()
    while not Path(__file__).with_suffix(".accept").exists():
        await asyncio.sleep(0.01)
    await socket.accept()

routes = [
    Route("/hello", hello),
    WebSocketRoute("/large-message", large_message),
    WebSocketRoute("/late-accept", late_accept),
]
app = Starlette(routes=routes)
"""


@dataclass(frozen=True)
class Target:
    """The process, and what a client can find out about it."""

    member: Member
    fleet: Fleet

    @property
    def memory(self) -> int:
        """Bytes of memory that the process has."""
        return int(psutil.Process(self.member.pid).memory_info().rss)

    def forget_peak(self) -> None:
        """Measure `peak_memory` from here on."""
        Path(f"/proc/{self.member.pid}/clear_refs").write_text("5")

    @property
    def peak_memory(self) -> int:
        """The most bytes of memory that the process has had at any time since `forget_peak`."""
        lines = Path(f"/proc/{self.member.pid}/status").read_text().splitlines()
        [line] = [line for line in lines if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    @property
    def connections(self) -> int:
        """Connections of clients that the process has open."""
        port = urlsplit(self.member.url).port
        found = psutil.Process(self.member.pid).net_connections("tcp")
        return sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in found)

    async def connect(self) -> Attack:
        place = urlsplit(self.member.url)
        assert place.hostname is not None
        return Attack(*await asyncio.open_connection(place.hostname, place.port, limit=64 * MEGABYTE))

    async def takes_body(self, size: int, headers: Mapping[str, str] | None = None) -> bool:
        """Whether another client can send a body of this size."""
        body = {"metadata": {"a": "x" * size}}
        answer = await self.fleet.client.post(f"{self.member.url}/threads", json=body, headers=headers)
        return answer.status_code == 200

    async def is_well(self) -> bool:
        """Whether another client is answered."""
        return (await self.fleet.client.get(f"{self.member.url}/ok")).status_code == 200


class Attack:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def __del__(self) -> None:
        """Many attacks are left standing by their tests."""
        if not self.writer.is_closing():
            self.writer.close()

    async def send(self, data: bytes) -> bool:
        """Send it. False: the server has closed the connection."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            return False
        return not self.writer.is_closing()

    async def answer(self) -> tuple[int, str]:
        """The status and the detail of a refusal. The server closes the connection after it."""
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            body = await self.reader.read()
        assert "connection: close" in head.lower(), head
        return int(head.split()[1]), json.loads(body)["detail"]

    async def status(self) -> int:
        """The status of an answer."""
        async with asyncio.timeout(60):
            return int((await self.reader.readuntil(b"\r\n\r\n")).split()[1])

    async def is_closed(self) -> None:
        """Wait until the server has closed the connection."""
        async with asyncio.timeout(60):
            try:
                while await self.reader.read(MEGABYTE):
                    pass
            except OSError:
                pass

    def close(self) -> None:
        self.writer.close()


def write_project(directory: Path, *, custom_app: bool) -> Path:
    """A project with one graph, and a custom app if asked for."""
    directory.mkdir()
    (directory / "graphs.py").write_text(GRAPHS)
    (directory / "webapp.py").write_text(APP)
    config = {"graphs": {"reply": "./graphs.py:graph"}, "dependencies": ["."]}
    if custom_app:
        config["http"] = {"app": "./webapp.py:app"}
    (directory / "langgraph.json").write_text(json.dumps(config))
    return directory / "langgraph.json"


@asynccontextmanager
async def target(
    database_url: str, directory: Path, environ: Mapping[str, str], *, custom_app: bool = False
) -> AsyncIterator[Target]:
    project = write_project(directory / "project", custom_app=custom_app)
    async with Fleet(database_url, directory, project) as fleet:
        yield Target(await fleet.start_web(environ), fleet)

"""A worker's own answers to probes, from outside its event loop."""

from __future__ import annotations

import asyncio
import re
import socket
import time
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from holdfast.errors import SettingsError
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from holdfast.worker.health import MAX_PROBES, ProbeServer, Verdict
from holdfast.worker.main import Worker
from tests.support import waiting
from tests.support.servers import free_port
from tests.support.smoke import EXAMPLES, working

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


async def probe(port: int, path: str) -> tuple[int, str]:
    try:
        return await asyncio.to_thread(ask, port, path)
    except URLError:
        return 0, ""  # It does not listen yet.


@pytest.fixture
def watched(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    # After the registration no renewal comes between what a test changes and what it looks at.
    monkeypatch.setattr("holdfast.worker.heartbeat.FIRST_RENEWAL_SECONDS", 3600.0)
    return settings.model_copy(update={"health_port": free_port(), "jobs": 3, "heartbeat": 3600.0, "lease": 7200.0})


class Well:
    """A worker that answers."""

    def live(self) -> Verdict:
        return Verdict(True)

    def ready(self) -> Verdict:
        return Verdict(True)

    def metrics(self) -> Any:
        raise NotImplementedError


async def test_probes_that_trickle_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.worker.health.PROBE_SECONDS", 1.0, raising=False)
    server = ProbeServer(Well(), "127.0.0.1", 0)
    server.start()
    try:
        clients = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]

        async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ended = asyncio.create_task(reader.read())
            while not ended.done():
                writer.write(b"G")
                await asyncio.sleep(0.2)
            await asyncio.gather(ended, return_exceptions=True)
            writer.close()

        async with asyncio.timeout(60):
            await asyncio.gather(*(trickle(*client) for client in clients), return_exceptions=True)

        async def well() -> bool:
            return await probe(server.port, "/ready") == (200, "ok\n")

        await waiting.until(well, "the next probe is answered")
    finally:
        await asyncio.to_thread(server.close)


async def test_probe_is_answered_while_all_others_are_held_open() -> None:
    server = ProbeServer(Well(), "127.0.0.1", 0)
    server.start()
    writers = []
    try:
        for _ in range(MAX_PROBES):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writers.append(writer)
            writer.write(b"G")

        async def all_begun() -> bool:
            return len(server._server._begun) == MAX_PROBES

        await waiting.until(all_begun, "the server reads all of them")
        assert await probe(server.port, "/ready") == (200, "ok\n")
    finally:
        for writer in writers:
            writer.close()
        await asyncio.to_thread(server.close)


async def test_probes_that_come_at_once_are_connected() -> None:
    """Before the first of them is accepted: one that is not would be tried again by the kernel after a second."""
    server = ProbeServer(Well(), "127.0.0.1", 0)
    writers = []
    try:
        async with asyncio.timeout(10):
            for _ in range(MAX_PROBES):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writers.append(writer)
    finally:
        for writer in writers:
            writer.close()
        await asyncio.to_thread(server.close)


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (b"GET /ready HTTP/1.1\r\n" + b"a: %s\r\n" % (b"x" * 1000) * 50, b"431"),
        (b"GET /ready HTTP/1.1\r\na: " + b"x" * 50_000, b"431"),
        (b"GET /" + b"x" * 50_000, b""),
    ],
    ids=["headers", "header", "path"],
)
async def test_large_heads_of_probes_are_refused(head: bytes, answer: bytes) -> None:
    """Without waiting for their end: thirty of the largest that Python takes are 200 MB, and several times as much when
    they are parsed."""
    server = ProbeServer(Well(), "127.0.0.1", 0)
    server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head)
        async with asyncio.timeout(9):
            received = b""
            with suppress(ConnectionError):
                received = await reader.read(12)
        assert received[9:] == answer
        writer.close()
        assert await probe(server.port, "/ready") == (200, "ok\n")
    finally:
        await asyncio.to_thread(server.close)


async def test_a_worker_is_ready_while_it_holds_its_lease(watched: Settings) -> None:
    port = watched.health_port
    assert port is not None
    async with working(watched) as worker:

        async def ready() -> bool:
            return (await probe(port, "/ready")) == (200, "ok\n")

        await waiting.until(ready, "the worker is ready")
        assert await probe(port, "/live") == (200, "ok\n")
        metrics = (await probe(port, "/metrics"))[1]
        assert re.search(r"^holdfast_worker_capacity 3\.0$", metrics, re.M)
        assert re.search(r"^holdfast_worker_ready 1\.0$", metrics, re.M)
        assert (await probe(port, "/else"))[0] == 404
        # Its lease ends with its own clock, whatever the event loop is doing.
        worker.heartbeat._deadline = time.monotonic() - 1
        status, reason = ask(port, "/ready")
        assert (status, "no lease" in reason) == (503, True)
        worker.request_stop()
        assert ask(port, "/ready") == (503, "draining\n")
        assert ask(port, "/live")[0] == 200
    with pytest.raises(OSError, match="refused"):
        ask(port, "/live")


async def test_probes_are_answered_while_the_event_loop_is_blocked(watched: Settings) -> None:
    port = watched.health_port
    assert port is not None
    async with working(watched):

        async def ready() -> bool:
            return (await probe(port, "/ready"))[0] == 200

        await waiting.until(ready, "the worker is ready")
        # From this very thread: nothing else runs meanwhile.
        assert ask(port, "/live") == (200, "ok\n")


async def test_a_worker_whose_journal_has_died_is_not_alive(watched: Settings) -> None:
    worker = Worker(watched, GraphCatalog.load(load_config(EXAMPLES)))
    assert worker.live() == Verdict(True), "it has not begun"
    await worker.heartbeat.start()
    worker.journal.failure = RuntimeError("a defect in the journal")
    assert worker.live() == Verdict(False, "the journal has ended")
    await worker.heartbeat.stop()


def test_a_port_that_is_taken_is_the_operators_to_change() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port: Any = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"HOLDFAST_HEALTH_PORT={port}"):
            ProbeServer(None, "127.0.0.1", port)  # type: ignore[arg-type]

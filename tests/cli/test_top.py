"""`holdfast top`: one frame for scripts, and a live screen that outlives the server.

How a frame is drawn is tested with figures that are given; what the command shows, with a server that has no worker,
and rows of workers and runs in its database.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
import pytest
from rich.console import Console

from holdfast.cli.client import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.top import Screen
from holdfast.db.connect import Database
from holdfast.settings import Settings, load_settings
from tests.support.catalogs import catalog_of
from tests.support.records import post_run, query
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.waiting import until

from .processes import DEADLINE, holdfast

QUEUED = UUID("018f0000-0000-7000-8000-0000000000aa")
WORKER = {
    "worker_id": "018f0000-0000-4000-8000-00000000cafe",
    "status": "online",
    "host": "box-1",
    "pid": 4711,
    "version": "0",
    "graphs": ["echo", "steps"],
    "capacity": 10,
    "active": 1,
    "run_ids": [],
    "claims_last_minute": 30,
    "lease_left": 27.5,
    "started_at": "2026-01-02T03:04:05+00:00",
    "stopped_at": None,
    "problem": None,
}
RUN = {
    "run_id": "018f0000-0000-7000-8000-0000000000bb",
    "thread_id": "018f0000-0000-7000-8000-0000000000aa",
    "graph_id": "steps",
    "attempt": 2,
    "worker_id": WORKER["worker_id"],
    "seconds": 90.0,
}
QUEUE: dict[str, Any] = {
    "ready": 7,
    "scheduled": 2,
    "waiting": 3,
    "running": 1,
    "oldest_seconds": 120.0,
    "claims_per_second": 0.5,
    "capacity": 10,
    "workers_online": 1,
    "workers_draining": 0,
    "unserved": {"gone": 4},
}
ACTIVITY: dict[str, Any] = {
    "window_seconds": 60,
    "created": 60,
    "finished": {"success": 50, "error": 3},
    "created_per_second": 1.0,
    "finished_per_second": 53 / 60,
    "median_seconds": {"success": 1.25},
    "running": [RUN],
}

REGISTER = """
INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until, claims_last_minute, problem)
VALUES (gen_random_uuid(), %s, 'box-1', %s, '0', 10, '{echo,steps}', now() + interval '1 hour', %s, %s)
RETURNING worker_id
"""
START = """
UPDATE run SET status = 'running', worker_id = %s, fence = 1, attempt = 2, started_at = now() - interval '90 seconds'
WHERE run_id = %s RETURNING 1
"""
END = """
UPDATE run SET status = %s, ready_at = NULL, first_seq = 1, started_at = now() - interval '1200 milliseconds',
               finished_at = now()
WHERE run_id = %s RETURNING 1
"""
LATER = "UPDATE run SET ready_at = now() + interval '1 hour' WHERE run_id = %s RETURNING 1"
EARLIER = "UPDATE run SET ready_at = now() - interval '2 minutes' WHERE run_id = %s RETURNING 1"

STYLING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@dataclass
class Fleet:
    """A server without a worker, and what its database says of workers and runs."""

    url: str
    database: Database
    running: str

    @classmethod
    async def filled(cls, url: str, database: Database) -> Fleet:
        """7 runs are ready, 4 of them of a graph that no worker has; 2 are scheduled, 3 behind others, 1 is running;
        50 have succeeded and 3 have failed."""
        [worker] = await query(database, REGISTER, "online", 4711, 30, None)
        await query(database, REGISTER, "lost", 4712, 0, None)
        ready = [await post_run(database, graph) for graph in ("echo", "echo", "gone", "gone", "gone", "gone")]
        await query(database, EARLIER, ready[0].run["run_id"])
        for _ in range(4):  # The first is ready.
            await post_run(database, "steps", thread_id=QUEUED)
        for _ in range(2):
            await query(database, LATER, (await post_run(database, "echo")).run["run_id"])
        running = (await post_run(database, "steps")).run["run_id"]
        await query(database, START, worker["worker_id"], running)
        for status in ["success"] * 50 + ["error"] * 3:
            await query(database, END, status, (await post_run(database, "echo")).run["run_id"])
        return cls(url, database, str(running))


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, port=free_port())


@pytest.fixture
async def fleet(settings: Settings, database: Database) -> AsyncIterator[Fleet]:
    async with answering(settings, catalog_of()) as client:
        yield await Fleet.filled(str(client.base_url), database)


def command(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOLDFAST_URL": url, "COLUMNS": "160"}
    return subprocess.run(holdfast("top", *arguments), env=environ, capture_output=True, text=True, timeout=60)


async def frame(fleet: Fleet, *arguments: str) -> str:
    """What the command prints once it shows the run that is running: the figures may be a second old."""

    async def complete() -> str:
        done = await asyncio.to_thread(command, fleet.url, "--once", *arguments)
        assert done.returncode == ExitCode.OK, done.stderr
        return done.stdout if fleet.running in done.stdout and "gone" in done.stdout else ""

    return await until(complete, "the frame shows everything")


def drawn(screen: Screen, height: int | None = None, width: int = 160) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen.frame(height))
    return console.export_text()


def screen_of(
    queue: dict[str, Any] = QUEUE,
    workers: Sequence[dict[str, Any]] = (WORKER,),
    activity: dict[str, Any] | None = ACTIVITY,
) -> Screen:
    return Screen("http://test", queue, list(workers), activity, seen_at=time.time())


def seen(answers: dict[str, Any]) -> Screen:
    """What is seen of a server that is not Holdfast, or not of this version."""

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        return httpx.Response(200, json=answers[path]) if path in answers else httpx.Response(404)

    with Client("http://test", transport=httpx.MockTransport(answer)) as client:
        screen = Screen(client.url)
        screen.refresh(client)
    return screen


async def test_top_prints_one_frame(fleet: Fleet) -> None:
    shown = await frame(fleet)
    for part in (
        *("7 ready", "2 scheduled", "3 behind others", "1/10 running", "1 online"),
        *("0.50/s claimed", "1.10/s created", "0.88/s finished", "3 failed/min", "1.2 s median"),
        *("no online worker has: gone (4)", "echo, steps"),
    ):
        assert part in shown, part
    assert re.search(r"[2-9]\.\d min oldest", shown)
    assert re.search(r"online +box-1 +4711 +1/10 +30 +[56]\d\.\d min", shown)
    assert re.search(r"lost +box-1 +4712", shown)
    assert re.search(rf"{fleet.running} +steps +2 +[1-9]\.\d min", shown)


async def test_worker_that_cannot_work_is_shown_by_the_command(fleet: Fleet) -> None:
    [worker] = await query(fleet.database, REGISTER, "online", 4713, 0, "graph code blocks the event loop")
    shown = await frame(fleet)
    assert f"{str(worker['worker_id'])[-12:]} claims nothing: graph code blocks the event loop" in shown


def test_a_worker_that_cannot_work_is_shown_with_the_reason() -> None:
    worker = {**WORKER, "problem": "graph code blocks the event loop"}
    shown = drawn(screen_of(workers=[worker]), width=80)
    assert re.search(r"00000000cafe +unable", shown)
    assert "00000000cafe claims nothing: graph code blocks the event loop" in shown


LONG_GRAPHS = [f"quarterly_report_writer_for_region_{number}" for number in range(12)]


@pytest.mark.parametrize("host", ["box-1", "holdfast-worker-7d9f8b6c5d-x2x4z"])
@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_graph_names_leave_room_for_all_other_columns(width: int, host: str) -> None:
    worker = {**WORKER, "host": host, "pid": 4194303, "active": 10, "graphs": LONG_GRAPHS}
    run = {**RUN, "graph_id": LONG_GRAPHS[0]}
    screen = screen_of(workers=[worker], activity={**ACTIVITY, "running": [run]})
    lines = drawn(screen, width=width).splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("worker"))
    assert lines[header].split() == ["worker", "status", "host", "pid", "busy", "claims/min", "lease", "graphs"]
    shown = lines[header + 1].split()
    assert [shown[0], shown[1], *shown[3:8]] == ["00000000cafe", "online", "4194303", "10/10", "30", "27.5", "s"]
    assert shown[2][:5] == host[:5]
    assert "quart" in lines[header + 1]
    assert not lines[header + 2].strip(), "a worker takes one line"
    [line] = [line for line in lines if str(RUN["run_id"]) in line]
    assert line.split()[2:] == ["2", "1.5", "min", "00000000cafe"], "the name of the graph is shortened, nothing else"
    assert any("3 failed/min" in line and "median" in line for line in lines), "the figures are on one line"


def test_graphs_without_a_worker_leave_room_for_workers_and_runs() -> None:
    queue = {**QUEUE, "unserved": dict.fromkeys(LONG_GRAPHS, 4)}
    lines = drawn(screen_of(queue), height=24, width=80).splitlines()
    assert len(lines) <= 24
    told = " ".join(line.strip() for line in lines)
    named = ", ".join(f"{graph} (4)" for graph in LONG_GRAPHS[:3])
    assert f"no online worker has: {named} and 9 more" in told
    assert str(RUN["run_id"]) in told


async def test_top_prints_one_frame_as_json(fleet: Fleet) -> None:
    told = json.loads(await frame(fleet, "--json"))
    assert (told["queue"]["ready"], told["queue"]["scheduled"], told["queue"]["waiting"]) == (7, 2, 3)
    assert told["queue"]["unserved"] == {"gone": 4}
    assert {(worker["status"], worker["pid"]) for worker in told["workers"]} == {("online", 4711), ("lost", 4712)}
    assert told["activity"]["finished"] == {"success": 50, "error": 3}
    assert [run["run_id"] for run in told["activity"]["running"]] == [fleet.running]
    assert told["problem"] is None


@pytest.mark.servers
def test_top_once_fails_if_server_is_unreachable() -> None:
    done = command("http://127.0.0.1:9", "--once")
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "cannot be reached" in done.stderr


def test_a_server_without_activity() -> None:
    screen = seen({"/queue": QUEUE, "/workers": [WORKER]})
    assert screen.problem is None
    assert "7 ready" in drawn(screen)


@pytest.mark.parametrize("answers", [{}, {"/queue": [], "/workers": {}}], ids=["nothing", "something else"])
def test_something_that_is_not_holdfast(answers: dict[str, Any]) -> None:
    screen = seen(answers)
    assert screen.problem is not None
    assert screen.seen_at is None
    assert "refused" in drawn(screen)


def test_a_small_screen_shows_what_fits() -> None:
    screen = screen_of(
        {**QUEUE, "running": 1500},
        [{**WORKER, "pid": number} for number in range(150)],
        {**ACTIVITY, "running": [RUN] * 50},
    )
    assert len(drawn(screen, 24).splitlines()) <= 24
    assert "and 145 more" in drawn(screen, 24)
    assert len(drawn(screen).splitlines()) > 200


class Terminal:
    """`holdfast top` on a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._master, slave = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            holdfast("top", "--every", "0.2", "--url", url),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""

    def expect(self, text: str) -> None:
        """Wait for text that is drawn from now on."""
        deadline = time.monotonic() + DEADLINE
        self._seen = ""
        while text not in STYLING.sub("", self._seen):
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self._seen[-3000:]}"
            try:
                self._seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {text!r}:\n{self._seen[-3000:]}") from None

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def close(self) -> int:
        """The exit code; what is still drawn is read, or nobody could write it."""
        reader = threading.Thread(target=self._drain, daemon=True)
        reader.start()
        try:
            return self.process.wait(DEADLINE)
        finally:
            self.kill()
            reader.join(DEADLINE)
            os.close(self._master)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _drain(self) -> None:
        try:
            while os.read(self._master, 65536):
                pass
        except OSError:
            pass


@contextmanager
def terminal(url: str) -> Iterator[Terminal]:
    opened = Terminal(url)
    try:
        yield opened
    finally:
        opened.kill()


async def test_top_survives_the_server_and_ends_with_q(settings: Settings, database: Database) -> None:
    with terminal(f"http://127.0.0.1:{settings.port}") as opened:
        async with answering(settings, catalog_of()) as client:
            await Fleet.filled(str(client.base_url), database)
            await asyncio.to_thread(opened.expect, "7 ready")
        await asyncio.to_thread(opened.expect, "the server cannot be reached")
        await asyncio.to_thread(opened.expect, "7 ready")
        for _ in range(4):
            await post_run(database, "echo")
        async with answering(settings, catalog_of()):
            await asyncio.to_thread(opened.expect, "11 ready")
            opened.press("q")
            assert await asyncio.to_thread(opened.close) == ExitCode.OK


async def test_top_ends_with_ctrl_c(fleet: Fleet) -> None:
    with terminal(fleet.url) as opened:
        await asyncio.to_thread(opened.expect, "7 ready")
        opened.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(opened.close) == ExitCode.OK

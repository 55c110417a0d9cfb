"""A whole `serve` as an operator sees it: what it logs, from every process, and what its one health port answers.

Everything happens once, for all tests of the module; they look at what was said.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from holdfast.cli.exit_codes import ExitCode
from holdfast.telemetry.catalogue import CATALOGUE
from tests.support.databases import own_database
from tests.support.servers import free_port

from .processes import Program, holdfast, wait_for

pytestmark = pytest.mark.expects_errors("exception.ignored", "log.message", "thread.failed")

GRAPH = """
import asyncio
import logging
import threading
import warnings
from typing import TypedDict

from langgraph.graph import START, StateGraph


class State(TypedDict, total=False):
    answer: str


class Unraisable:
    def __del__(self):
        raise RuntimeError("cannot be raised anywhere")


def fail():
    raise RuntimeError("of a thread")


async def noisy(state: State) -> State:
    warnings.warn("a library warns", RuntimeWarning)
    logging.getLogger("psycopg.pool").error("a library complains\\nin two lines")
    Unraisable()
    thread = threading.Thread(target=fail)
    thread.start()
    await asyncio.to_thread(thread.join)
    return {"answer": "yes"}


async def waiting(state: State) -> State:
    await asyncio.sleep(600)
    return {"answer": "late"}


noisy_graph = StateGraph(State).add_node("noisy", noisy).add_edge(START, "noisy")
waiting_graph = StateGraph(State).add_node("waiting", waiting).add_edge(START, "waiting")
"""
GRAPHS = {"noisy": "./graph.py:noisy_graph", "waiting": "./graph.py:waiting_graph"}


@dataclass
class Scene:
    """What the fleet answered and logged."""

    lines: list[str] = field(default_factory=list)
    ready: list[tuple[int, str]] = field(default_factory=list)
    killed: int = 0
    not_ready: str = ""
    metrics: str = ""
    metrics_json: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture(scope="module")
def scene(server_url: str) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="holdfast-cli-") as directory, own_database(server_url) as database_url:
        project = Path(directory)
        (project / "graph.py").write_text(GRAPH)
        config = {"dependencies": ["."], "graphs": GRAPHS, "grafs": {}}
        (project / "langgraph.json").write_text(json.dumps(config))
        health = free_port()
        environ = {
            "DATABASE_URL": database_url,
            "HOLDFAST_LOG_FORMAT": "json",
            "HOLDFAST_HEALTH_PORT": str(health),
            "WORKER_DRAIN_TIMEOUT": "0",
        }
        with Program(holdfast("serve", "--workers", "2", "--port", "0"), environ=environ, cwd=project) as program:
            url = program.expect(r'"url":"(http://[^"]+)".*"event":"fleet.ready"', timeout=120)[1]
            yield _play(program, url, f"http://127.0.0.1:{health}")


def _play(program: Program, url: str, health: str) -> Scene:
    scene = Scene()

    def probe(path: str) -> tuple[int, str]:
        answer = httpx.get(health + path, timeout=30)
        return answer.status_code, answer.text

    with httpx.Client(base_url=url, timeout=120) as client:
        client.post("/runs/wait", json={"assistant_id": "noisy", "input": {}}).raise_for_status()
        scene.ready = [probe("/ready"), probe("/live")]
        scene.metrics = probe("/metrics")[1]
        scene.metrics_json = json.loads(probe("/metrics?format=json")[1])
        workers = [child for child in psutil.Process(program.pid).children() if "worker" in child.cmdline()]
        scene.killed = workers[0].pid
        os.kill(scene.killed, signal.SIGKILL)
        scene.not_ready = wait_for(lambda: dict([probe("/ready")]).get(503), "a worker is missing") or ""
        wait_for(lambda: probe("/ready")[0] == 200, "another worker", timeout=120)
        with _OpenStreams(client):
            program.process.send_signal(signal.SIGTERM)
            scene.exit_code = program.wait(60)
    program.__exit__()
    scene.lines = program.lines
    return scene


class _OpenStreams:
    """Every kind of answer that is open when the server stops: each in a thread that reads it to its end."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> None:
        thread_id = self._client.post("/threads", json={}).json()["thread_id"]
        body = {"assistant_id": "waiting", "input": {}}
        run_id = self._client.post(f"/threads/{thread_id}/runs", json=body).json()["run_id"]
        own = f"/threads/{thread_id}"
        self._read("GET", f"{own}/runs/{run_id}/stream")
        self._read("GET", f"{own}/stream")
        self._read("POST", "/runs/stream", json=body)
        self._read("POST", f"{own}/stream/events", json={"channels": ["values"]})
        self._listen(f"{own}/stream/events")
        self._wait("GET", f"{own}/runs/{run_id}/join")
        self._wait("POST", "/runs/wait", json=body)

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(60)

    def _read(self, method: str, path: str, **given: Any) -> None:
        opened = threading.Event()

        def read() -> None:
            try:
                with self._client.stream(method, path, **given) as response:
                    assert response.status_code == 200, response.read()
                    opened.set()
                    for _ in response.iter_bytes():
                        pass
            except httpx.TransportError:
                opened.set()

        self._start(read)
        assert opened.wait(60), path

    def _listen(self, path: str) -> None:
        """A WebSocket, until the server closes it."""
        opened = threading.Event()
        url = str(self._client.base_url.join(path)).replace("http://", "ws://", 1)

        def listen() -> None:
            with suppress(ConnectionClosed), connect(url) as connection:
                opened.set()
                for _ in connection:
                    pass

        self._start(listen)
        assert opened.wait(60), path

    def _wait(self, method: str, path: str, **given: Any) -> None:
        """An answer that comes when the run has ended: there is nothing to see of it before."""

        def ask() -> None:
            try:
                self._client.request(method, path, **given)
            except httpx.TransportError:
                return

        self._start(ask)

    def _start(self, target: Any) -> None:
        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        self._threads.append(thread)


def test_every_line_of_every_process_is_json_and_known(scene: Scene) -> None:
    for line in scene.lines:
        logged = json.loads(line)
        assert {"event", "level", "timestamp", "role", "pid"} <= set(logged), line
        assert logged["event"] in CATALOGUE, line
        assert CATALOGUE[logged["event"]].level in (logged["level"], "any"), line


def test_supervisor_logs_events_of_its_children(scene: Scene) -> None:
    own = [line for line in scene.events if line["role"] == "supervisor"]
    [ended] = [line for line in own if line["event"] == "child.ended"]
    assert (ended["child"], ended["child_pid"], ended["ending"]) == ("worker", scene.killed, "SIGKILL")
    assert [line["reason"] for line in own if line["event"] == "config.warning"]
    assert [line["event"] for line in own if line["event"].startswith("fleet.")] == ["fleet.ready", "fleet.stopping"]


def test_warnings_and_uncaught_exceptions_are_lines(scene: Scene) -> None:
    said = {line.get("logger", line["event"]): line for line in scene.events}
    assert "a library warns" in said["py.warnings"]["message"]
    assert said["psycopg.pool"]["message"] == "a library complains\nin two lines"
    assert said["thread.failed"]["exception"]["message"] == "of a thread"
    assert said["exception.ignored"]["exception"]["message"] == "cannot be raised anywhere"


def test_orderly_stop_with_open_streams_logs_no_error(scene: Scene) -> None:
    assert scene.exit_code == ExitCode.OK
    stopped = [index for index, line in enumerate(scene.events) if line["event"] == "fleet.stopping"]
    after = scene.events[stopped[0] :]
    assert any(line["event"] == "run.finished" and line["outcome"] == "handed back" for line in after)
    # A busy machine may cause warnings, of an event loop that was late for one.
    assert [line for line in after if line["level"] in ("error", "critical")] == []
    assert [line["event"] for line in after if line["role"] == "web"][-1] == "web.stopped"


def test_supervisor_answers_probes_for_all_workers(scene: Scene) -> None:
    assert scene.ready == [(200, "ok\n"), (200, "ok\n")]
    assert "worker 1" in scene.not_ready or "worker 2" in scene.not_ready


def test_supervisor_merges_metrics_of_its_workers(scene: Scene) -> None:
    for number in ("1", "2"):
        assert f'holdfast_worker_ready{{worker="{number}"}} 1.0' in scene.metrics
    types = [line for line in scene.metrics.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)), "each family once"
    labels = [sample["labels"] for sample in scene.metrics_json["metrics"]["holdfast_worker_ready"]]
    assert labels == [{"worker": "1"}, {"worker": "2"}]
    promtool = shutil.which("promtool")
    if promtool is not None:
        checked = subprocess.run([promtool, "check", "metrics"], input=scene.metrics, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, ""), checked.stderr


@contextmanager
def small_project(server_url: str, graph: str = GRAPH) -> Iterator[tuple[Path, dict[str, str]]]:
    """A project, and an environment with a database and a health port of its own."""
    with own_database(server_url) as database_url, tempfile.TemporaryDirectory(prefix="holdfast-cli-") as directory:
        project = Path(directory)
        (project / "graph.py").write_text(graph)
        (project / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": GRAPHS}))
        health = str(free_port())
        yield project, {"DATABASE_URL": database_url, "HOLDFAST_LOG_FORMAT": "json", "HOLDFAST_HEALTH_PORT": health}


def test_taken_health_port_is_refused_before_anything_starts(server_url: str) -> None:
    with small_project(server_url) as (project, environ), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = {**os.environ, **environ, "HOLDFAST_HEALTH_PORT": str(port)}
        command = holdfast("serve", "--workers", "2", "--port", "0")
        done = subprocess.run(command, env=told, cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.CONFIG, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {line["role"] for line in lines} == {"supervisor"}, "no other process has started"
    last = lines[-1]
    assert last["event"] == "process.refused"
    assert f"HOLDFAST_HEALTH_PORT={port}" in last["error"]


LIFESPAN = """
from contextlib import asynccontextmanager
from fastapi import FastAPI

@asynccontextmanager
async def lifespan(app):
    raise RuntimeError("no such secret")
    yield

app = FastAPI(lifespan=lifespan)
"""


def test_fleet_ends_when_a_child_finds_that_something_must_change(server_url: str) -> None:
    with small_project(server_url) as (project, environ):
        (project / "webapp.py").write_text(LIFESPAN)
        document = {"dependencies": ["."], "graphs": GRAPHS, "http": {"app": "./webapp.py:app"}}
        (project / "langgraph.json").write_text(json.dumps(document))
        command = holdfast("serve", "--workers", "1", "--port", "0")
        told = {**os.environ, **environ}
        done = subprocess.run(command, env=told, cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.CONFIG, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    (refused,) = [line for line in lines if line["event"] == "process.refused"]
    assert refused["role"] == "web"
    assert "http.app: ./webapp.py:app: its lifespan failed to start" in refused["error"]
    assert [line["child"] for line in lines if line["event"] == "fleet.refused"] == ["web"]


def test_supervisor_is_not_ready_while_a_worker_cannot_start(server_url: str) -> None:
    broken = GRAPH + "\nimport os, sys\nif 'worker' in sys.argv:\n    os._exit(7)\n"
    with small_project(server_url, broken) as (project, environ):
        with Program(holdfast("serve", "--workers", "1", "--port", "0"), environ=environ, cwd=project) as program:
            health = f"http://127.0.0.1:{environ['HOLDFAST_HEALTH_PORT']}"
            program.expect('"event":"web.listening"', timeout=120)
            for _ in range(2):
                program.expect('"child":"worker".*"ending":"exit code 7".*"event":"child.ended"', timeout=120)
            answer = httpx.get(f"{health}/ready", timeout=30)
            assert (answer.status_code, answer.text.startswith("worker 1 ")) == (503, True), answer.text
            # Between two tries; while the next one is starting it is not known to be dead.
            wait_for(lambda: httpx.get(f"{health}/live", timeout=30).text == "worker 1 is not running\n", "not alive")
            assert httpx.get(f"{health}/metrics", timeout=30).status_code == 200
            program.process.send_signal(signal.SIGTERM)
            assert program.wait() == ExitCode.OK
        assert "fleet.ready" not in program.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_that_is_stopped_while_it_starts_exits_with_0(server_url: str, number: signal.Signals) -> None:
    slow = GRAPH + "\nimport time\nprint('importing', flush=True)\ntime.sleep(600)\n"
    with (
        small_project(server_url, slow) as (project, environ),
        Program(holdfast("serve", "--workers", "1", "--port", "0"), environ=environ, cwd=project) as program,
    ):
        checks = wait_for(lambda: psutil.Process(program.pid).children(), "the graphs are being imported")
        program.process.send_signal(number)
        assert program.wait() == ExitCode.OK, program.output
        assert program.lines == []
        wait_for(lambda: not any(check.is_running() for check in checks), "the check ends, too")


HANGING = """
import re
from typing import TypedDict

from fastapi import FastAPI
from langgraph.graph import START, StateGraph


class State(TypedDict, total=False):
    text: str


def match(state: State) -> State:
    # Backtracks for about a minute if the text does not match, and keeps Python's global lock meanwhile.
    re.match(r"(a+)+$", state["text"])
    return {}


noisy_graph = waiting_graph = StateGraph(State).add_node("match", match).add_edge(START, "match")
app = FastAPI()


@app.get("/hang")
def hang() -> None:
    match({"text": "a" * 31 + "b"})
"""


@pytest.mark.expects_errors("child.silent")
def test_children_whose_python_stands_still_are_replaced(server_url: str) -> None:
    limits = {"LEASE_DURATION_SECONDS": "3", "HEARTBEAT_INTERVAL_SECONDS": "1", "BLOCKED_LOOP_LIMIT_SECONDS": "3"}
    with small_project(server_url, HANGING) as (project, environ):
        document = {"dependencies": ["."], "graphs": GRAPHS, "http": {"app": "./graph.py:app"}}
        (project / "langgraph.json").write_text(json.dumps(document))
        told = {**environ, **limits, "HOLDFAST_MAX_CRASHES": "1", "WORKER_DRAIN_TIMEOUT": "0"}
        with Program(holdfast("serve", "--workers", "1", "--port", "0"), environ=told, cwd=project) as program:
            url = program.expect(r'"url":"(http://[^"]+)".*"event":"fleet.ready"', timeout=120)[1]
            with httpx.Client(base_url=url, timeout=120) as client:
                health = f"http://127.0.0.1:{environ['HOLDFAST_HEALTH_PORT']}"
                body = {"assistant_id": "noisy", "input": {"text": "a" * 31 + "b"}}
                client.post("/runs", json=body).raise_for_status()
                program.expect('"event":"run.claimed"')
                with suppress(httpx.TransportError):
                    client.get("/hang", timeout=1)
                assert httpx.get(f"{health}/live", timeout=30).status_code == 200, "they are being replaced"
                silent = {program.expect(r'"child":"(\w+)".*"event":"child.silent"')[1] for _ in range(2)}
                assert silent == {"web", "worker"}
                wait_for(lambda: httpx.get(f"{health}/ready", timeout=30).status_code == 200, "the others are ready")
                # The run that kept the lock has a crash, which is one too many. Another one is executed.
                body["input"] = {"text": "aaa"}
                client.post("/runs/wait", json=body).raise_for_status()

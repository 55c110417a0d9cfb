"""The servers of the comparison, and how each is started: with the best settings its documentation names for the load
it gets, and the same graphs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.request import urlopen

from bench.peers.backing import ROOT, Postgres, Redis
from bench.peers.environments import NEWER, build, pinned
from bench.peers.participants import Participant
from bench.peers.processes import Program, environment, free_port, wait_listening
from bench.peers.scenarios import Scenario

PROJECT = Path(__file__).parent / "project"
START_TIMEOUT = 90.0


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    processes: Mapping[str, list[int]]
    """The roots of its processes by what they are: server, postgres, redis."""
    postgres: Postgres | None


@dataclass(frozen=True)
class Order:
    """What a server is to be started for."""

    concurrency: int
    say: Callable[[str], None]
    python: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Server:
    name: Participant
    settings: str
    """In words, for the report: which of its settings were set, and to what."""
    start: Callable[[Order, ExitStack], Running]
    version: Callable[[], str]
    scenarios: tuple[Scenario, ...] = tuple(Scenario)

    @contextmanager
    def running(self, order: Order) -> Iterator[Running]:
        with ExitStack() as stack:
            yield self.start(order, stack)


def _launch(stack: ExitStack, command: list[str], port: int, environ: dict[str, str]) -> tuple[Program, str]:
    """Start it in a copy of the project, where it may leave what it likes, and wait until it listens."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True))
    project = Path(directory) / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
    program = Program(command, environ, project, Path(directory) / "log")
    stack.callback(program.stop)
    wait_listening(program, port, START_TIMEOUT)
    return program, f"http://127.0.0.1:{port}"


def _holdfast(workers: int, *, redis: bool = False) -> Callable[[Order, ExitStack], Running]:
    def start(order: Order, stack: ExitStack) -> Running:
        postgres = stack.enter_context(Postgres())
        # `serve` starts the interpreter it runs on again, so its own source has to be found there too.
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environ = environment(PYTHONPATH=path, DATABASE_URL=postgres.url, HOLDFAST_LOG_LEVEL="warning")
        processes = {"postgres": [postgres.pid]}
        if redis:
            broker = stack.enter_context(Redis())
            environ["REDIS_URL"] = broker.url
            processes["redis"] = [broker.pid]
        # However many workers there are, two are enough for all clients.
        port, jobs = free_port(), -(-order.concurrency // 2)
        command = [sys.executable, "-m", "holdfast", "serve", "--config", "langgraph.json", "--port", str(port)]
        command += ["--workers", str(workers), "--jobs", str(jobs)]
        program, url = _launch(stack, command, port, environ)
        _wait_online(program, url, workers)
        return Running(url, processes | {"server": [program.pid]}, postgres)

    return start


def _wait_online(program: Program, url: str, workers: int) -> None:
    """Until all workers have loaded their graphs. The others do all of it in the process that listens."""
    deadline = time.monotonic() + START_TIMEOUT
    online = 0
    while online < workers:
        program.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{online} of {workers} workers are online after {START_TIMEOUT:g} s")
        time.sleep(0.1)
        with suppress(OSError), urlopen(f"{url}/workers", timeout=5) as answer:
            online = sum(worker["status"] == "online" for worker in json.load(answer))


def _langgraph_dev(order: Order, stack: ExitStack) -> Running:
    programs = build(
        "langgraph-dev", (*NEWER, platform.python_version().rpartition(".")[0]), order.say, python=order.python
    )
    port = free_port()
    command = [str(programs / "langgraph"), "dev", "--no-browser", "--no-reload", "--port", str(port)]
    command += ["--n-jobs-per-worker", str(order.concurrency), "--server-log-level", "warning"]
    environ = environment(LANGGRAPH_CLI_NO_ANALYTICS="1", LANGSMITH_TRACING="false")
    program, url = _launch(stack, command, port, environ)
    return Running(url, {"server": [program.pid]}, None)


def _aegra(order: Order, stack: ExitStack, *, workers: bool) -> Running:
    programs = build("aegra", NEWER, order.say, python=order.python)
    postgres = stack.enter_context(Postgres())
    processes = {"postgres": [postgres.pid]}
    connections = str(order.concurrency)
    environ = environment(
        DATABASE_URL=postgres.url,
        LOG_LEVEL="WARNING",
        SQLALCHEMY_POOL_SIZE=connections,
        LANGGRAPH_MAX_POOL_SIZE=connections,
    )
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port), "--config", "aegra.json"]
    if workers:
        broker = stack.enter_context(Redis())
        processes["redis"] = [broker.pid]
        jobs = str(-(-order.concurrency // 3))
        environ |= {"REDIS_BROKER_ENABLED": "true", "REDIS_URL": broker.url, "ENV_MODE": "PRODUCTION"}
        environ |= {"WORKER_COUNT": "3", "N_JOBS_PER_WORKER": jobs}
        command = [str(programs / "aegra"), "serve", *where]
    else:
        command = [str(programs / "aegra"), "dev", "--no-db-check", "--no-reload", *where]
    program, url = _launch(stack, command, port, environ)
    return Running(url, processes | {"server": [program.pid]}, postgres)


def _own_version() -> str:
    return version("holdfast")


SERVERS = (
    Server(
        name=Participant.HOLDFAST,
        settings="`holdfast serve`, 2 workers, together as many runs at once as there are clients; logs from warning",
        start=_holdfast(2),
        version=_own_version,
    ),
    Server(
        name=Participant.LANGGRAPH_DEV,
        settings="--no-reload, --n-jobs-per-worker as many as there are clients; logs from warning; all in memory",
        start=_langgraph_dev,
        version=lambda: pinned("langgraph-dev", "langgraph-api"),
    ),
    Server(
        name=Participant.AEGRA_DEV,
        settings="`aegra dev --no-reload`; both connection pools as large as there are clients; logs from warning",
        start=lambda order, stack: _aegra(order, stack, workers=False),
        version=lambda: pinned("aegra", "aegra-api"),
    ),
    Server(
        name=Participant.AEGRA_WORKERS,
        settings="`aegra serve` with Redis, 3 worker loops, together as many runs at once as there are clients; both "
        "connection pools as large as there are clients; logs from warning",
        start=lambda order, stack: _aegra(order, stack, workers=True),
        version=lambda: pinned("aegra", "aegra-api"),
    ),
    Server(
        name=Participant.HOLDFAST_REDIS,
        settings="as Holdfast, with the signals over Redis",
        start=_holdfast(2, redis=True),
        version=_own_version,
        scenarios=(Scenario.THREAD, Scenario.FIRST_EVENT, Scenario.TOKENS),
    ),
    Server(
        name=Participant.HOLDFAST_4,
        settings="as Holdfast, with 4 workers of as many jobs each",
        start=_holdfast(4),
        version=_own_version,
        scenarios=(Scenario.THREAD, Scenario.FIVE),
    ),
)

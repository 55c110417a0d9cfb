"""Probes and metrics of all children of a supervisor, on one port (HOLDFAST_HEALTH_PORT).

Each worker answers its own probes on a loopback socket that the supervisor has bound for it. The supervisor sends a
request to each and combines the answers.

/live    503 when a child does not stay running, or a worker can no longer work and has not exited within its grace. A
         worker that exits by itself, or that the supervisor kills because it is silent, is replaced. Then the probe
         stays 200, so that the orchestrator does not kill the other workers.
/ready   503 until the web process answers and every worker takes runs, and while the fleet stops.
/metrics those of all workers, each sample with the label `worker`: 1, 2, … Web processes serve their own.
"""

from __future__ import annotations

import http.client
import math
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.cli.readiness import answers
from holdfast.cli.supervisor import Child, ChildState, Supervisor
from holdfast.telemetry.exposition import families_as_json, families_as_text, merged_families
from holdfast.worker.health import Verdict

ANSWER_TIMEOUT_SECONDS = 2.0
"""How long a worker may take to answer. It answers in a thread of its own, so graph code does not delay it."""
FIRST_ANSWER_TIMEOUT_SECONDS = 0.5
"""The same for a worker that has not answered yet. It is probably starting, and the fleet's probe must not wait."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
CONCURRENT_REQUESTS = 16
LISTEN_BACKLOG = 128
"""How many connections to a worker may wait to be accepted."""


def worker_socket() -> socket.socket:
    """A loopback socket for one worker's probes, on a free port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    # The supervisor listens, not the worker. So a request sent while the worker starts waits in the backlog, and is
    # answered before the worker executes a run whose code may block it.
    listener.listen(LISTEN_BACKLOG)
    return listener


class FleetHealth:
    """The answers of the supervisor's health server. Called from the threads of that server."""

    def __init__(self, supervisor: Supervisor, host: str, port: int, *, replaces_silent: bool = False) -> None:
        """`host` and `port` are those of the web process. `replaces_silent`: the supervisor kills and replaces a worker
        that has not answered for too long."""
        self._supervisor = supervisor
        self._replaces_silent = replaces_silent
        self._host = host
        self._port = port
        # Processes that have answered once. A worker that has never answered is still starting.
        self._answered: set[int] = set()
        # When each process first answered that it cannot go on.
        self._unable_since: dict[int, float] = {}

    def live(self) -> Verdict:
        return self._check_all(self._child_live)

    def ready(self) -> Verdict:
        if self._supervisor.stopping:
            return Verdict(False, "stopping")
        if not answers(self._host, self._port):
            return Verdict(False, "web does not answer")
        return self._check_all(self._child_ready)

    def metrics(self) -> FleetMetrics:
        workers = [state for state in self._supervisor.states() if state.child.probes is not None]
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            found = list(pool.map(lambda state: self._request(state, "/metrics?format=prometheus"), workers))
        texts = {
            str(number): answer[1].decode(errors="replace")
            for number, answer in enumerate(found, 1)
            if answer is not None and answer[0] == http.client.OK
        }
        return FleetMetrics(texts)

    def _check_all(self, problem: Callable[[ChildState, str], str | None]) -> Verdict:
        states = self._supervisor.states()
        # Forget processes that have ended, because the system reuses their pids.
        pids = {state.pid for state in states if state.pid is not None}
        self._answered &= pids
        self._unable_since = {pid: since for pid, since in list(self._unable_since.items()) if pid in pids}
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            problems = [one for one in pool.map(problem, states, _names(states)) if one is not None]
        return Verdict(False, "; ".join(problems)) if problems else Verdict(True)

    def _child_live(self, state: ChildState, name: str) -> str | None:
        if state.pid is None:
            # While a process is being replaced on purpose, there is a moment without one.
            return None if state.replacing or self._supervisor.stopping else f"{name} is not running"
        if state.child.probes is None:
            return None
        # If a silent worker does not fail the probe, do not wait for it: the orchestrator's own timeout may be short.
        answer = self._request(state, "/live", FIRST_ANSWER_TIMEOUT_SECONDS if self._replaces_silent else None)
        if answer is None and (
            self._replaces_silent or state.pid not in self._answered or state.replacing or self._supervisor.stopping
        ):
            return None
        if answer is not None and answer[0] == http.client.OK:
            self._unable_since.pop(state.pid, None)
            return None
        if answer is not None:
            self._unable_since.setdefault(state.pid, time.monotonic())
        # A worker that cannot go on exits by itself, and answers no more while it exits. Wait for that.
        if time.monotonic() - self._unable_since.get(state.pid, -math.inf) <= self._supervisor.grace:
            return None
        return f"{name} (process {state.pid}) does not answer" if answer is None else f"{name}: {_text(answer[1])}"

    def _child_ready(self, state: ChildState, name: str) -> str | None:
        if state.pid is None:
            return f"{name} is not running"
        if state.child.probes is None:
            return None
        answer = self._request(state, "/ready")
        if answer is None:
            return f"{name} (process {state.pid}) does not answer"
        return None if answer[0] == http.client.OK else f"{name}: {_text(answer[1])}"

    def _request(self, state: ChildState, path: str, timeout: float | None = None) -> tuple[int, bytes] | None:
        assert state.child.probes is not None
        if state.pid is None:
            return None
        host, port = state.child.probes.getsockname()
        if timeout is None:
            timeout = ANSWER_TIMEOUT_SECONDS if state.pid in self._answered else FIRST_ANSWER_TIMEOUT_SECONDS
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        if len(body) > MAX_ANSWER_BYTES:
            return None
        self._answered.add(state.pid)
        return answer.status, body


class FleetMetrics:
    """The metrics of all workers, as text and as JSON."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._families = merged_families(texts, "worker")

    def text(self) -> bytes:
        return families_as_text(self._families)

    def json(self) -> dict[str, Any]:
        return {"metrics": families_as_json(self._families)}


def worker_children(command: list[str], number: int) -> list[Child]:
    return [Child("worker", command, worker_socket()) for _ in range(number)]


def _names(states: list[ChildState]) -> list[str]:
    """`web`, `worker 1`, `worker 2` …, numbered as in the label `worker` of the metrics."""
    names, workers = [], 0
    for state in states:
        workers += state.child.probes is not None
        names.append(state.child.name if state.child.probes is None else f"{state.child.name} {workers}")
    return names


def _text(body: bytes) -> str:
    return body.decode(errors="replace").strip()

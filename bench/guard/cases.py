"""What is counted: requests of every kind that clients make often.

A case is a generator. What it does before its first `yield` prepares it; what it does between the first and the second
is counted, with all that the processes do because of it; the rest cleans up.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from bench.scale.clients import INPUTS

EVENTS_AT_ONCE, EVENTS_ONE_BY_ONE = 200, 20
CLIENTS = 30
LISTED = 20
# A run of one step is over before its first entries are written, as it is where nothing is counted.
# Nor does the timer for them fire in a case that is counted later.
NEVER = 3600.0
# The first entries of a run share one commit, however slow the machine is.
LONG_ENOUGH = 0.1


class Driver(Protocol):
    """What a case works with."""

    client: httpx.Client
    port: int
    directory: Path
    listed_thread: str | None
    """The thread whose runs are listed, once there is one."""

    @property
    def pids(self) -> dict[str, int]:
        """The processes of `web` and `worker`."""

    def wait_until_queued(self, runs: int) -> None:
        """Until so many runs are unfinished."""


Steps = Callable[[Driver], Iterator[None]]


@dataclass(frozen=True)
class Case:
    steps: Steps
    what: str
    """What the figures are of, for messages."""
    first_write_delay: float = NEVER
    """Seconds that a run's first entries wait for others, instead of the journal's own."""
    grouped: bool = False
    """Whether requests share statements: how many depends a little on how fast the machine is."""


def thread(driver: Driver) -> str:
    answer = driver.client.post("/threads", json={}).raise_for_status().json()
    return str(answer["thread_id"])


def waited(graph: str, durability: str) -> Steps:
    def steps(driver: Driver) -> Iterator[None]:
        body = {"assistant_id": graph, "input": INPUTS[graph], "durability": durability}
        yield
        path = f"/threads/{thread(driver)}/runs/wait"
        answer = driver.client.post(path, json=body).raise_for_status().json()
        yield
        if "__error__" in answer:
            raise RuntimeError(f"a run failed: {answer}")

    return steps


def frames(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """The events of a stream, as they come."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@contextmanager
def streaming(driver: Driver, graph: str, given: Any) -> Iterator[Iterator[tuple[str, Any]]]:
    body = {"assistant_id": graph, "input": given, "stream_mode": ["custom"]}
    with driver.client.stream("POST", f"/threads/{thread(driver)}/runs/stream", json=body) as answer:
        answer.raise_for_status()
        yield frames(answer.iter_lines())


def expect_event(number: int, found: Iterator[tuple[str, Any]]) -> None:
    for name, data in found:
        if name == "custom" and data["number"] == number:
            return
    raise RuntimeError(f"the stream ended before event {number}")


def burst(driver: Driver) -> Iterator[None]:
    yield
    with streaming(driver, "speech", {"events": EVENTS_AT_ONCE}) as found:
        for number in range(EVENTS_AT_ONCE):
            expect_event(number, found)
        for name, data in found:
            raise RuntimeError(f"more than was asked for: {name} {data}")
    yield


def gated(warm_up: int, counted: int) -> Steps:
    """Events each of which the graph says when the one before has come. Those to warm up are not counted."""

    def steps(driver: Driver) -> Iterator[None]:
        path = driver.directory / "gate.sock"
        path.unlink(missing_ok=True)
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen()
            if not warm_up:
                yield
            found = stack.enter_context(streaming(driver, "on_demand", {"gate": str(path)}))
            gate, _ = listener.accept()
            stack.callback(gate.close)
            for number in range(warm_up + counted):
                if number and number == warm_up:
                    yield
                gate.sendall(b".")
                expect_event(number, found)
            yield
            gate.close()
            for _ in found:
                pass

    return steps


def at_once(driver: Driver) -> Iterator[None]:
    """The requests are all there when the web process looks, and all runs when the worker does: both are stopped
    meanwhile, so that how many share a commit is no matter of chance."""
    with ExitStack() as stack:
        clients = [http.client.HTTPConnection("127.0.0.1", driver.port, timeout=60) for _ in range(CLIENTS)]
        for client in clients:
            stack.callback(client.close)
            client.connect()
        paths = [f"/threads/{thread(driver)}/runs/wait" for _ in clients]
        body = json.dumps({"assistant_id": "one", "input": INPUTS["one"]})
        yield
        with stopped(driver.pids["worker"]):
            with stopped(driver.pids["web"]):
                for client, path in zip(clients, paths, strict=True):
                    client.request("POST", path, body, {"content-type": "application/json"})
            driver.wait_until_queued(CLIENTS)
        for client in clients:
            answer = client.getresponse()
            text = answer.read()
            if answer.status != 200 or b"__error__" in text:
                raise RuntimeError(f"a run failed: {answer.status} {text.decode()}")
        yield


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def lists(driver: Driver) -> Iterator[None]:
    """Two pages of threads, a page of a thread's runs, and a page of assistants."""
    if (mine := driver.listed_thread) is None:
        mine = driver.listed_thread = thread(driver)
        for _ in range(LISTED):
            driver.client.post(f"/threads/{mine}/runs", json={"assistant_id": "one", "input": {}}).raise_for_status()
        driver.wait_until_queued(0)
    requests: list[tuple[str, str, Any]] = [
        ("POST", "/threads/search", {"limit": LISTED}),
        ("POST", "/threads/search", {"limit": LISTED, "status": "idle", "sort_by": "created_at"}),
        ("GET", f"/threads/{mine}/runs?limit={LISTED}", None),
        ("POST", "/assistants/search", {"limit": LISTED}),
    ]
    yield
    for method, path, body in requests:
        driver.client.request(method, path, json=body).raise_for_status()
    yield


# With `sync` every step waits for its commit. Otherwise how many steps share one, and with it the number of statements,
# would depend on how fast the machine is at this moment; a run of one step has but one to wait for.
CASES = {
    "one step": Case(waited("one", "async"), "a run of one step"),
    "five steps": Case(waited("five", "sync"), "a run of five steps"),
    "first event": Case(gated(0, 1), "the first event of a run", LONG_ENOUGH),
    "events one by one": Case(gated(1, EVENTS_ONE_BY_ONE), f"{EVENTS_ONE_BY_ONE} events one by one", LONG_ENOUGH),
    "events at once": Case(burst, f"a stream of {EVENTS_AT_ONCE} events"),
    "runs at once": Case(at_once, f"{CLIENTS} runs at once", grouped=True),
    "lists": Case(lists, "lists of threads, runs and assistants"),
}

"""The client: the same for every server. It checks what it gets, and its own CPU is part of the result."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.peers.scenarios import STREAMS, Scenario, check_events, check_values, request
from bench.peers.window import Counter, Window, WrongAnswer, busy

REQUEST_TIMEOUT = 90.0
WATCHERS = 4
"""Clients that ask, one run after the other, whether a background run has ended."""
ASK_AGAIN = 0.02
MOST_DRAINED = 3000
LOOKED_AT = 20
"""Background runs whose values are read when all have ended."""
FIRST_EVENTS = 100
WARM_UP_EVENTS = 5


@dataclass
class Drained:
    """What enqueue-and-drain found besides its window."""

    enqueued: int = 0
    enqueue_seconds: float = 0.0


@dataclass
class FirstEvents:
    """Seconds from a request to the first event of its stream, which says that it is accepted, and to the first event
    of the run."""

    first: list[float] = field(default_factory=list)
    content: list[float] = field(default_factory=list)


class Tally:
    """Counts a name in what comes piece by piece. It may lie across two pieces; what is looked at again is too short to
    hold the whole of it."""

    def __init__(self, name: bytes) -> None:
        self._name = name
        self._rest = b""

    def count(self, piece: bytes) -> int:
        data = self._rest + piece
        self._rest = data[-len(self._name) + 1 :]
        return data.count(self._name)


class Load:
    """Use as a context manager. `look` is called at both ends of what is measured."""

    def __init__(self, url: str, concurrency: int, look: Callable[[], Any] = lambda: None) -> None:
        self._url = url
        self._concurrency = concurrency
        self._look = look

    async def __aenter__(self) -> Load:
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT)
        self._session = aiohttp.ClientSession(self._url, connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        async with self._session.request(method, path, json=body) as response:
            text = await response.read()
            if response.status >= 300:
                raise WrongAnswer(f"{method} {path}: {response.status} {text[:300]!r}")
            return json.loads(text)

    async def thread(self) -> str:
        return str((await self._ask("POST", "/threads", {}))["thread_id"])

    async def _threads(self, count: int) -> list[str]:
        """Made beforehand, where what it costs to make them is not the matter."""
        found = [""] * count
        left = iter(range(count))

        async def client() -> None:
            for number in left:
                found[number] = await self.thread()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._concurrency):
                tasks.create_task(client())
        return found

    async def perform(self, scenario: Scenario, number: int) -> None:
        """One run, from the first request to the checked answer."""
        prefix = "" if scenario is Scenario.STATELESS else f"/threads/{await self.thread()}"
        values = await self._ask("POST", f"{prefix}/runs/wait", request(scenario, number))
        check_values(scenario, number, values)

    async def waits(self, scenario: Scenario, seconds: float, warm_up: float) -> Window:
        return await busy(
            lambda number: self.perform(scenario, number),
            concurrency=self._concurrency,
            seconds=seconds,
            warm_up=warm_up,
            look=self._look,
        )

    async def stream(self, scenario: Scenario, counter: Counter, kept: list[bytes]) -> None:
        """One streamed run on a new thread. Its events are counted as they arrive and looked at afterwards."""
        thread = await self.thread()
        tally = Tally(f"event: {STREAMS[scenario][2]}".encode())
        body = []
        async with self._session.post(f"/threads/{thread}/runs/stream", json=request(scenario, 0)) as response:
            if response.status != 200:
                raise WrongAnswer(f"{response.status} {(await response.read())[:300]!r}")
            async for chunk in response.content.iter_any():
                counter.events += tally.count(chunk)
                body.append(chunk)
        kept.append(b"".join(body))

    async def streams(self, scenario: Scenario, seconds: float, warm_up: float) -> Window:
        counter, kept = Counter(), list[bytes]()
        window = await busy(
            lambda _: self.stream(scenario, counter, kept),
            concurrency=self._concurrency,
            seconds=seconds,
            warm_up=warm_up,
            waves=1,  # Two hundred events each: the slowest takes half a minute for a wave.
            look=self._look,
            counter=counter,
        )
        for body in kept:
            contents = [data for name, data in events(body) if name == STREAMS[scenario][2]]
            check_events(scenario, contents)
        return window

    async def first_events(self, seconds: float) -> tuple[Window, FirstEvents]:
        """One at a time, on a thread made beforehand: from the request to the first event."""
        found, window = FirstEvents(), Window()
        for number in range(1, WARM_UP_EVENTS + 1):
            await self._first_event(number, FirstEvents())
        window.before, started = self._look(), time.perf_counter()
        while len(found.first) < FIRST_EVENTS:
            if time.perf_counter() - started > seconds and len(found.first) >= WARM_UP_EVENTS:
                break
            await self._first_event(len(found.first), found)
        window.seconds, window.after = time.perf_counter() - started, self._look()
        window.runs, window.latencies = len(found.first), found.first
        return window, found

    async def _first_event(self, number: int, found: FirstEvents) -> None:
        thread = await self.thread()
        body = bytearray()
        first = content = 0.0
        began = time.perf_counter()
        path = f"/threads/{thread}/runs/stream"
        async with self._session.post(path, json=request(Scenario.FIRST_EVENT, number)) as response:
            async for chunk in response.content.iter_any():
                now = time.perf_counter()
                body += chunk
                if not first and b"event: " in body:
                    first = now
                if not content and b"event: values" in body:
                    content = now
        values = [data for name, data in events(bytes(body)) if name == "values"]
        check_values(Scenario.FIRST_EVENT, number, values[-1] if values else None)
        found.first.append(first - began)
        found.content.append(content - began)

    async def some(self, scenario: Scenario, count: int) -> None:
        """So many runs, no more: for counting, not for timing."""
        if scenario is Scenario.DRAIN:
            await self._drain(count)
            return
        left = iter(range(count))

        async def client() -> None:
            for number in left:
                if scenario.streams:
                    await self.stream(scenario, Counter(), [])
                else:
                    await self.perform(scenario, number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._concurrency):
                tasks.create_task(client())

    async def drain(self, seconds: float) -> tuple[Window, Drained]:
        """Background runs, a thread each: enqueue them all, then wait until the last has ended.

        How many depends on how fast the server was with a first small batch, so that everybody is busy for about as
        long.
        """
        probe, _ = await self._drain(self._concurrency)
        count = min(max(int(probe.rate * seconds), 2 * self._concurrency), MOST_DRAINED)
        return await self._drain(count)

    async def _drain(self, count: int) -> tuple[Window, Drained]:
        threads = await self._threads(count)
        left = iter(enumerate(threads))
        runs: deque[tuple[str, str]] = deque()
        window, drained = Window(runs=count), Drained(enqueued=count)

        async def enqueue() -> None:
            for number, thread in left:
                began = time.perf_counter()
                run = await self._ask("POST", f"/threads/{thread}/runs", request(Scenario.DRAIN, number))
                window.latencies.append(time.perf_counter() - began)
                runs.append((thread, run["run_id"]))

        async def watch() -> None:
            while runs:
                thread, run_id = runs.popleft()
                while (status := (await self._ask("GET", f"/threads/{thread}/runs/{run_id}"))["status"]) != "success":
                    if status not in ("pending", "running"):
                        raise WrongAnswer(f"a background run ended as {status}")
                    await asyncio.sleep(ASK_AGAIN)

        window.before, started = self._look(), time.perf_counter()
        async with asyncio.timeout(REQUEST_TIMEOUT):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._concurrency):
                    tasks.create_task(enqueue())
            drained.enqueue_seconds = time.perf_counter() - started
            async with asyncio.TaskGroup() as tasks:
                for _ in range(WATCHERS):
                    tasks.create_task(watch())
        window.seconds, window.after = time.perf_counter() - started, self._look()
        for number, thread in list(enumerate(threads))[:: max(1, count // LOOKED_AT)]:
            state = await self._ask("GET", f"/threads/{thread}/state")
            check_values(Scenario.DRAIN, number, state["values"])
        return window, drained


def events(body: bytes) -> list[tuple[str, Any]]:
    """The events of a stream, name and data, whichever line ends the server likes."""
    found = []
    for frame in body.replace(b"\r\n", b"\n").split(b"\n\n"):
        fields = dict(line.partition(b": ")[::2] for line in frame.split(b"\n") if line and not line.startswith(b":"))
        if b"event" in fields:
            found.append((fields[b"event"].decode(), json.loads(fields.get(b"data") or b"null")))
    return found

"""Keeping a server busy, and counting only while it is.

A fixed number of clients each start their next run when the last has ended. Counting begins when the server has warmed
up and ends before the clients stop, so that neither the start nor the last stragglers are in the figure. Both marks are
set at the end of a run, and as many runs lie before and between them as are a multiple of the clients: a slow server's
runs all begin and end together, in waves, and half a wave would say anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

PATIENCE = 90.0
"""Seconds after which a server whose runs do not end counts as stuck."""


class WrongAnswer(Exception):
    """The server answered, but not what the graph says."""


@dataclass
class Window:
    """What was seen between the two marks."""

    runs: int = 0
    seconds: float = 0.0
    events: int = 0
    latencies: list[float] = field(default_factory=list)
    """Seconds each run took."""
    before: Any = None
    after: Any = None
    """What `look` gave at the marks: such as CPU seconds."""

    @property
    def rate(self) -> float:
        return self.runs / self.seconds

    @property
    def event_rate(self) -> float:
        return self.events / self.seconds


def percentile(values: list[float], share: int) -> float:
    """In the unit of the values. Of very few values the highest percentiles are the largest one."""
    if len(values) == 1:
        return values[0]
    return median(values) if share == 50 else quantiles(values, n=100, method="inclusive")[share - 1]


class Counter:
    """Events counted as they arrive, whichever run they belong to."""

    def __init__(self) -> None:
        self.events = 0


async def busy(
    perform: Callable[[int], Awaitable[None]],
    *,
    concurrency: int,
    seconds: float,
    warm_up: float,
    waves: int = 2,
    look: Callable[[], Any] = lambda: None,
    counter: Counter | None = None,
) -> Window:
    """Perform one run after the other, `concurrency` at a time, until the window is `seconds` long and has
    `waves` times as many runs in it. The first exception ends it and is raised."""
    counter = counter or Counter()
    window = Window()
    began = time.perf_counter()
    number = ended = events = 0
    mark: float | None = None
    over = asyncio.Event()

    def note(took: float) -> None:
        """At the end of each run: count it, and set the marks when it is time."""
        nonlocal ended, events, mark
        ended += 1
        now = time.perf_counter()
        if mark is not None:
            window.latencies.append(took)
        if ended % concurrency:
            return
        if mark is None and now - began >= warm_up:
            mark, ended, events = now, 0, counter.events
            window.before = look()
        elif mark is not None and now - mark >= seconds and ended >= waves * concurrency:
            window.runs, window.seconds, window.events = ended, now - mark, counter.events - events
            window.after = look()
            over.set()

    async def client() -> None:
        nonlocal number
        while not over.is_set():
            number += 1
            started = time.perf_counter()
            await perform(number)
            if not over.is_set():
                note(time.perf_counter() - started)

    async def watch() -> None:
        patience = seconds + warm_up + (waves + 1) * PATIENCE
        try:
            await asyncio.wait_for(over.wait(), patience)
        except TimeoutError:
            raise TimeoutError(f"only {ended} runs ended in {patience:g} s") from None

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())
        for _ in range(concurrency):
            tasks.create_task(client())
    return window

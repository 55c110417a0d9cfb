"""The threads that plain (not async) nodes run in.

Nobody can stop a thread. A run whose node blocks one is cancelled or handed back without it, and a worker that leaves
does not wait for it: the run goes on elsewhere. But the thread stays occupied, so it is counted: a worker without free
threads must not claim, and one that cannot get them back is replaced.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import ParamSpec, TypeVar

from holdfast.telemetry.run_context import current_run

PREFIX = "node"

Attempted = tuple[str, int]
"""A run's id and the number of the attempt at it."""

# Seconds that a call which belongs to no run may take before it counts as one that hangs.
SHARED_CALL_SECONDS = 60.0

P = ParamSpec("P")
T = TypeVar("T")


class NodeThreads(ThreadPoolExecutor):
    """The event loop's default executor, which is where LangGraph runs plain nodes.

    Roomier than asyncio's own, which has six threads on two cores: fewer than a worker has runs by default.
    """

    def __init__(self, jobs: int) -> None:
        self.places = max(32, 2 * jobs)
        super().__init__(max_workers=self.places, thread_name_prefix=PREFIX)
        self._numbers = count()
        # Of calls that wait for a thread: since when. Of calls in one: the attempt they belong to, and since when.
        # Read by other threads.
        self._waiting: dict[int, float] = {}
        self._running: dict[int, tuple[Attempted | None, float]] = {}
        # Of calls whose attempt has ended: when that was noticed.
        self._ended_since: dict[int, float] = {}

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        number = next(self._numbers)
        run = current_run()
        attempted = (run["run_id"], run["attempt"]) if run else None

        def call() -> T:
            self._waiting.pop(number, None)
            self._running[number] = (attempted, time.monotonic())
            try:
                return fn(*args, **kwargs)
            finally:
                del self._running[number]

        self._waiting[number] = time.monotonic()
        future = super().submit(call)
        # A call that is cancelled before it has a thread is never called.
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        return future

    def longest_wait(self) -> float:
        """Seconds that the first call in the queue has waited for a thread; 0 if none waits."""
        waiting = list(self._waiting.values())
        return time.monotonic() - waiting[0] if waiting else 0.0

    def abandoned(self, held: Collection[Attempted], seconds: float = 0.0) -> int:
        """Threads that are occupied by calls of attempts that ended `seconds` ago or earlier: those that are not
        `held`. Until then a call may just be finishing. A call that belongs to no run, such as one that embeds items of
        the store for several, counts when it has taken too long."""
        now = time.monotonic()
        running = dict(self._running)
        for number in self._ended_since.keys() - running.keys():
            self._ended_since.pop(number, None)
        count = 0
        for number, (attempted, began) in running.items():
            if attempted is None:
                count += now - began > SHARED_CALL_SECONDS
            elif attempted not in held:
                count += now - self._ended_since.setdefault(number, now) >= seconds
        return count

    async def end(self, patience: float) -> int:
        """Let idle threads end. Returns how many are still busy when the patience is over."""
        self.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + patience
        while busy := sum(thread.name.startswith(PREFIX) for thread in threading.enumerate()):
            if time.monotonic() > deadline:
                return busy
            await asyncio.sleep(0.01)
        return 0

"""The threads that plain (not async) nodes run in.

Python cannot stop a thread. A run whose node blocks one is cancelled or handed back all the same, and a worker that
stops does not wait for the thread. But the thread stays occupied, so it is counted. A worker without free threads must
not claim, and one that does not get them back is replaced.

A run always gets one thread. It gets more, for parallel nodes, only while one thread for each slot of the worker stays
free. So a step of a hundred nodes that hang delays no other run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, ParamSpec, TypeVar

from holdfast.telemetry.run_context import current_run

PREFIX = "node"

Attempted = tuple[str, int]
"""A run's id and the number of the attempt at it."""

# Seconds that a call which belongs to no run may take before it counts as one that hangs.
SHARED_CALL_SECONDS = 60.0

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class _Call:
    number: int
    attempted: Attempted | None
    future: Future[Any]
    work: Callable[[], None]


class NodeThreads(ThreadPoolExecutor):
    """The event loop's default executor, which is where LangGraph runs plain nodes.

    Larger than asyncio's own, which has six threads on two cores: fewer than a worker has runs by default.
    """

    def __init__(self, jobs: int) -> None:
        """`jobs`: how many runs the worker may hold."""
        self._jobs = jobs
        self.places = jobs + max(32, jobs)
        super().__init__(max_workers=self.places, thread_name_prefix=PREFIX)
        self._numbers = count()
        # The lock guards the calls. Of those that wait for a thread: since when. Of those in one: the attempt they
        # belong to, and since when.
        self._lock = threading.Lock()
        self._waiting: dict[int, float] = {}
        self._running: dict[int, tuple[Attempted | None, float]] = {}
        # How many calls each attempt has in a thread, or waiting for one.
        self._admitted: dict[Attempted, int] = {}
        # Further calls of attempts, which wait until there are enough free threads.
        self._parked: dict[Attempted, deque[_Call]] = {}
        # Of calls whose attempt has ended: when that was noticed.
        self._ended_since: dict[int, float] = {}

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        number = next(self._numbers)
        run = current_run()
        attempted = (run["run_id"], run["attempt"]) if run else None
        future: Future[T] = Future()

        def work() -> None:
            with self._lock:
                self._waiting.pop(number, None)
                self._running[number] = (attempted, time.monotonic())
            try:
                if not future.set_running_or_notify_cancel():
                    self._leave(call)
                    return
                result = fn(*args, **kwargs)
            except BaseException as error:
                self._leave(call)
                future.set_exception(error)
            else:
                self._leave(call)
                future.set_result(result)

        call = _Call(number, attempted, future, work)
        # A call that is cancelled before it has a thread is never called.
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        with self._lock:
            if attempted is None or self._may_begin(attempted):
                self._begin(call)
            else:
                self._parked.setdefault(attempted, deque()).append(call)
        return future

    def _may_begin(self, attempted: Attempted) -> bool:
        """Whether another call of an attempt may have a thread, or wait for the next free one."""
        if attempted not in self._admitted:
            return True
        return self.places - len(self._running) - len(self._waiting) > self._jobs

    def _begin(self, call: _Call) -> None:
        super().submit(call.work)
        self._waiting[call.number] = time.monotonic()
        if call.attempted is not None:
            self._admitted[call.attempted] = self._admitted.get(call.attempted, 0) + 1

    def _leave(self, call: _Call) -> None:
        """A call is over, or was cancelled. Begin what was parked and may begin now."""
        with self._lock:
            self._running.pop(call.number, None)
            if call.attempted is not None:
                self._admitted[call.attempted] -= 1
                if not self._admitted[call.attempted]:
                    del self._admitted[call.attempted]
            for attempted in list(self._parked):
                self._begin_parked(attempted)

    def _begin_parked(self, attempted: Attempted) -> None:
        calls = self._parked.pop(attempted)
        while calls and (calls[0].future.cancelled() or self._may_begin(attempted)):
            call = calls.popleft()
            if call.future.cancelled():
                continue
            try:
                self._begin(call)
            except RuntimeError:
                # The executor was shut down, because the worker ends.
                call.future.cancel()
        if calls:
            # Behind those of other attempts, so that all attempts take turns.
            self._parked[attempted] = calls

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

    async def end(self, timeout: float) -> int:
        """Let idle threads end. Returns how many are still busy after the timeout."""
        self.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + timeout
        while busy := sum(thread.name.startswith(PREFIX) for thread in threading.enumerate()):
            if time.monotonic() > deadline:
                return busy
            await asyncio.sleep(0.01)
        return 0

"""Reports graph code that blocks the worker's event loop: the line, the run, for how long, and what to do about it.

While one node blocks, no other run of the worker continues, no event is written and no cancel is obeyed. The heartbeat
has its own thread, so the worker keeps its lease. This must not last for ever: after a limit the worker is replaced.
"""

from __future__ import annotations

import asyncio
import gc
import linecache
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import Context
from dataclasses import dataclass
from types import FrameType
from typing import Any

import structlog

from holdfast.lifecycle.service import ThreadService
from holdfast.telemetry.exceptions import is_package, is_project
from holdfast.telemetry.run_context import run_of_context

log = structlog.get_logger(__name__)

REMEDY = (
    "await an async client (or asyncio.sleep) instead, move the call into `await asyncio.to_thread(...)`, or make the "
    "node a plain `def`: those run in threads"
)
# How many frames of the stack are logged: the innermost ones.
SHOWN_FRAMES = 12
# Seconds between two looks at a loop that is blocked.
LOOK_SECONDS = 1.0
# While no run is executed, the loop is checked once in so many intervals.
IDLE_INTERVALS = 10


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


class LoopWatchdog(ThreadService):
    """A thread that schedules a callback on the event loop, and looks at the loop's stack when it is not called in
    time. While no run is executed (`occupied`) it does so less often, because each time costs CPU.

    `still_blocked` is called in this thread, about every second while the loop is blocked, with what blocks it.

    `blocked_total`, `blocked_seconds_total` and `blocked_for` may be read from any thread.
    """

    name = "loop-watchdog"

    def __init__(
        self,
        threshold: float,
        occupied: Callable[[], bool] = lambda: True,
        still_blocked: Callable[[Mapping[str, Any]], None] = lambda about: None,
    ) -> None:
        super().__init__()
        self.blocked_total = 0
        # Seconds that this thread has seen the loop blocked. The time in which the whole process was stopped does not
        # count.
        self.blocked_for = 0.0
        self._still_blocked = still_blocked
        self._threshold = threshold
        self._occupied = occupied
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._end = threading.Event()
        self._over = 0.0
        # When the callback was scheduled that the loop has not called in time. None: the loop is not blocked.
        self._blocked_since: float | None = None

    @property
    def blocked_seconds_total(self) -> float:
        """For how long the loop has been blocked in all, the present block included."""
        since = self._blocked_since
        return self._over + (0.0 if since is None else time.monotonic() - since)

    def _wake_to_end(self) -> None:
        self._end.set()
        self._answered.set()

    def _work(self) -> None:
        idle = 0
        # Ten times within the threshold, so that a call that blocks for longer is always noticed.
        while not self._end.wait(self._threshold * 0.1):
            idle = 0 if self._occupied() else idle + 1
            if idle % IDLE_INTERVALS:
                continue
            self._answered.clear()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                return  # The loop is closed.
            if self._answered.wait(self._threshold * 0.9) or self._end.is_set():
                continue
            self._blocked_since = asked
            self.blocked_total += 1
            about = self._look()
            seconds = round(time.monotonic() - asked, 1)
            log.warning("loop.blocked", seconds=seconds, remedy=REMEDY, stack=self._stack(), **about)
            self.blocked_for = self._threshold * 0.9
            while not self._answered.wait(LOOK_SECONDS):
                if self._loop.is_closed() or self._end.is_set():
                    return
                self.blocked_for += LOOK_SECONDS
                # Not what was found first: one task after the other may block the loop.
                self._still_blocked(self._look())
            if self._end.is_set():
                return
            self.blocked_for = 0.0
            self._over, self._blocked_since = self.blocked_seconds_total, None
            log.info("loop.unblocked", seconds=round(time.monotonic() - asked, 1), **about)

    def _look(self) -> dict[str, Any]:
        """The line that blocks, and the run it belongs to. The loop may continue while this looks."""
        try:
            about: dict[str, Any] = dict(self._current_run())
            place = blocking_place(sys._current_frames().get(self._loop_thread))
            if place is not None:
                about |= {"file": place.file, "line": place.line, "function": place.function, "source": place.source}
        except Exception:
            # A loop that is blocked must be reported even if it is not known what blocks it.
            log.exception("loop.look_failed")
            return {}
        return about

    def _current_run(self) -> Mapping[str, Any]:
        task = asyncio.current_task(self._loop)
        context = None if task is None else context_of(task)
        return {} if context is None else run_of_context(context)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-SHOWN_FRAMES:]).rstrip()


def context_of(task: asyncio.Task[Any]) -> Context | None:
    """The context that a task runs in, which Python tells from 3.12 on."""
    if sys.version_info >= (3, 12):
        return task.get_context()
    return next((held for held in gc.get_referents(task) if isinstance(held, Context)), None)


def blocking_place(frame: FrameType | None) -> Place | None:
    """The innermost line of the project's own code. Where graphs are installed as packages there is none: then the
    outermost line that belongs neither to Python nor to what runs the graph."""
    installed: Place | None = None
    while frame is not None:
        code = frame.f_code
        place = Place(code.co_filename, frame.f_lineno, code.co_name)
        if is_project(code.co_filename):
            return place
        if is_package(code.co_filename):
            installed = place
        frame = frame.f_back
    return installed

"""Reports graph code that blocks the worker's event loop: the line, the run, for how long, and what to do about it.

While one node blocks, no other run of the worker goes on, no event is written and no cancel is heard. The heartbeat has
a thread of its own, so the lease is not at stake. That must not last for ever: the worker is told, and leaves.
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

from holdfast.telemetry.exceptions import is_package, is_project
from holdfast.telemetry.run_context import run_in

log = structlog.get_logger(__name__)

REMEDY = (
    "await an async client (or asyncio.sleep) instead, move the call into `await asyncio.to_thread(...)`, or make the "
    "node a plain `def`: those run in threads"
)
# Of the stack, the frames nearest to what blocks.
SHOWN_FRAMES = 12
# Between two looks at a loop that is blocked.
LOOK_SECONDS = 1.0
# How many times as seldom a loop is asked that has nothing to do.
SELDOM = 10


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


class LoopWatchdog:
    """A thread that asks the loop for a sign of life and looks at its stack when none comes. While there is nothing
    that could block it, not being `occupied`, it does so seldom: each time costs a little of what others could have.

    `still_blocked` is called in this thread, about every second while the loop is blocked, with what blocks it.

    `blocked_total`, `blocked_seconds_total` and `blocked_for` may be read from any thread.
    """

    def __init__(
        self,
        threshold: float,
        occupied: Callable[[], bool] = lambda: True,
        still_blocked: Callable[[Mapping[str, Any]], None] = lambda about: None,
    ) -> None:
        self.blocked_total = 0
        # Seconds that the loop has been blocked, as far as this thread has seen it. A process that was stopped as a
        # whole was not blocked all that time.
        self.blocked_for = 0.0
        self._still_blocked = still_blocked
        self._threshold = threshold
        self._occupied = occupied
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._stop = threading.Event()
        self._over = 0.0
        # When the loop was asked what it has not answered yet, once that is too long ago.
        self._blocked_since: float | None = None
        self._started = False
        self._thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)

    @property
    def blocked_seconds_total(self) -> float:
        """For how long the loop has been blocked in all, with what blocks it now."""
        since = self._blocked_since
        return self._over + (0.0 if since is None else time.monotonic() - since)

    @property
    def ended(self) -> bool:
        """Whether the thread has ended without having been asked to."""
        return self._started and not self._stop.is_set() and not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()
        self._started = True

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        idle = 0
        # Asked ten times within the threshold, so that whatever blocks for longer is always caught.
        while not self._stop.wait(self._threshold * 0.1):
            idle = 0 if self._occupied() else idle + 1
            if idle % SELDOM:
                continue
            self._answered.clear()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                return  # The loop is closed.
            if self._answered.wait(self._threshold * 0.9) or self._stop.is_set():
                continue
            self._blocked_since = asked
            self.blocked_total += 1
            about = self._look()
            seconds = round(time.monotonic() - asked, 1)
            log.warning("loop.blocked", seconds=seconds, remedy=REMEDY, stack=self._stack(), **about)
            self.blocked_for = self._threshold * 0.9
            while not self._answered.wait(LOOK_SECONDS):
                if self._loop.is_closed() or self._stop.is_set():
                    return
                self.blocked_for += LOOK_SECONDS
                # Not what was found first: one task after the other may block the loop.
                self._still_blocked(self._look())
            self.blocked_for = 0.0
            self._over, self._blocked_since = self.blocked_seconds_total, None
            log.info("loop.unblocked", seconds=round(time.monotonic() - asked, 1), **about)

    def _look(self) -> dict[str, Any]:
        """What blocks: the line, and the run it belongs to. The loop goes on meanwhile, or does not."""
        try:
            about: dict[str, Any] = dict(self._current_run())
            place = blocking_place(sys._current_frames().get(self._loop_thread))
            if place is not None:
                about |= {"file": place.file, "line": place.line, "function": place.function, "source": place.source}
        except Exception:
            # The loop must not block for ever because nobody can tell what blocks it.
            log.exception("loop.look_failed")
            return {}
        return about

    def _current_run(self) -> Mapping[str, Any]:
        task = asyncio.current_task(self._loop)
        context = None if task is None else context_of(task)
        return {} if context is None else run_in(context)

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

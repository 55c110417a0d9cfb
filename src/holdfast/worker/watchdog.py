"""Reports graph code that blocks the worker's event loop, with the stack it blocks in."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback

import structlog

log = structlog.get_logger(__name__)


class LoopWatchdog:
    """A thread that asks the loop for a sign of life and looks at its stack when none comes."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._answered = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        # Asked ten times within the threshold, so that whatever blocks for longer is always caught.
        while not self._stop.wait(self._threshold * 0.1):
            self._answered.clear()
            asked = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:
                return  # The loop is closed.
            if self._answered.wait(self._threshold * 0.9) or self._stop.is_set():
                continue
            log.warning(
                "loop.blocked",
                seconds=round(time.monotonic() - asked, 1),
                stack=self._stack(),
                remedy="await instead of blocking, or make the node a plain function: those run in threads",
            )
            self._answered.wait()
            log.info("loop.unblocked", seconds=round(time.monotonic() - asked, 1))

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-12:]).rstrip()

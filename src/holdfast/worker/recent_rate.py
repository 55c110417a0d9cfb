"""How often something happened lately."""

from __future__ import annotations

import threading
import time


class Rate:
    """Counts over a sliding window, in sixty parts. Written by one thread and read by others."""

    PARTS = 60

    def __init__(self, window: float) -> None:
        self._part = window / self.PARTS
        self._counts: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        if number:
            now = int(time.monotonic() / self._part)
            with self._lock:
                self._counts[now] = self._counts.get(now, 0) + number
                self._forget(now)

    def count(self) -> int:
        """How many there were in the window that ends now."""
        with self._lock:
            self._forget(int(time.monotonic() / self._part))
            return sum(self._counts.values())

    def _forget(self, now: int) -> None:
        for part in [part for part in self._counts if part <= now - self.PARTS]:
            del self._counts[part]

"""How many runs a worker has claimed in the last minute."""

from __future__ import annotations

import threading
import time

PARTS = 60


class ClaimRate:
    """Counts over a sliding window, in parts. The event loop writes, and the heartbeat's thread reads."""

    def __init__(self, window_seconds: float = 60.0) -> None:
        self._part_seconds = window_seconds / PARTS
        self._counts: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        if number:
            now = int(time.monotonic() / self._part_seconds)
            with self._lock:
                self._counts[now] = self._counts.get(now, 0) + number
                self._drop_old(now)

    def count(self) -> int:
        """How many there were in the window that ends now."""
        with self._lock:
            self._drop_old(int(time.monotonic() / self._part_seconds))
            return sum(self._counts.values())

    def _drop_old(self, now: int) -> None:
        for part in [part for part in self._counts if part <= now - PARTS]:
            del self._counts[part]

"""How much a sweep takes at a time: as much as it gets done in a moment, whatever that is today.

A thread may hold ten rows or a million, so a fixed number of threads would hold their locks for a moment or for
minutes.
"""

from __future__ import annotations

# Seconds that one portion should take.
MOMENT = 0.25
FIRST = 50
MOST = 500


class Portion:
    """`size` is what to take next. It shrinks when the last took too long, and grows while there is more."""

    def __init__(self, first: int = FIRST, most: int = MOST) -> None:
        self.size = min(first, most)
        self._most = most

    def took(self, count: int, seconds: float) -> bool:
        """The last portion had `count`. Returns whether there may be more."""
        more = count >= self.size
        if seconds > MOMENT:
            self.size = max(1, self.size // 2)
        elif more and seconds < MOMENT / 2:
            self.size = min(self._most, self.size * 2)
        return more

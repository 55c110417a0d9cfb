"""Which request bodies are handled at once: bounded by their bytes.

A body takes up to twenty times its bytes when it is parsed. So few large ones are handled at a time, and the others
wait as they were received.
"""

from __future__ import annotations

from collections.abc import Callable


class BodyTurns:
    """Turns of complete bodies, in the order in which they came. `key` is what a body belongs to."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._handled_bytes = 0
        self._handled: dict[object, int] = {}
        self._waiting: dict[object, tuple[int, Callable[[], None]]] = {}

    def begin(self, key: object, size: int, start: Callable[[], None]) -> bool:
        """Call `start` when there is room for a body: now (True), or when others are done."""
        self._waiting[key] = (size, start)
        self._admit()
        return key not in self._waiting

    def end(self, key: object) -> None:
        """A body is done with. One that has not had its turn is started as well: nothing waits for its content."""
        if key in self._waiting:
            self._waiting.pop(key)[1]()
        self._handled_bytes -= self._handled.pop(key, 0)
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            key, (size, start) = next(iter(self._waiting.items()))
            # One alone is handled whatever its size.
            if self._handled and self._handled_bytes + size > self._max_bytes:
                return
            del self._waiting[key]
            self._handled[key] = size
            self._handled_bytes += size
            start()

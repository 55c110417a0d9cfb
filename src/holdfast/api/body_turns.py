"""Bound the bytes of the request bodies that are handled at the same time.

A parsed body takes up to twenty times its bytes. So only a few large bodies are handled at the same time, and the
others wait unparsed.
"""

from __future__ import annotations

from collections.abc import Callable


class BodyTurns:
    """A queue of complete bodies, in the order of arrival. `key` identifies the request or message of a body."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._handled_bytes = 0
        self._handled: dict[object, int] = {}
        self._waiting: dict[object, tuple[int, Callable[[], None]]] = {}

    def begin(self, key: object, size: int, start: Callable[[], None]) -> bool:
        """Call `start` when the limit allows it: now (returns True), or after other bodies have ended."""
        self._waiting[key] = (size, start)
        self._admit()
        return key not in self._waiting

    def end(self, key: object) -> None:
        """A body is not needed any more. If it still waits, it is started as well, because its content is not parsed
        any more."""
        if key in self._waiting:
            self._waiting.pop(key)[1]()
        self._handled_bytes -= self._handled.pop(key, 0)
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            key, (size, start) = next(iter(self._waiting.items()))
            # A single body is handled even if it is larger than the limit.
            if self._handled and self._handled_bytes + size > self._max_bytes:
                return
            del self._waiting[key]
            self._handled[key] = size
            self._handled_bytes += size
            start()

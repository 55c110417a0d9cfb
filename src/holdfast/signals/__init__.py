"""Signals are hints: a lost one costs latency, never a run or an event.

Every waiter has a slow poll behind it, every reader of events a cursor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

Topic = Literal["work", "cancel", "events"]
# The payload of a hint, or None: hints may have been missed, so look for yourself.
Listener = Callable[[str | None], None]


class Signals(Protocol):
    """One small interface, whatever carries the hints."""

    def listen(self, topic: Topic, listener: Listener) -> None:
        """Call `listener` for each hint on a topic. To be called before `run`."""
        ...

    def publish(self, topic: Topic, payload: str) -> None:
        """Send a hint soon. Never blocks, never raises; may lose it."""
        ...

    async def run(self) -> None:
        """Carry hints until cancelled."""
        ...


__all__ = ["Listener", "Signals", "Topic"]

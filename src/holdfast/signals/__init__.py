"""Signals are hints: a lost one costs latency, never a run or an event.

Every waiter has a slow poll behind it, every reader of events a cursor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol
from uuid import UUID

Topic = Literal["work", "cancel", "events", "webhooks"]
# The payload of a hint, or None: hints may have been missed, so look for yourself.
Listener = Callable[[str | None], None]


class Signals(Protocol):
    """One small interface, whatever carries the hints. They may be lost, come twice and overtake each other."""

    @property
    def max_payload(self) -> int:
        """The bytes a hint may have. A larger one is lost."""
        ...

    @property
    def degraded(self) -> bool:
        """Hints do not come through: whoever waits for one should look often. Listeners are called with None when
        this begins, and when it ends."""
        ...

    def listen(self, topic: Topic, listener: Listener) -> None:
        """Call `listener` for each hint on a topic. To be called before `run`.

        Of the hints about a thread (see `publish`) only those of threads that are followed are sure to come.
        """
        ...

    def follow(self, thread_id: UUID, joined: Callable[[], None]) -> None:
        """Have the hints about a thread, too. `joined` is called if hints before that moment did not come."""
        ...

    def unfollow(self, thread_id: UUID) -> None:
        """The end of one `follow`; the thread must have been followed, once."""
        ...

    def publish(self, topic: Topic, payload: str, *, thread_id: UUID | None = None, patience: float = 0.0) -> None:
        """Send a hint soon. Never blocks, never raises; may lose it.

        `thread_id`: the hint is only for those who follow the thread. `patience`: seconds it may wait for others to
        be sent with.
        """
        ...

    async def run(self) -> None:
        """Carry hints until cancelled."""
        ...


__all__ = ["Listener", "Signals", "Topic"]

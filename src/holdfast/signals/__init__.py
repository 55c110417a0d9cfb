"""Signals carry hints between processes. A lost hint costs latency, never a run or an event.

Everything that waits for a hint also polls slowly, and every reader of events has a cursor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol
from uuid import UUID

Topic = Literal["work", "cancel", "events", "webhooks"]
# Called with the payload of a hint, or with None: hints may have been lost, so check the database.
Listener = Callable[[str | None], None]


class Signals(Protocol):
    """The interface of all carriers of hints. Hints may be lost, arrive twice and overtake each other."""

    @property
    def max_payload(self) -> int:
        """The maximum size of a payload in bytes. A larger hint is dropped."""
        ...

    @property
    def degraded(self) -> bool:
        """Whether hints do not arrive at present. Then everything that waits for hints should poll often. Listeners are
        called with None when this state begins and when it ends."""
        ...

    def listen(self, topic: Topic, listener: Listener) -> None:
        """Call `listener` for each hint on a topic. Must be called before the carrier is started.

        Hints about a thread (see `publish`) are certain to arrive only if the thread is followed.
        """
        ...

    def follow(self, thread_id: UUID, on_subscribed: Callable[[], None]) -> None:
        """Receive hints about a thread. `on_subscribed` is called if hints before that moment may be lost."""
        ...

    def unfollow(self, thread_id: UUID) -> None:
        """End `follow`. The thread must be followed, and only once."""
        ...

    def publish(self, topic: Topic, payload: str, *, thread_id: UUID | None = None, max_delay: float = 0.0) -> None:
        """Send a hint soon. Never blocks and never raises; the hint may be lost.

        `thread_id`: only processes that follow the thread need the hint. `max_delay`: seconds that the hint may wait,
        so that it is sent together with others.
        """
        ...


__all__ = ["Listener", "Signals", "Topic"]

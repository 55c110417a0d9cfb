"""Signals that are sent after a commit. A hint before the commit would be useless: other processes see no change
yet."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from holdfast.signals import Listener, Signals, Topic


class DeferredSignals:
    """Wraps other signals and holds back published hints until `release`."""

    def __init__(self, carrier: Signals) -> None:
        self._carrier = carrier
        self._waiting: list[Callable[[], None]] | None = []

    @property
    def max_payload(self) -> int:
        return self._carrier.max_payload

    @property
    def degraded(self) -> bool:
        return self._carrier.degraded

    def listen(self, topic: Topic, listener: Listener) -> None:
        self._carrier.listen(topic, listener)

    def follow(self, thread_id: UUID, on_subscribed: Callable[[], None]) -> None:
        self._carrier.follow(thread_id, on_subscribed)

    def unfollow(self, thread_id: UUID) -> None:
        self._carrier.unfollow(thread_id)

    def publish(self, topic: Topic, payload: str, *, thread_id: UUID | None = None, max_delay: float = 0.0) -> None:
        def send() -> None:
            self._carrier.publish(topic, payload, thread_id=thread_id, max_delay=max_delay)

        if self._waiting is None:
            send()
        else:
            self._waiting.append(send)

    def release(self) -> None:
        """Send the hints that were held back. Later hints are sent at once."""
        waiting, self._waiting = self._waiting or [], None
        for send in waiting:
            send()

"""Limits the concurrent calls of webhooks by tenant and receiver, so that receivers that do not answer do not block
others.

A receiver may use the whole timeout for each call. So no tenant and no receiver may use all slots: each gets another
slot only while more slots are free than it has taken. The first with many deliveries gets half of the slots, the next
half of the rest, and one slot always remains for a tenant or receiver that has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from holdfast.webhooks.deliveries import Delivery, DueDelivery

# The calls of a receiver count double, so that other receivers of the same tenant get slots, too.
RECEIVER_WEIGHT = 2
# A delivery counts as at most a quarter of `max_bytes`, so that a very large one does not block all others.
MAX_BYTES_DIVISOR = 4


class WebhookSlots:
    """The slots of one process: at most `slots` calls, and about `max_bytes` bytes of deliveries."""

    def __init__(self, slots: int, max_bytes: int) -> None:
        self._slots = slots
        self._max_bytes = max_bytes
        self._calls: Counter[tuple[str, ...]] = Counter()
        self._bytes: Counter[tuple[str, ...]] = Counter()

    @property
    def free(self) -> int:
        return self._slots - self._calls[()]

    @property
    def free_bytes(self) -> int:
        return self._max_bytes - self._bytes[()]

    def choose(self, due: Sequence[DueDelivery]) -> list[DueDelivery]:
        """The deliveries that may be sent now, chosen round robin between their receivers."""
        by_receiver: dict[tuple[str, ...], list[DueDelivery]] = {}
        for one in due:
            by_receiver.setdefault((one.tenant_id, one.receiver), []).append(one)
        calls, chosen = self._calls.copy(), list[DueDelivery]()
        for turn in zip_longest(*by_receiver.values()):
            for one in turn:
                if one is not None and self._may_send(calls, one):
                    calls.update(_counter_keys(one))
                    chosen.append(one)
        return chosen

    def take(self, delivery: Delivery) -> None:
        for key in _counter_keys(delivery):
            self._calls[key] += 1
            self._bytes[key] += self._counted(delivery)

    def release(self, delivery: Delivery) -> None:
        for key in _counter_keys(delivery):
            self._calls[key] -= 1
            self._bytes[key] -= self._counted(delivery)
            if not self._calls[key]:
                del self._calls[key], self._bytes[key]

    def _may_send(self, calls: Counter[tuple[str, ...]], one: DueDelivery) -> bool:
        free, free_bytes = self._slots - calls[()], self.free_bytes
        keys = _counter_keys(one)[1:]
        return all(
            calls[key] * weight < free and self._bytes[key] * weight < free_bytes
            for key, weight in zip(reversed(keys), (RECEIVER_WEIGHT, 1), strict=False)
        )

    def _counted(self, delivery: Delivery) -> int:
        return min(delivery.size, self._max_bytes // MAX_BYTES_DIVISOR)


def _counter_keys(one: DueDelivery | Delivery) -> list[tuple[str, ...]]:
    """The keys under which a call is counted: `()` for all calls, its tenant if it has one, its receiver."""
    tenant = [(one.tenant_id,)] if one.tenant_id else []
    return [(), *tenant, (one.tenant_id, one.receiver)]

"""How many webhooks are sent at once, and for whom: receivers that do not answer keep nobody else from theirs.

A receiver may take its whole timeout for each call. So no tenant and no receiver gets all of the slots: each may have
calls under way only while more slots are free than it has taken itself. The first that wants many gets half of them,
the next half of the rest, and there is always one left for somebody who has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from holdfast.webhooks.deliveries import Delivery, DueDelivery

# Receivers count double: without tenants, and within one, other receivers need slots as well.
RECEIVER_WEIGHT = 2
# Of the bytes, one delivery counts at most this part, however large it is: it must not stop the others.
LARGEST_PART = 4


class WebhookSlots:
    """The slots of one process, `slots` calls and about `max_bytes` bytes of deliveries."""

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
        """Those that may be sent now, in turns between their receivers."""
        by_receiver: dict[tuple[str, ...], list[DueDelivery]] = {}
        for one in due:
            by_receiver.setdefault((one.tenant_id, one.receiver), []).append(one)
        calls, chosen = self._calls.copy(), list[DueDelivery]()
        for turn in zip_longest(*by_receiver.values()):
            for one in turn:
                if one is not None and self._may_send(calls, one):
                    calls.update(_parts(one))
                    chosen.append(one)
        return chosen

    def take(self, delivery: Delivery) -> None:
        for part in _parts(delivery):
            self._calls[part] += 1
            self._bytes[part] += self._counted(delivery)

    def release(self, delivery: Delivery) -> None:
        for part in _parts(delivery):
            self._calls[part] -= 1
            self._bytes[part] -= self._counted(delivery)
            if not self._calls[part]:
                del self._calls[part], self._bytes[part]

    def _may_send(self, calls: Counter[tuple[str, ...]], one: DueDelivery) -> bool:
        free, free_bytes = self._slots - calls[()], self.free_bytes
        parts = _parts(one)[1:]
        return all(
            calls[part] * weight < free and self._bytes[part] * weight < free_bytes
            for part, weight in zip(reversed(parts), (RECEIVER_WEIGHT, 1), strict=False)
        )

    def _counted(self, delivery: Delivery) -> int:
        return min(delivery.size, self._max_bytes // LARGEST_PART)


def _parts(one: DueDelivery | Delivery) -> list[tuple[str, ...]]:
    """What a call counts for: all of them, its tenant if it has one, its receiver."""
    tenant = [(one.tenant_id,)] if one.tenant_id else []
    return [(), *tenant, (one.tenant_id, one.receiver)]

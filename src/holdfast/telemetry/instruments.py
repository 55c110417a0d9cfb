"""What a process counts by: plain numbers, changed where something happens and read when somebody asks.

Each instrument is written by one thread, so there is nothing to lock: a count costs a tenth of a microsecond, and the
hot paths can afford it. Whoever reads from another thread may see a number that is one observation old.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["web", "worker"]


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric as it is documented. `roles` are the kinds of processes that serve it."""

    name: str
    kind: Kind
    what: str
    roles: frozenset[Role]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    # Counted in the database, the same for the whole fleet.
    fleet: bool = False


class Counter:
    """Counts up, for each combination of its labels' values."""

    __slots__ = ("_values", "declared")

    def __init__(self, declared: Declared, known: Iterable[tuple[str, ...]] = ()) -> None:
        """`known` are values of the labels that are there from the beginning, so that a first occurrence is a rise."""
        self.declared = declared
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(known or ([] if declared.labels else [()]), 0.0)

    def add(self, number: float = 1.0, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + number

    def values(self) -> dict[tuple[str, ...], float]:
        return dict(self._values)


class _Tally:
    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * (buckets + 1)
        self.total = 0.0


class Histogram:
    """How often something took how much, for each combination of its labels' values."""

    __slots__ = ("_bounds", "_tallies", "declared")

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self._bounds = declared.buckets
        self._tallies: dict[tuple[str, ...], _Tally] = {} if declared.labels else {(): _Tally(len(self._bounds))}

    def observe(self, value: float, *labels: str) -> None:
        tally = self._tallies.get(labels)
        if tally is None:
            tally = self._tallies[labels] = _Tally(len(self._bounds))
        tally.counts[bisect_left(self._bounds, value)] += 1
        tally.total += value

    def tallies(self) -> Iterator[tuple[tuple[str, ...], list[int], float]]:
        """The values of the labels, how many fell into each bucket (the last: above all bounds), and their sum."""
        for labels, tally in list(self._tallies.items()):
            yield labels, list(tally.counts), tally.total


class SilentCounter(Counter):
    """Counts nothing."""

    __slots__ = ()

    def add(self, number: float = 1.0, *labels: str) -> None:
        pass


class SilentHistogram(Histogram):
    """Observes nothing."""

    __slots__ = ()

    def observe(self, value: float, *labels: str) -> None:
        pass

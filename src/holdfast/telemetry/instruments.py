"""The counters and histograms of a process: plain numbers that are read at each scrape.

Only one thread writes to an instrument, so it needs no lock. An increment costs a tenth of a microsecond. A reader in
another thread may see a value that is one observation old.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["web", "worker"]


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """The declaration of a metric. `roles` are the kinds of processes that serve it."""

    name: str
    kind: Kind
    what: str
    roles: frozenset[Role]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    # Read from the database, so it is the same in all processes.
    fleet: bool = False


class Counter:
    """A counter for each combination of label values."""

    __slots__ = ("_values", "declared")

    def __init__(self, declared: MetricDeclaration, known: Iterable[tuple[str, ...]] = ()) -> None:
        """`known` are label values that start at 0, so that their first occurrence is an increase."""
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
    """A histogram for each combination of label values."""

    __slots__ = ("_bounds", "_tallies", "declared")

    def __init__(self, declared: MetricDeclaration) -> None:
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
        """The label values, the number of observations in each bucket (the last one: above all bounds), and the sum."""
        for labels, tally in list(self._tallies.items()):
            yield labels, list(tally.counts), tally.total


class DisabledCounter(Counter):
    """A counter that does nothing."""

    __slots__ = ()

    def add(self, number: float = 1.0, *labels: str) -> None:
        pass


class DisabledHistogram(Histogram):
    """A histogram that does nothing."""

    __slots__ = ()

    def observe(self, value: float, *labels: str) -> None:
        pass

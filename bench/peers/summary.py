"""From cells to figures: the median of the rounds and their spread, ratios, and what was to be reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bench.peers.cells import Cell
from bench.peers.participants import PEERS, Participant
from bench.peers.rounds import Findings
from bench.peers.scenarios import Scenario

Choice = Callable[[Iterable[tuple[float, Participant]]], tuple[float, Participant]]
"""`max` or `min`."""
Rule = Literal["at least", "more than", "at most", "below"]


@dataclass(frozen=True)
class Figure:
    """One measure over the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def lowest(self) -> float:
        return min(self.values)

    @property
    def highest(self) -> float:
        return max(self.values)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something to reach, and what became of it. Without a figure there is nothing to say: `met` is None then."""

    name: str
    rule: Rule
    target: float
    unit: str
    measured: Figure | None
    against: Participant | None
    """Whom it is measured by."""

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        value = self.measured.median
        match self.rule:
            case "at least":
                return value >= self.target
            case "more than":
                return value > self.target
            case "at most":
                return value <= self.target
            case "below":
                return value < self.target


class Summary:
    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self._cells: dict[tuple[Participant, Scenario], list[Cell]] = {}
        for cell in findings.cells:
            self._cells.setdefault((cell.server, cell.scenario), []).append(cell)

    def figure(self, server: Participant, scenario: Scenario, measure: str) -> Figure | None:
        """None where there is no value. A server that failed in one round has no figure at all: that it was right in
        the others does not make it right."""
        cells = self._cells.get((server, scenario), [])
        if any(cell.failure is not None for cell in cells):
            return None
        values = tuple(cell.measures[measure] for cell in cells if measure in cell.measures)
        return Figure(values) if values else None

    def failure(self, server: Participant, scenario: Scenario) -> str | None:
        reasons = (cell.failure for cell in self._cells.get((server, scenario), []))
        return next((reason for reason in reasons if reason is not None), None)

    def best(self, scenario: Scenario, measure: str, choose: Choice) -> Participant | None:
        """The peer with the best median."""
        found = [(figure.median, name) for name in PEERS if (figure := self.figure(name, scenario, measure))]
        return choose(found)[1] if found else None

    def ratio(self, server: Participant, other: Participant | None, scenario: Scenario, measure: str) -> Figure | None:
        """One server by another, round by round: what a round did to the machine it did to both."""
        if other is None:
            return None
        mine = {cell.round: cell.measures.get(measure) for cell in self._cells.get((server, scenario), [])}
        theirs = {cell.round: cell.measures.get(measure) for cell in self._cells.get((other, scenario), [])}
        if self.figure(server, scenario, measure) is None or self.figure(other, scenario, measure) is None:
            return None
        pairs = ((value, theirs.get(number)) for number, value in mine.items())
        ratios = tuple(value / divisor for value, divisor in pairs if value is not None and divisor)
        return Figure(ratios) if ratios else None

    def targets(self) -> list[Target]:
        """Where Holdfast is to reach."""
        found = []

        def times_the_best(scenario: Scenario, target: float) -> None:
            best = self.best(scenario, "rate", max)
            found.append(
                Target(
                    name=f"{scenario.label}, by the best peer",
                    rule="at least",
                    target=target,
                    unit=" times",
                    measured=self.ratio(Participant.HOLDFAST, best, scenario, "rate"),
                    against=best,
                )
            )

        for scenario in (Scenario.THREAD, Scenario.FIVE):
            times_the_best(scenario, 10)
            found.append(
                Target(
                    name=f"{scenario.label}, by the bare graph with the stock checkpointer",
                    rule="more than",
                    target=1,
                    unit=" times",
                    measured=self.ratio(Participant.HOLDFAST, Participant.BARE_POSTGRES, scenario, "rate"),
                    against=Participant.BARE_POSTGRES,
                )
            )
        times_the_best(Scenario.DRAIN, 5)
        best = self.best(Scenario.FIRST_EVENT, "first_p50", min)
        found += [
            Target(
                name="acceptance p50, by the best peer's",
                rule="at most",
                target=0.25,
                unit=" times",
                measured=self.ratio(Participant.HOLDFAST, best, Scenario.FIRST_EVENT, "first_p50"),
                against=best,
            ),
            *(
                Target(
                    name=f"{name} p{share}",
                    rule="below",
                    target=target,
                    unit=" ms",
                    measured=self.figure(Participant.HOLDFAST, Scenario.FIRST_EVENT, f"{measure}_p{share}"),
                    against=None,
                )
                for name, measure in (("acceptance", "first"), ("first event of the run", "content"))
                for share, target in ((50, 12), (99, 40))
            ),
        ]
        times_the_best(Scenario.TOKENS, 7)
        times_the_best(Scenario.MESSAGES, 7)
        for scenario in (Scenario.THREAD, Scenario.FIVE):
            found.append(
                Target(
                    name=f"{scenario.label} with 4 workers, by 2 workers",
                    rule="at least",
                    target=1,
                    unit=" times",
                    measured=self.ratio(Participant.HOLDFAST_4, Participant.HOLDFAST, scenario, "rate"),
                    against=Participant.HOLDFAST,
                )
            )
        return found

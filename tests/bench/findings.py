"""Findings made up, to see what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.peers.cells import Cell, Pace
from bench.peers.participants import Participant
from bench.peers.rounds import Findings
from bench.peers.scenarios import Scenario
from bench.peers.summary import Summary


def findings(rates: Mapping[tuple[Participant, Scenario], Sequence[float]]) -> Findings:
    """Each server's rate, or its time to the first event, in each round."""
    found = Findings(Pace())
    for (server, scenario), values in rates.items():
        measures = ("first_p50", "content_p50", "content_p99") if scenario is Scenario.FIRST_EVENT else ("rate",)
        for number, value in enumerate(values):
            cell = Cell(server=server, scenario=scenario, round=number, measures=dict.fromkeys(measures, value))
            found.cells.append(cell)
    found.load = [0.1] * max(map(len, rates.values()))
    return found


def summary(rates: Mapping[tuple[Participant, Scenario], Sequence[float]]) -> Summary:
    return Summary(findings(rates))

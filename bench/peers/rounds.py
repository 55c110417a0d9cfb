"""All servers, one after the other, several times over.

Only one of them runs at any moment. Every round begins with another one, so that what the machine does meanwhile, or
becomes, falls on all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.backing import Postgres
from bench.peers.bare import SCENARIOS as BARE_SCENARIOS
from bench.peers.cells import Cell, Pace, count_statements, measure_bare, measure_server
from bench.peers.environments import Missing
from bench.peers.participants import BARES, Participant
from bench.peers.processes import memory
from bench.peers.scenarios import Scenario
from bench.peers.servers import SERVERS, Order, Running, Server

COUNTED_SCENARIOS = tuple(scenario for scenario in Scenario if scenario is not Scenario.FIRST_EVENT)


@dataclass
class Findings:
    """Everything that was measured."""

    pace: Pace
    cells: list[Cell] = field(default_factory=list)
    memory: dict[Participant, list[list[int]]] = field(default_factory=dict)
    """Bytes of each process of a server after its scenarios, by server and round."""
    versions: dict[Participant, str] = field(default_factory=dict)
    skipped: dict[Participant, str] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    """The load average at the beginning of each round: what else the machine had to do."""

    def failures(self, server: Participant) -> list[Cell]:
        return [cell for cell in self.cells if cell.server == server and cell.failure is not None]


def turns(names: Sequence[Participant], number: int) -> list[Participant]:
    """Who comes after whom in a round. Each begins with another, and every second goes backwards: whoever comes right
    after somebody else finds the machine as that one has left it."""
    order = list(names)[:: -1 if number % 2 else 1]
    turn = number // 2 % len(order)
    return order[turn:] + order[:turn]


class Comparison:
    def __init__(
        self,
        *,
        names: Sequence[Participant],
        scenarios: Sequence[Scenario],
        pace: Pace,
        say: Callable[[str], None],
        minutes: float = 20,
        python: Path | None = None,
    ) -> None:
        self._seconds = minutes * 60
        self._names = list(names)
        self._scenarios = list(scenarios)
        self._say = say
        self._order = Order(pace.concurrency, say, python)
        self.findings = Findings(pace)

    def run(self) -> Findings:
        """As many rounds as were asked for, or as are likely to fit into the time."""
        pace = self.findings.pace
        started = time.monotonic()
        for number in range(pace.rounds):
            spent = time.monotonic() - started
            if number and spent + spent / number > self._seconds:
                self._say(f"{number} rounds took {spent / 60:.0f} minutes, another would take too long (--minutes)")
                break
            self.findings.load.append(os.getloadavg()[0])
            for name in turns(self._names, number):
                if name in self.findings.skipped:
                    continue
                began = time.monotonic()
                if name in BARES:
                    self._bare(name, number)
                else:
                    self._server(next(server for server in SERVERS if server.name == name), number)
                self._say(f"round {number + 1}/{pace.rounds}: {name}: {time.monotonic() - began:.0f} s")
        return self.findings

    def _server(self, server: Server, number: int) -> None:
        scenarios = [scenario for scenario in self._scenarios if scenario in server.scenarios]
        if not scenarios:
            return
        with ExitStack() as stack:
            try:
                running = stack.enter_context(server.running(self._order))
            except Missing as reason:
                self.findings.skipped[server.name] = str(reason)
                self._say(f"{server.name}: skipped: {reason}")
                return
            except (OSError, RuntimeError, TimeoutError) as error:
                self._fail(scenarios, server.name, number, f"did not start: {error}")
                return
            self.findings.versions[server.name] = server.version()
            for scenario in scenarios:
                self._cell(scenario, server.name, number, lambda cell: self._measure(running, cell))
            sizes = memory(list(running.processes["server"]))
            self.findings.memory.setdefault(server.name, []).append(sizes)

    def _measure(self, running: Running, cell: Cell) -> None:
        measure_server(running, cell, self.findings.pace)
        if running.postgres is not None and cell.round == 0 and cell.scenario in COUNTED_SCENARIOS:
            count_statements(running.postgres, running, cell, self.findings.pace)

    def _bare(self, name: Participant, number: int) -> None:
        with ExitStack() as stack:
            postgres = stack.enter_context(Postgres()) if name is Participant.BARE_POSTGRES else None
            for scenario in self._scenarios:
                if scenario in BARE_SCENARIOS:
                    self._cell(scenario, name, number, lambda cell: measure_bare(cell, self.findings.pace, postgres))

    def _cell(self, scenario: Scenario, name: Participant, number: int, measure: Callable[[Cell], None]) -> None:
        """Measure one cell. A server that answers wrongly, or not at all, has no figure, and the rest goes on."""
        cell = Cell(server=name, scenario=scenario, round=number)
        try:
            measure(cell)
        except Exception as error:
            cell.measures = {}
            cell.failure = _first_reason(error)
        self.findings.cells.append(cell)
        self._say(f"round {number + 1}: {name}: {scenario.label}: {_brief(cell)}")

    def _fail(self, scenarios: Sequence[Scenario], name: Participant, number: int, reason: str) -> None:
        for scenario in scenarios:
            self.findings.cells.append(Cell(server=name, scenario=scenario, round=number, failure=reason))
        self._say(f"round {number + 1}: {name}: {reason}")


def _first_reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:600]


def _brief(cell: Cell) -> str:
    if cell.failure is not None:
        return f"FAILED: {cell.failure}"
    if (first := cell.measures.get("first_p50")) is not None:
        return f"{first:.1f} ms"
    unit = "events" if cell.scenario.streams else "runs"
    return f"{cell.measures['rate']:,.0f} {unit}/s, p50 {cell.measures['p50']:.0f} ms"

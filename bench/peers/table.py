"""The result as a page of Markdown and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from bench.peers.cells import Cell, Pace
from bench.peers.participants import Participant
from bench.peers.rounds import Findings
from bench.peers.scenarios import EVENTS, Scenario
from bench.peers.servers import SERVERS
from bench.peers.summary import Figure, Summary, Target
from bench.report import tree

NONE = "–"
FAILED = "failed"

RATED = tuple(scenario for scenario in Scenario if scenario is not Scenario.FIRST_EVENT)


def number(value: float) -> str:
    """As many digits as mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(figure: Figure | None) -> str:
    """The median, and from the lowest to the highest round where there was more than one."""
    if figure is None:
        return NONE
    if len(figure.values) == 1:
        return number(figure.median)
    return f"{number(figure.median)} ({number(figure.lowest)} to {number(figure.highest)})"


def verdict(target: Target) -> str:
    return {True: "met", False: "NOT MET", None: "not measured"}[target.met]


def _rows(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return ["Nobody."]
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]


def targets_table(targets: list[Target]) -> list[str]:
    rows = []
    for target in targets:
        measured = NONE if target.measured is None else spread(target.measured) + target.unit
        against = target.against.label if target.against is not None else NONE
        rows.append([target.name, f"{target.rule} {target.target:g}{target.unit}", measured, against, verdict(target)])
    return _rows(["target", "to reach", "measured", "against", ""], rows)


def circumstances() -> dict[str, Any]:
    """When, of which Holdfast and on what."""
    return {
        "at": datetime.now(UTC).isoformat(),
        "tree": tree(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


class Page:
    def __init__(self, summary: Summary, *, seconds: float, circumstances: dict[str, Any]) -> None:
        self._summary = summary
        self._findings = summary.findings
        self._seconds = seconds
        self._circumstances = circumstances
        measured = {cell.server for cell in self._findings.cells}
        self._names = [name for name in Participant if name in measured]
        present = {cell.scenario for cell in self._findings.cells}
        self._scenarios = [scenario for scenario in Scenario if scenario in present]

    @classmethod
    def of_result(cls, result: dict[str, Any]) -> Page:
        """The page of what `json` returned."""
        findings = Findings(
            Pace(**result["pace"]),
            cells=[
                Cell(**{**cell, "server": Participant(cell["server"]), "scenario": Scenario(cell["scenario"])})
                for cell in result["cells"]
            ],
            memory={Participant(name): sizes for name, sizes in result["memory"].items()},
            versions={Participant(name): version for name, version in result["versions"].items()},
            skipped={Participant(name): reason for name, reason in result["skipped"].items()},
            load=result["load"],
        )
        return cls(Summary(findings), seconds=result["seconds"], circumstances=result)

    def _cell(self, name: Participant, scenario: Scenario, *measures: str) -> str:
        if self._summary.failure(name, scenario) is not None:
            return FAILED
        figures = [self._summary.figure(name, scenario, measure) for measure in measures]
        if len(figures) == 1:
            return spread(figures[0])
        return NONE if None in figures else " / ".join(number(figure.median) for figure in figures if figure)

    def _table(self, head: str, scenarios: Sequence[Scenario], *measures: str) -> list[str]:
        rows = [
            [name.label, *(self._cell(name, scenario, *measures) for scenario in scenarios)] for name in self._names
        ]
        rows = [row for row in rows if set(row[1:]) != {NONE}]
        return _rows([head, *(scenario.label for scenario in scenarios)], rows)

    def _ratios(self) -> list[str]:
        """How many times as much Holdfast does as each of the others; of times, how many times as long they take."""
        rows = []
        for name in self._names:
            if name is Participant.HOLDFAST:
                continue
            row = [name.label]
            for scenario in self._scenarios:
                if scenario is Scenario.FIRST_EVENT:
                    row.append(spread(self._summary.ratio(name, Participant.HOLDFAST, scenario, "first_p50")))
                else:
                    row.append(spread(self._summary.ratio(Participant.HOLDFAST, name, scenario, "rate")))
            rows.append(row)
        rows = [row for row in rows if set(row[1:]) != {NONE}]
        return _rows(["Holdfast is … times as fast as", *(scenario.label for scenario in self._scenarios)], rows)

    def _resources(self) -> list[str]:
        rows = []
        for name in self._names:
            memory = self._findings.memory.get(name)
            sizes = ", ".join(f"{size / 2**20:.0f}" for size in memory[-1]) if memory else NONE
            rows.append([name.label, sizes])
        return _rows(["memory of each of its processes", "MB"], [row for row in rows if row[1] != NONE])

    def markdown(self) -> str:
        pace = self._findings.pace
        waits = [scenario for scenario in self._scenarios if scenario in RATED]
        runs = [scenario for scenario in waits if not scenario.streams]
        of = self._circumstances
        lines = [
            "# Holdfast and the others",
            "",
            f"Holdfast {of['tree']}, {of['at'][:10]}, {of['machine']}, {of['cores']} cores, Python "
            f"{of['python']}; {len(self._findings.load)} round(s), {pace.concurrency} clients at once, "
            f"windows of {pace.seconds:g} s; {self._seconds / 60:.0f} minutes in all. "
            "Median of the rounds (lowest to highest). "
            "Load average at the beginning of each round: "
            + ", ".join(f"{load:.1f}" for load in self._findings.load)
            + ".",
            "",
            "## What was to be reached",
            "",
            *targets_table(self._summary.targets()),
            "",
            "## Ratios",
            "",
            *self._ratios(),
            "",
            "Of the first event: how many times as long the other takes to accept a run.",
            "",
            "## Figures",
            "",
            f"Runs a second; for token events: events a second ({EVENTS} in each run).",
            "",
            *self._table("a second", waits, "rate"),
        ]
        if Scenario.FIRST_EVENT in self._scenarios:
            lines += [
                "",
                "Milliseconds, one run at a time, from the request to the event that says it is accepted, and to the "
                "first event of the run.",
                "",
            ]
            lines += self._first_events()
        lines += ["", "Milliseconds; for enqueue and drain: of accepting a run.", ""]
        lines += self._table("p50 / p99", waits, "p50", "p99")
        lines += ["", "Milliseconds of CPU for a run.", ""]
        lines += self._table("server", waits, "cpu_server")
        lines += ["", *self._table("its Postgres", waits, "cpu_postgres")]
        if any("cpu_redis" in cell.measures for cell in self._findings.cells):
            lines += ["", *self._table("its Redis", waits, "cpu_redis")]
        lines += ["", "The client, as a share of one core: where it comes near 1 the client is what was measured.", ""]
        lines += self._table("client", waits, "cores_client")
        lines += ["", "From the log of Postgres, transaction control included; thread and questions too.", ""]
        lines += self._table("statements for a run", runs or waits, "statements")
        lines += ["", *self._resources(), "", "## Who took part", ""]
        lines += self._participants()
        return "\n".join(lines) + "\n"

    def _first_events(self) -> list[str]:
        rows = []
        for name in self._names:
            measures = ("first_p50", "first_p99", "content_p50", "content_p99")
            row = [name.label, *(self._cell(name, Scenario.FIRST_EVENT, measure) for measure in measures)]
            rows.append(row)
        rows = [row for row in rows if set(row[1:]) != {NONE}]
        return _rows(["first event", "accepted p50", "accepted p99", "of the run p50", "of the run p99"], rows)

    def _participants(self) -> list[str]:
        lines = []
        for server in SERVERS:
            if server.name in self._findings.versions:
                lines.append(f"- {server.name.label} {self._findings.versions[server.name]}: {server.settings}.")
            if server.name in self._findings.skipped:
                lines.append(f"- {server.name.label}: skipped: {self._findings.skipped[server.name]}.")
        for cell in self._findings.cells:
            if cell.failure is not None:
                where = f"{cell.server.label}, {cell.scenario.label}, round {cell.round + 1}"
                lines.append(f"- Failed: {where}: `{cell.failure}`")
        return lines

    def json(self) -> dict[str, Any]:
        return {
            **{name: self._circumstances[name] for name in ("at", "tree", "python", "machine", "cores")},
            "seconds": self._seconds,
            "pace": asdict(self._findings.pace),
            "load": self._findings.load,
            "versions": self._findings.versions,
            "skipped": self._findings.skipped,
            "targets": [
                {**asdict(target), "median": target.measured and target.measured.median, "met": target.met}
                for target in self._summary.targets()
            ],
            "cells": [asdict(cell) for cell in self._findings.cells],
            "memory": self._findings.memory,
        }

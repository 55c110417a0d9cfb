"""The whole comparison: measured, printed and kept."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.peers.cells import Pace
from bench.peers.participants import OURS, Participant
from bench.peers.picture import picture
from bench.peers.rounds import Comparison
from bench.peers.scenarios import Scenario
from bench.peers.summary import Summary
from bench.peers.table import Page, circumstances, spread, verdict
from bench.report import RESULTS


def run(
    *,
    names: Sequence[Participant] = tuple(Participant),
    scenarios: Sequence[Scenario] = tuple(Scenario),
    pace: Pace | None = None,
    minutes: float = 20,
    python: Path | None = None,
    results: Path = RESULTS,
    name: str = "peers",
) -> bool:
    """Measure, print and keep. Whether every target that could be measured was met, and Holdfast never failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Leave nothing behind then, either.
    started = time.monotonic()
    notes = Console(stderr=True, highlight=False, style="dim", soft_wrap=True)
    comparison = Comparison(
        names=names, scenarios=scenarios, pace=pace or Pace(), minutes=minutes, say=notes.print, python=python
    )
    findings = comparison.run()
    summary = Summary(findings)
    page = Page(summary, seconds=time.monotonic() - started, circumstances=circumstances())
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.md").write_text(page.markdown())
    (results / f"{name}.json").write_text(json.dumps(page.json(), indent=1) + "\n")
    (results / f"{name}.svg").write_text(picture(summary))
    _print(summary)
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"{time.monotonic() - started:.0f} s in all; kept in {results / name}.md, .json and .svg", style="dim")
    return not any(findings.failures(each) for each in OURS) and all(
        target.met is not False for target in summary.targets()
    )


def _print(summary: Summary) -> None:
    out = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    for scenario in Scenario:
        measure = "first_p50" if scenario is Scenario.FIRST_EVENT else "rate"
        for name in Participant:
            if (figure := summary.figure(name, scenario, measure)) is not None:
                ratio = summary.ratio(Participant.HOLDFAST, name, scenario, measure)
                other = ratio is not None and name is not Participant.HOLDFAST
                by = f"Holdfast by it: {spread(ratio)}" if other else ""
                out.print(f"{scenario.label:<26}{name.label:<32}{spread(figure):<30}{by}", markup=False)
    for target in summary.targets():
        measured = "–" if target.measured is None else spread(target.measured) + target.unit
        line = f"{target.name}: {target.rule} {target.target:g}{target.unit}: {measured}"
        style = {True: "green", False: "bold red", None: "dim"}[target.met]
        out.print(f"{line}: {verdict(target)}", style=style, markup=False)

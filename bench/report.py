"""What a benchmark found: measures against their targets, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("holdfast", "langgraph", "langgraph-checkpoint-postgres", "psycopg")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One promise and what became of it."""

    name: str
    target: float
    rule: Literal["below", "at most", "at least"]
    measured: float
    unit: str = ""
    note: str = ""
    """The quantities behind the number."""

    @property
    def ratio(self) -> float:
        """Measured by target: what is promised to be low passes below 1, what is promised to be high above it."""
        return self.measured / self.target

    @property
    def passed(self) -> bool:
        match self.rule:
            case "below":
                return self.measured < self.target
            case "at most":
                return self.measured <= self.target
            case "at least":
                return self.measured >= self.target


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one figure's module returns. `details` are the raw numbers; `asides` are for orientation, not promised."""

    figure: str
    measures: list[Measure]
    asides: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(measure.passed for measure in self.measures)


def print_findings(console: Console, title: str, findings: list[Finding]) -> None:
    table = Table(title=title, title_justify="left", caption="ratio: measured by target", caption_justify="left")
    table.add_column("figure")
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("measured")
    table.add_column("ratio", justify="right")
    table.add_column("")
    for finding in findings:
        for measure in finding.measures:
            table.add_row(
                f"{finding.figure}: {measure.name}",
                f"{measure.rule} {measure.target:g}{measure.unit}",
                f"{measure.measured:.2f}{measure.unit}" + (f"  ({measure.note})" if measure.note else ""),
                f"{measure.ratio:.2f}",
                "[green]pass[/green]" if measure.passed else "[bold red]FAIL[/bold red]",
            )
        table.add_section()
    console.print(table)
    for finding in findings:
        for aside in finding.asides:
            console.print(f"{finding.figure}: {aside}", highlight=False)


def write_findings(name: str, findings: list[Finding]) -> Path:
    """Keep everything as JSON, for comparing with another day."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    path = RESULTS / f"{name}-{now:%Y%m%dT%H%M%SZ}.json"
    content = {
        "at": now.isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {package: version(package) for package in PACKAGES},
        "findings": [
            {
                **asdict(finding),
                "measures": [
                    {**asdict(measure), "ratio": measure.ratio, "passed": measure.passed}
                    for measure in finding.measures
                ],
            }
            for finding in findings
        ],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path

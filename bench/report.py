"""What a benchmark found: measures against their targets, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
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


def tree() -> str:
    """Which Holdfast was measured: its version, and the commit if there is one, with a + if the sources differ."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short", "HEAD")
    if not commit:
        return version("holdfast")
    changed = git("diff", "--name-only", "HEAD", "--", "src")
    return f"{version('holdfast')} ({commit}{'+' if changed else ''})"


def circumstances() -> dict[str, Any]:
    """What a result is worth nothing without."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "tree": tree(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "versions": {package: version(package) for package in PACKAGES},
    }


def result_path(programme: str, figure: str, *, quick: bool = False) -> Path:
    name = figure if programme == figure else f"{programme}-{figure}"
    return RESULTS / f"{name}{'-quick' if quick else ''}.json"


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Keep a result in place of the one before, with the circumstances. Git ignores those of quick runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**circumstances(), **content}, indent=1) + "\n")


def write_findings(programme: str, findings: list[Finding], *, quick: bool = False) -> list[Path]:
    """Keep each finding as JSON, for the documents and for comparing with another day."""
    paths = []
    for finding in findings:
        measures = [{**asdict(one), "ratio": one.ratio, "passed": one.passed} for one in finding.measures]
        path = result_path(programme, finding.figure, quick=quick)
        write_result(path, {**asdict(finding), "measures": measures})
        paths.append(path)
    return paths

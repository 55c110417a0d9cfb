"""Figures, one after the other, on one private Postgres."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module

from rich.console import Console

from bench.report import Finding, print_findings, write_findings
from bench.stage import Stage


def run(name: str, title: str, figures: Mapping[str, str], *, quick: bool) -> bool:
    """Measure, print and keep. `figures` are modules with a function `measure`, by what to call them. Whether every
    promise was kept."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Leave nothing behind then, either.
    started = time.monotonic()
    notes = Console(stderr=True, highlight=False, style="dim")
    findings: list[Finding] = []
    with Stage(say=notes.print) as stage:
        for figure, module in figures.items():
            notes.print(f"{figure}: measuring; load average {os.getloadavg()[0]:.1f}")
            findings.append(import_module(module).measure(stage, quick=quick))
    paths = write_findings(name, findings, quick=quick)
    out = Console(width=None if sys.stdout.isatty() else 160)
    print_findings(out, title, findings)
    out.print(
        f"{time.monotonic() - started:.0f} s in all; kept in {', '.join(path.name for path in paths)}",
        style="dim",
        highlight=False,
    )
    return all(finding.passed for finding in findings)

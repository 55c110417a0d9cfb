"""The engine's figures: one after the other on one private Postgres."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from importlib import import_module

from rich.console import Console

from bench.report import Finding, print_findings, write_findings
from bench.stage import Stage


class Figure(StrEnum):
    """Each is a module with a function `measure`."""

    COST = "cost"
    CLAIM = "claim"
    TAKEOVER = "takeover"
    IDLE = "idle"


def run(figures: Sequence[Figure], *, quick: bool) -> bool:
    """Measure, print and keep. Whether every promise was kept."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Leave nothing behind then, either.
    started = time.monotonic()
    notes = Console(stderr=True, highlight=False, style="dim")
    findings: list[Finding] = []
    with Stage(say=notes.print) as stage:
        for figure in figures:
            notes.print(f"{figure}: measuring")
            findings.append(import_module(f"bench.{figure}").measure(stage, quick=quick))
    path = write_findings("engine", findings)
    out = Console(width=None if sys.stdout.isatty() else 160)
    print_findings(out, "Holdfast: the engine's figures", findings)
    out.print(f"{time.monotonic() - started:.0f} s in all; kept in {path}", style="dim", highlight=False)
    return all(finding.passed for finding in findings)

"""The guard against speed that is lost silently: what requests make everybody do, against what was accepted last.

`python -m bench guard` counts and compares; with `--accept` it writes what it has counted to `bench/accepted.json`,
which belongs into the same commit as the reason for it. A test does the same in CI.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.guard.accepted import accept, compare, load, python_version
from bench.guard.cases import CASES
from bench.guard.counting import ROLES, Counting, delays, typical
from bench.stage import Stage


def count() -> dict[str, Any]:
    """The figures of all cases, by name."""
    with Stage(say=lambda _: None) as stage:
        counting = Counting(stage)
        try:
            found = {case: typical(counting.count(case)) for case in CASES}
            found["first event"]["delays"] = delays()
            return found
        finally:
            counting.close()


def run(*, accepting: bool) -> bool:
    """Count, print and compare, or accept. Whether nothing has grown."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measured = count()
    out = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for case, figures in measured.items():
        out.print(_table(case, figures))
    if accepting:
        out.print(f"Accepted, for Python {python_version()}: {accept(measured)}")
        return True
    comparison = compare(measured, load())
    for line in (*comparison.grown, *comparison.notes):
        out.print(line)
    if not comparison.grown:
        out.print("Nothing has grown.")
    return not comparison.grown


def _table(case: str, figures: dict[str, Any]) -> Table:
    table = Table(title=CASES[case].what, title_justify="left")
    table.add_column("part")
    table.add_column("what")
    table.add_column("times", justify="right")
    for part, statements in figures["statements"].items():
        for text, number in statements.items():
            table.add_row(part, text.replace("[", r"\["), str(number))
        table.add_row(part, "statements in all", str(sum(statements.values())), style="bold", end_section=True)
    for role in ROLES:
        calls = figures["calls"].get(role, {})
        most = sorted(calls, key=lambda name: -calls[name])[:6]
        table.add_row(role, ", ".join(f"{name} {calls[name]:,}" for name in most), "")
        table.add_row(role, "calls of functions in all", f"{sum(calls.values()):,}", style="bold")
        table.add_row(role, "waits for the database", str(figures["waits"][role]), style="bold")
        table.add_row(role, "timers", str(figures["timers"][role]), style="bold")
        table.add_row(role, "milliseconds slept", str(figures["slept"][role]), style="bold")
        table.add_row(role, "CPU, % of the fixed piece of work", str(figures["cpu"][role]), style="bold")
        table.add_section()
    for what, milliseconds in figures.get("delays", {}).items():
        table.add_row("worker", f"delay of the {what}, ms", f"{milliseconds:g}")
    table.add_row("postgres", "bytes of the write-ahead log", f"{figures['wal']:,}", style="bold")
    return table

"""What was accepted last, and what has grown since.

Statements are counted exactly, so one more is one too many, except where requests share them. Calls, waits and bytes of
the log vary a little from run to run, and their medians hardly do: what they may exceed is several times what they were
ever seen to, and half of what would be worth knowing. CPU time varies with the machine, timers by a few with how often
the database answers at once; both are there for growth that calls do not show, which is many times what was accepted.
Milliseconds slept are those that were asked for, however long: none were, and one delay of a few is reported. Another
Python calls its own functions differently, so calls and CPU time are accepted for each minor version.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.guard.cases import CASES

ACCEPTED = Path(__file__).parent.parent / "accepted.json"
CALLS, WAITS, WAL, TIMERS, SLEPT, CPU = 0.07, 0.1, 0.1, 0.5, 0.1, 1.0
"""The share by which each may exceed what was accepted."""
# How much more of each is nothing, where what was accepted is next to nothing itself.
SLACK = {"wal": 2_000, "timers": 20, "slept": 2, "cpu": 100, "calls": 100}
# By how many statements or waits requests that share them may exceed what was accepted. Without sharing they
# would be thirty times as many.
GROUPED = 12
BY_VERSION = ("calls", "cpu")
HOW = (
    "If that is the price of something worth it: `python -m bench guard --accept`, and commit bench/accepted.json with "
    "the change that it is the price of."
)


@dataclass
class Comparison:
    """What has grown, in sentences; and what else is worth knowing."""

    grown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Whether calls could be compared.
    calls: bool = True


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def load(path: Path = ACCEPTED) -> dict[str, Any]:
    """What was accepted, by case; nothing if nothing ever was."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def accept(measured: dict[str, Any], path: Path = ACCEPTED, version: str | None = None) -> Path:
    """Keep what was measured. Calls of other Python versions stay as they are."""
    before = load(path)
    kept = {}
    for case, figures in measured.items():
        known = before.get(case, {})
        for name in BY_VERSION:
            versions = known.get(name, {}) | {version or python_version(): figures[name]}
            figures = {**figures, name: dict(sorted(versions.items()))}
        kept[case] = figures
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return path


def compare(measured: dict[str, Any], accepted: dict[str, Any], version: str | None = None) -> Comparison:
    """What has grown in any case."""
    version = version or python_version()
    found = Comparison()
    for name, figures in measured.items():
        known = accepted.get(name)
        what = CASES[name].what
        if known is None:
            found.grown.append(f"Nothing is accepted for {what}.")
            continue
        grouped = GROUPED if CASES[name].grouped else 0
        _compare_statements(found, what, figures["statements"], known["statements"], grouped)
        for role in figures["waits"]:
            for kind, label, tolerance in (
                ("waits", f"waits of the {role} for the database", WAITS),
                ("timers", f"timers of the {role}", TIMERS),
                ("slept", f"milliseconds that the {role} sleeps", SLEPT),
            ):
                slack = SLACK.get(kind, grouped)
                _compare(found, f"{what}: {label}", figures[kind][role], known[kind][role], tolerance, slack)
        _compare(found, f"{what}: bytes of the write-ahead log", figures["wal"], known["wal"], WAL, SLACK["wal"])
        for delay, milliseconds in figures.get("delays", {}).items():
            _compare(found, f"{what}: milliseconds of the delay of the {delay}", milliseconds, known["delays"][delay])
        if version not in known["calls"]:
            found.calls = False
            continue
        for role in figures["calls"]:
            _compare_calls(found, what, role, figures["calls"][role], known["calls"][version].get(role, {}))
        for role, share in figures["cpu"].items():
            label = f"{what}: CPU of the {role}, in per cent of a fixed piece of work"
            _compare(found, label, share, known["cpu"][version][role], CPU, SLACK["cpu"])
    if not found.calls:
        found.notes.append(
            f"No calls are accepted for Python {version}, so only statements, waits, timers and the log were compared. "
            "`python -m bench guard --accept`, with that Python, accepts what it counts."
        )
    if found.grown:
        found.grown.append(HOW)
    return found


def _compare_statements(
    found: Comparison,
    what: str,
    measured: dict[str, dict[str, int]],
    known: dict[str, dict[str, int]],
    slack: int,
) -> None:
    for part in sorted({*measured, *known}):
        now, then = measured.get(part, {}), known.get(part, {})
        number, accepted = sum(now.values()), sum(then.values())
        if abs(number - accepted) <= slack:
            continue
        changes = {text: now.get(text, 0) - then.get(text, 0) for text in sorted({*now, *then})}
        listed = "".join(f"\n    {change:+}  {text}" for text, change in changes.items() if change)
        line = f"{what}: {part} sends {number} statements, {accepted} were accepted:{listed}"
        (found.grown if number > accepted else found.notes).append(line)


def _compare(
    found: Comparison,
    what: str,
    measured: float,
    accepted: float,
    tolerance: float = 0.0,
    slack: float = 0.0,
    details: str = "",
) -> None:
    """`slack` is for what is so little that a share of it is nothing."""
    if abs(measured - accepted) <= max(tolerance * accepted, slack):
        return
    share = f"{100 * (measured / accepted - 1):+.0f} %" if accepted else "all of it"
    line = f"{what}: {measured:,}, {accepted:,} were accepted ({share}){details}"
    (found.grown if measured > accepted else found.notes).append(line)


def _compare_calls(found: Comparison, what: str, role: str, now: dict[str, int], then: dict[str, int]) -> None:
    changes = {name: now.get(name, 0) - then.get(name, 0) for name in {*now, *then}}
    most = sorted(changes, key=lambda name: -abs(changes[name]))[:4]
    listed = ", ".join(f"{name} {changes[name]:+,}" for name in most)
    label = f"{what}: calls of functions in the {role}"
    _compare(found, label, sum(now.values()), sum(then.values()), CALLS, SLACK["calls"], f": {listed}")

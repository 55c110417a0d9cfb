"""What was accepted last, and what has grown since.

Statements are counted exactly, so one more is one too many. Calls, waits and bytes of the log vary a little from run to
run, and their medians hardly do: what they may exceed is several times what they were ever seen to, and half of what
would be worth knowing. Another Python calls its own functions differently, so calls are accepted for each minor
version.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACCEPTED = Path(__file__).parent.parent / "accepted.json"
CALLS, WAITS, WAL = 0.07, 0.1, 0.1
"""The share by which each may exceed what was accepted."""
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
        calls = before.get(case, {}).get("calls", {}) | {version or python_version(): figures["calls"]}
        kept[case] = {**figures, "calls": dict(sorted(calls.items()))}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return path


def compare(measured: dict[str, Any], accepted: dict[str, Any], version: str | None = None) -> Comparison:
    """What has grown in any case."""
    version = version or python_version()
    found = Comparison()
    for case, figures in measured.items():
        known = accepted.get(case)
        if known is None:
            found.grown.append(f"Nothing is accepted for a run of {case}.")
            continue
        _compare_statements(found, case, figures["statements"], known["statements"])
        for role, number in figures["waits"].items():
            _compare(
                found, f"a run of {case}: waits of the {role} for the database", number, known["waits"][role], WAITS
            )
        _compare(found, f"a run of {case}: bytes of the write-ahead log", figures["wal"], known["wal"], WAL)
        if (calls := known["calls"].get(version)) is None:
            found.calls = False
            continue
        for role in figures["calls"]:
            _compare_calls(found, case, role, figures["calls"][role], calls.get(role, {}))
    if not found.calls:
        found.notes.append(
            f"No calls are accepted for Python {version}, so only statements, waits and the log were compared. "
            "`python -m bench guard --accept`, with that Python, accepts what it counts."
        )
    if found.grown:
        found.grown.append(HOW)
    return found


def _compare_statements(
    found: Comparison, case: str, measured: dict[str, dict[str, int]], known: dict[str, dict[str, int]]
) -> None:
    for part in sorted({*measured, *known}):
        now, then = measured.get(part, {}), known.get(part, {})
        number, accepted = sum(now.values()), sum(then.values())
        if number == accepted:
            continue
        changes = {text: now.get(text, 0) - then.get(text, 0) for text in sorted({*now, *then})}
        listed = "".join(f"\n    {change:+}  {text}" for text, change in changes.items() if change)
        line = f"a run of {case}: {part} sends {number} statements, {accepted} were accepted:{listed}"
        (found.grown if number > accepted else found.notes).append(line)


def _compare(found: Comparison, what: str, measured: int, accepted: int, tolerance: float, details: str = "") -> None:
    if abs(measured - accepted) <= tolerance * accepted:
        return
    share = f"{100 * (measured / accepted - 1):+.0f} %" if accepted else "all of it"
    line = f"{what}: {measured:,}, {accepted:,} were accepted ({share}){details}"
    (found.grown if measured > accepted else found.notes).append(line)


def _compare_calls(found: Comparison, case: str, role: str, now: dict[str, int], then: dict[str, int]) -> None:
    changes = {name: now.get(name, 0) - then.get(name, 0) for name in {*now, *then}}
    most = sorted(changes, key=lambda name: -abs(changes[name]))[:4]
    listed = ", ".join(f"{name} {changes[name]:+,}" for name in most)
    what = f"a run of {case}: calls of functions in the {role}"
    _compare(found, what, sum(now.values()), sum(then.values()), CALLS, f": {listed}")

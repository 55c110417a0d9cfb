"""Where a run's time went, as `holdfast runs show` prints it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.exit_codes import CommandError, ExitCode

STYLES = {
    "attempt": "bold",
    "behind": "yellow",
    "queued": "yellow",
    "scheduled": "dim",
    "starting": "dim",
    "ending": "dim",
    "step": "cyan",
    "unfinished": "magenta",
    "retry": "red",
    "takeover": "red",
    "handover": "yellow",
    "children": "blue",
}
# Those that lie within an attempt.
INNER = frozenset({"starting", "step", "unfinished", "ending"})
BAR = 24


def fetch_timeline(client: Client, run_id: str) -> dict[str, Any] | None:
    """The timeline of a run that exists; None from a server that has none to give."""
    try:
        timeline: dict[str, Any] = client.request("GET", f"/runs/{run_id}/timeline")
    except CommandError as error:
        if error.code is ExitCode.UNAVAILABLE:
            raise
        return None
    return timeline


def print_timeline(console: Console, timeline: dict[str, Any]) -> None:
    """One line for each span, with a bar for its share of the whole."""
    whole = max(float(timeline["seconds"]), 1e-9)
    parts = [f"{timeline['queued_seconds']:.3f} s queued", f"{timeline['working_seconds']:.3f} s at work"]
    if timeline["between_seconds"]:
        parts.append(f"{timeline['between_seconds']:.3f} s between attempts")
    console.print(Text.assemble(("Where the time went", "bold"), f": {timeline['seconds']:.3f} s; {', '.join(parts)}"))
    start = datetime.fromisoformat(timeline["created_at"])
    for span in timeline["spans"]:
        kind, seconds = str(span["kind"]), float(span["seconds"])
        offset = (datetime.fromisoformat(span["began_at"]) - start).total_seconds()
        style = STYLES.get(kind, "")
        label = f"attempt {span['attempt']}" if kind == "attempt" and span["attempt"] else kind
        indent = "  " if kind in INNER else ""
        length = max(1, round(BAR * min(1.0, seconds / whole))) if kind != "scheduled" else 0
        going = " …" if span["ended_at"] is None else ""
        console.print(
            Text.assemble(
                (f"  {max(0.0, offset):10.3f} s ", "dim"),
                f"{seconds:10.3f} s  ",
                (f"{'█' * length:{BAR}}", style),
                (f"  {indent + label:13} ", style),
                f"{span['what']}{going}",
            )
        )
    waited = timeline["journal_wait_seconds"]
    if waited is not None:
        console.print(f"  waits for checkpoints and events to be written: {waited:.3f} s in the last attempt")
    for note in timeline["notes"]:
        console.print(f"  note: {note}", style="yellow", markup=False)

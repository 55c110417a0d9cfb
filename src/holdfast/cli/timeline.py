"""Prints where a run's time went, for `holdfast runs show`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
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
# Spans within an attempt.
INNER = frozenset({"starting", "step", "unfinished", "ending"})
# The length of the longest bar, on a wide and on a narrow terminal.
BAR_COLUMNS, NARROW_BAR_COLUMNS = 24, 8
WIDE_TERMINAL_COLUMNS = 120
# Why an attempt began, by the kind of the span before it.
REASONS = {
    "retry": "after a transient error",
    "takeover": "after its worker was lost",
    "handover": "after a worker had handed it back",
    "children": "after its children had ended",
}


def fetch_timeline(client: Client, run_id: str) -> dict[str, Any] | None:
    """The timeline of an existing run. None if the server is too old to have timelines, or refuses the request."""
    try:
        timeline: dict[str, Any] = client.request("GET", f"/runs/{run_id}/timeline")
    except CommandError as error:
        if error.code is ExitCode.UNAVAILABLE:
            raise
        return None
    return timeline


def why_resumed(client: Client, run_id: str, attempt: int) -> str:
    """The reason for an attempt after the first, and whether another worker executes it, as far as the timeline shows
    it."""
    try:
        timeline = fetch_timeline(client, run_id) or {"spans": []}
    except CommandError:
        timeline = {"spans": []}
    spans = [span for span in timeline["spans"] if span["kind"] == "attempt" or span["kind"] in REASONS]
    numbers = [span["attempt"] for span in spans]
    if attempt not in numbers or (position := numbers.index(attempt)) < 2:
        return f"attempt {attempt}"
    before, between, now = spans[position - 2 : position + 1]
    workers = [span.get("worker_id") for span in (before, now)]
    by = "" if None in workers else f", by {'the same' if workers[0] == workers[1] else 'another'} worker"
    return f"{REASONS.get(between['kind'], '')}{by} (attempt {attempt})"


def print_timeline(console: Console, timeline: dict[str, Any]) -> None:
    """Print one line for each span, with a bar for its share of the run's time."""
    whole = max(float(timeline["seconds"]), 1e-9)
    parts = [f"{timeline['queued_seconds']:.3f} s queued", f"{timeline['working_seconds']:.3f} s at work"]
    if timeline["between_seconds"]:
        parts.append(f"{timeline['between_seconds']:.3f} s between attempts")
    console.print(Text.assemble(("Where the time went", "bold"), f": {timeline['seconds']:.3f} s; {', '.join(parts)}"))
    start = datetime.fromisoformat(timeline["created_at"])
    bar = BAR_COLUMNS if console.width >= WIDE_TERMINAL_COLUMNS else NARROW_BAR_COLUMNS
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(overflow="fold")
    for span in timeline["spans"]:
        kind, seconds = str(span["kind"]), float(span["seconds"])
        offset = (datetime.fromisoformat(span["began_at"]) - start).total_seconds()
        style = STYLES.get(kind, "")
        label = f"attempt {span['attempt']}" if kind == "attempt" and span["attempt"] else kind
        indent = "  " if kind in INNER else ""
        length = max(1, round(bar * min(1.0, seconds / whole))) if kind != "scheduled" else 0
        going = " …" if span["ended_at"] is None else ""
        table.add_row(
            Text(f"  {max(0.0, offset):9.3f} s", style="dim"),
            f"{seconds:.3f} s",
            Text(f"{'█' * length:{bar}}", style=style),
            Text(indent + label, style=style),
            Text(f"{span['what']}{going}"),
        )
    console.print(table)
    waited = timeline["journal_wait_seconds"]
    if waited is not None:
        console.print(f"  waits for checkpoints and events to be written: {waited:.3f} s in all attempts")
    for note in timeline["notes"]:
        console.print(f"  note: {note}", style="yellow", markup=False)

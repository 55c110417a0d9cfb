"""Records commits of the journal in the spans of the runs that they wrote. Does nothing while traces are off."""

from __future__ import annotations

from holdfast.journal.entries import EventEntry
from holdfast.journal.run_writer import Group
from holdfast.telemetry import tracing


def trace_commits(group: Group, began: int) -> None:
    """Record a commit in the span of each run that it wrote.

    A commit with events alone is counted and gets no span of its own: a streaming model causes hundreds of them a
    second.
    """
    for writer, (portion, _, size) in group.items():
        if writer.trace is None:
            continue
        events = sum(type(entry) is EventEntry for entry in portion.entries)
        durable = len(portion.entries) - events
        about = {
            "holdfast.journal.events": events,
            "holdfast.journal.writes": durable,
            "holdfast.journal.bytes": size,
            "holdfast.journal.runs": len(group),
        }
        with tracing.suppress_errors():
            writer.trace.committed(began, about, shown=durable > 0 or portion.outcome is not None)

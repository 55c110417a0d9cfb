"""Commits of the journal in the spans of the runs they wrote for. Does nothing while traces are off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.journal.batch import EventEntry, Portion
from holdfast.telemetry import tracing


def trace_commits(group: Mapping[Any, tuple[Portion, Any, int]], began: int) -> None:
    """Record a commit in the span of each run that it wrote for.

    A commit that holds events alone is counted and gets no span of its own: a streaming model causes hundreds of them
    in a second.
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
        with tracing.harmless():
            writer.trace.committed(began, about, shown=durable > 0 or portion.outcome is not None)

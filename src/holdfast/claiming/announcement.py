"""The event with which a claim has announced an attempt, for watchers."""

from __future__ import annotations

from holdfast.engine.claimed_run import ClaimedRun
from holdfast.journal.entries import EventEntry
from holdfast.streams.hints import Flush


def announcement_of(run: ClaimedRun) -> Flush:
    event = EventEntry("metadata", "", run.announcement)
    return Flush(run.thread_id, run.run_id, run.announced_seq, run.announced_seq, [event], run.claimed_at)

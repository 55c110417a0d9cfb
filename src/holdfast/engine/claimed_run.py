"""A run as a claim returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from holdfast.db.stored_json import as_object


@dataclass(frozen=True)
class ClaimedRun:
    """The row of a run that a worker has just claimed, and what the attempt needs to know of its thread."""

    run_id: UUID
    thread_id: UUID
    assistant_id: UUID
    graph_id: str
    tenant_id: str
    fence: int
    attempt: int
    # How many attempts failed with an error and were repeated. Crashes are not counted here.
    retries: int
    # How far earlier attempts have come; see `execution/starting_point.py`.
    progress: int
    kwargs: dict[str, Any]
    metadata: dict[str, Any]
    cancel_action: str | None
    # What earlier attempts have used; see `engine/usage.py`.
    usage: dict[str, Any] | None
    # The budgets that the run shares with others, what all of them have used of each, and the seconds that earlier runs
    # of its thread have used; see `engine/budget.py`.
    pots: list[dict[str, Any]] | None
    parent_run_id: UUID | None
    crashes: int
    # The run was executing when its worker died, and has made no progress since.
    suspect: bool
    worker_id: UUID
    # The thread has no checkpoint yet.
    fresh: bool
    # The thread waits at interrupts.
    asking: bool
    # Seconds since the run first started, since it became ready, and since its row was last changed.
    elapsed: float
    waited: float
    untouched: float
    # The event with which the claim has announced the attempt.
    announced_seq: int
    announcement: bytes
    claimed_at: datetime

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> ClaimedRun:
        """The run of a row. A stored document that is no object counts as an empty one: then only this run fails, and
        not the claim loop."""
        documents = {name: dict(as_object(row[name])) for name in ("kwargs", "metadata")}
        return cls(**{**row, **documents})

    @property
    def next_seq(self) -> int:
        """The number of the attempt's first event."""
        return self.announced_seq + 1

    def log_fields(self) -> dict[str, str | int]:
        """The fields of every log line about the run."""
        return {
            "run_id": str(self.run_id),
            "thread_id": str(self.thread_id),
            "assistant_id": str(self.assistant_id),
            "graph_id": self.graph_id,
            "tenant": self.tenant_id,
            "attempt": self.attempt,
            "worker_id": str(self.worker_id),
        }

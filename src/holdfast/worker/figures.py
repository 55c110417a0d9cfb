"""What a worker counts and shows of itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, assert_never

import holdfast
from holdfast.db.connect import Database
from holdfast.db.pool_readings import pool_readings
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.signals import Signals
from holdfast.signals.choose import signals_mode
from holdfast.telemetry import metrics
from holdfast.telemetry.exposition import as_json, as_text
from holdfast.telemetry.metrics import Metrics


def count_claim(counted: Metrics, run: ClaimedRun) -> None:
    counted.claims.add(1, run.graph_id)
    # The claim has written one.
    counted.events_written.add(1)
    if run.attempt == 1:
        # Later attempts keep the place, and with it the time, that the first one had in the queue.
        counted.queue_wait.observe(run.waited)


def count_end(counted: Metrics, run: ClaimedRun, outcome: Outcome | None, seconds: float) -> None:
    """An attempt has ended; None: it was not ours to end."""
    match outcome:
        case Ended(status=status, dead_letter=dead_letter):
            word = str(status)
            counted.run_seconds.observe(run.elapsed + seconds, run.graph_id)
            if dead_letter is not None:
                counted.dead_letters.add(1, dead_letter)
        case Released(after=None):
            word = "handed_back"
        case Released():
            word = "retry"
            counted.retries.add(1, run.graph_id)
        case RolledBack():
            word = "rolled_back"
        case Waiting():
            word = "waiting"
        case None:
            word = "lost"
        case _:
            assert_never(outcome)
    counted.attempts_ended.add(1, run.graph_id, word)


@dataclass(frozen=True, kw_only=True)
class WorkerFigures:
    """A worker's metrics at this moment, made in the thread that answers probes.

    The counts of the whole fleet are not among them: fifty workers would count the same queue fifty times. The web
    processes have those.
    """

    counted: Metrics
    database: Database
    signals: Signals
    leading: bool
    active: int
    ready: bool
    blocked: tuple[int, float]
    """How often the event loop has been blocked, and for how many seconds in all."""
    deadline: float
    """When the lease ends, on the monotonic clock; 0 before the first."""

    def text(self) -> bytes:
        return as_text(self.counted, "worker", self._readings())

    def json(self) -> dict[str, Any]:
        about = {"active": self.active, "capacity": self.database.settings.jobs, "ready": self.ready}
        return {"worker": about, "metrics": as_json(self.counted, "worker", self._readings())}

    def _readings(self) -> metrics.Readings:
        settings = self.database.settings
        left = self.deadline - time.monotonic() if self.deadline else 0.0
        mode = signals_mode(self.signals, settings)
        return {
            metrics.WORKER_ACTIVE: self.active,
            metrics.WORKER_CAPACITY: settings.jobs,
            metrics.WORKER_READY: int(self.ready),
            metrics.WORKER_LEASE_LEFT: max(0.0, left),
            metrics.WORKER_LEASE_AGE: settings.lease - left if self.deadline else 0.0,
            metrics.LOOP_BLOCKED: self.blocked[0],
            metrics.LOOP_BLOCKED_SECONDS: self.blocked[1],
            metrics.INFO: {("worker", holdfast.__version__): 1},
            metrics.UPKEEP_LEADING: int(self.leading),
            metrics.SIGNALS_MODE: {(one,): int(one == mode) for one in metrics.MODES},
            **pool_readings(self.database),
        }

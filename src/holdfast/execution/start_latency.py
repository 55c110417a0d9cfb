"""Measures how fast an attempt starts: from its claim to the start of its graph, and from there to the first event."""

from __future__ import annotations

import time

from holdfast.execution.observers import AttemptObserver
from holdfast.telemetry.metrics import Metrics


class StartLatency(AttemptObserver):
    """`claimed_at` by `time.monotonic`."""

    def __init__(self, metrics: Metrics, graph_id: str, claimed_at: float) -> None:
        self._metrics = metrics
        self._graph_id = graph_id
        self._claimed_at = claimed_at
        self._started_at = 0.0

    def graph_starts(self) -> None:
        self._started_at = time.monotonic()
        self._metrics.claim_to_start.observe(self._started_at - self._claimed_at)

    def first_event(self) -> None:
        self._metrics.start_to_first_event.observe(time.monotonic() - self._started_at, self._graph_id)

"""How fast an attempt gets going: claimed, started, heard of."""

from __future__ import annotations

import time

from holdfast.telemetry.metrics import Metrics


class Pace:
    """Made when the run is claimed. `silent` until the graph has said something."""

    __slots__ = ("_claimed", "_started", "silent")

    def __init__(self) -> None:
        self._claimed = time.monotonic()
        self._started = 0.0
        self.silent = True

    def start(self, metrics: Metrics) -> None:
        """The graph begins to run."""
        self._started = time.monotonic()
        metrics.claim_to_start.observe(self._started - self._claimed)

    def first_event(self, metrics: Metrics, graph_id: str) -> None:
        self.silent = False
        metrics.start_to_first_event.observe(time.monotonic() - self._started, graph_id)

"""The duty that makes dead letters of runs whose graph no worker has."""

from __future__ import annotations

import structlog

from holdfast.db.connect import Database
from holdfast.db.row_by_row import RowsSetAside
from holdfast.engine.dead_letters.graph_gone import end_graphless_runs, record_missing_graphs
from holdfast.engine.outbox import announce_webhooks
from holdfast.engine.ready import announce_perhaps_ready
from holdfast.signals import Signals
from holdfast.streams.hints import check_log_hint, ended_runs_hints
from holdfast.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

BATCH = 500
# Seconds that a pass may take.
INTERVAL = 60.0
# Looking for missing graphs reads the whole queue: not oftener than this many times within the time they have, and not
# more seldom than these seconds.
LOOKS = 20
LONGEST_PAUSE = 600.0


class Letters:
    """Safe to run in any number of processes."""

    def __init__(self, database: Database, signals: Signals, metrics: Metrics) -> None:
        self._database = database
        self._settings = database.settings
        self._signals = signals
        self._metrics = metrics
        self._aside = RowsSetAside("letters", "run_id", metrics)

    async def run(self) -> float:
        """Put aside what has waited for too long. Returns the seconds until the next look."""
        after = self._settings.graph_gone_after
        if not after:
            return LONGEST_PAUSE
        pause = min(after / LOOKS, LONGEST_PAUSE)
        async with self._database.connection() as connection:
            # Twice the pause may pass when others lead the upkeep in between, and a pass may take its time.
            gone = await record_missing_graphs(connection, after=after, gap=3 * pause + INTERVAL)
        if not gone:
            return pause
        passed_over = self._aside.ids()
        ended = await end_graphless_runs(self._database, gone, after=after, batch=BATCH, aside=self._aside)
        for run in ended:
            about = {"run_id": str(run["run_id"]), "thread_id": str(run["thread_id"]), "graph_id": run["graph_id"]}
            log.warning("run.dead_letter", reason="graph_gone", **about)
        if not ended:
            # What was not reached because others took their time is next.
            return pause if self._aside.ids() == passed_over else 0.0
        self._metrics.dead_letters.add(len(ended), "graph_gone")
        for hint in ended_runs_hints([run["run_id"] for run in ended]):
            self._signals.publish("events", hint)
        for run in ended:
            self._signals.publish("events", check_log_hint(run["thread_id"]), thread_id=run["thread_id"])
        announce_webhooks(self._signals)
        announce_perhaps_ready(self._signals)
        # There may be more, and the next runs of the same threads may be of the same graph.
        return 0.0

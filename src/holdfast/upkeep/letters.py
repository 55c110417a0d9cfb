"""The duty that puts runs aside which nobody can execute: they become dead letters."""

from __future__ import annotations

import time

import structlog

from holdfast.db.connect import Database
from holdfast.engine.graph_gone import note_missing_graphs, put_aside
from holdfast.engine.outbox import announce_webhooks
from holdfast.engine.ready import announce_perhaps_ready
from holdfast.signals import Signals
from holdfast.streams.hints import tell_ended, tell_to_look

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

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._settings = database.settings
        self._signals = signals
        self._look_due = 0.0

    async def run(self) -> None:
        if self._settings.graph_gone_after and time.monotonic() >= self._look_due:
            await self._look()

    async def _look(self) -> None:
        after = self._settings.graph_gone_after
        pause = min(after / LOOKS, LONGEST_PAUSE)
        self._look_due = time.monotonic() + pause
        async with self._database.connection() as connection:
            # Twice the pause may pass when others lead the upkeep in between, and a pass may take its time.
            gone = await note_missing_graphs(connection, after=after, gap=3 * pause + INTERVAL)
        if not gone:
            return
        ended = await put_aside(self._database, gone, after=after, batch=BATCH)
        for run in ended:
            about = {"run_id": str(run["run_id"]), "thread_id": str(run["thread_id"]), "graph_id": run["graph_id"]}
            log.warning("run.dead_letter", reason="graph_gone", **about)
        if ended:
            self._database.metrics.dead_letters.add(len(ended), "graph_gone")
            # There may be more, and the next runs of the same threads may be of the same graph.
            self._look_due = 0.0
            for hint in tell_ended([run["run_id"] for run in ended]):
                self._signals.publish("events", hint)
            for run in ended:
                self._signals.publish("events", tell_to_look(run["thread_id"]), thread_id=run["thread_id"])
            announce_webhooks(self._signals)
            announce_perhaps_ready(self._signals)

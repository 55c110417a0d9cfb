"""Leadership: every process is a candidate, one at a time does the upkeep.

The leader is whoever holds an advisory lock on a session of its own; when the process dies, so does the session, and
the next candidate's try succeeds. Duties are small, idempotent and level-triggered, so that a change of leader in the
middle of one costs nothing.
"""

from __future__ import annotations

import asyncio
import random

import psycopg
import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database, open_session
from holdfast.graphs.checkpointer import CheckpointerSection
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.signals import Signals
from holdfast.telemetry.backoff import Backoff
from holdfast.telemetry.cancelling import cancel_all
from holdfast.upkeep.appointments import Appointments
from holdfast.upkeep.items import ItemSweeper
from holdfast.upkeep.letters import Letters
from holdfast.upkeep.reaper import Reaper
from holdfast.upkeep.sweeper import Sweeper
from holdfast.upkeep.webhooks import Webhooks

log = structlog.get_logger(__name__)

# Blocking on the lock would keep a snapshot open for as long, and vacuum from cleaning the queue; so it is tried.
TRY_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('holdfast upkeep ' || %s, 0)) AS leads"

SILENCE = "SELECT set_config('idle_session_timeout', %s, false)"


class Upkeep:
    """Leads when it can, and does the duties while it leads."""

    def __init__(
        self,
        database: Database,
        signals: Signals,
        items_interval: float = 300.0,
        threads: CheckpointerSection | None = None,
        webhooks: WebhooksSection | None = None,
    ) -> None:
        """`items_interval`: seconds between two looks for expired items of the store. `threads`: how to look for
        expired threads. To be made before the signals run: it listens for webhooks."""
        self._database = database
        self._settings = database.settings
        self._reaper = Reaper(database, signals)
        self._sweeper = Sweeper(database, threads)
        self._appointments = Appointments(database, signals)
        self._items = ItemSweeper(database, items_interval)
        self._letters = Letters(database, signals)
        self._webhooks = Webhooks(database, signals, webhooks or WebhooksSection())
        self._sending: asyncio.Task[None] | None = None
        # Whether this process does the duties. Read by other threads, too.
        self.leading = False

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            await self._stop_sending()

    async def _run(self) -> None:
        backoff = Backoff("upkeep.outage", "upkeep.recovered")
        wanted: float | None = None
        while True:
            try:
                if self._settings.session_url is None:
                    # Behind PgBouncer nobody can hold a lock for long. Every process does the duties, seldom; they
                    # are idempotent.
                    pause = self._settings.reaper_interval * random.uniform(5, 10)  # noqa: S311
                    await asyncio.sleep(pause if wanted is None else min(pause, max(0.0, wanted) + 0.01))
                    wanted = None
                    self.leading = True
                    self._keep_sending()
                    async with self._database.connection() as connection:
                        wanted = await self._pass(connection)
                else:
                    async with await open_session(self._settings, "upkeep") as session:
                        try:
                            await self._lead(session, backoff)
                        finally:
                            self.leading = False
                            await self._stop_sending()
            except (psycopg.Error, OSError, TimeoutError) as error:
                await backoff.failed(error)

    async def _lead(self, session: AsyncConnection[DictRow], backoff: Backoff) -> None:
        # A leader that is stopped, or cut off without a word, keeps its session and so the lock. The server ends the
        # session for it, and others can lead.
        silence = max(self._settings.lease, 2 * self._settings.reaper_interval)
        await session.execute(SILENCE, (f"{silence * 1000:.0f}",))
        leads = False
        while True:
            pause = self._settings.reaper_interval * random.uniform(1.0, 1.1)  # noqa: S311
            if not leads:
                async with asyncio.timeout(self._settings.database_timeout):
                    row = await (await session.execute(TRY_LOCK, (self._settings.db_schema,))).fetchone()
                leads = self.leading = row is not None and row["leads"]
                if leads:
                    log.info("upkeep.leading")
            if leads:
                # Through the session that holds the lock: when it is gone, so is the lead.
                wanted = await self._pass(session)
                self._keep_sending()
                pause = pause if wanted is None else max(0.0, wanted) + 0.01
            backoff.succeeded()
            await asyncio.sleep(pause)

    def _keep_sending(self) -> None:
        """Webhooks are sent beside the other duties: their receivers take their time."""
        if self._sending is not None and self._sending.done() and not self._sending.cancelled():
            log.error("webhooks.crashed", exc_info=self._sending.exception())
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._webhooks.run(), name="webhooks")

    async def _stop_sending(self) -> None:
        if self._sending is not None:
            await cancel_all([self._sending])
            self._sending = None

    async def _pass(self, connection: AsyncConnection[DictRow]) -> float | None:
        """All duties once. Returns when to come back, if that matters."""
        async with asyncio.timeout(self._settings.database_timeout * 3):
            pause = await self._reaper.run(connection)
            await self._sweeper.run()
            await self._items.run()
            await self._letters.run()
            due = await self._appointments.run(connection)
        return due if due < (self._settings.reaper_interval if pause is None else pause) else pause

"""Leadership: every process is a candidate, one at a time does the upkeep.

The leader holds an advisory lock on a session of its own. When the process dies, so does the session, and the next
candidate's try succeeds. Duties are small, idempotent and level-triggered, so that a change of leader in the middle of
one costs nothing.

Each duty is a task with its own schedule, timeout and failures: one that fails, or waits for a lock, delays no other.
Take-over uses the session that holds the lock, and depends on nothing else, not even on a free connection of the pool.
The others use the pool, a few of them at a time.
"""

from __future__ import annotations

import asyncio
import random

import structlog
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.session_database import SessionDatabase
from holdfast.graphs.checkpointer import CheckpointerSection
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.cancelling import run_together
from holdfast.lifecycle.service import TaskService
from holdfast.signals import Signals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.children import ChildKeeper
from holdfast.upkeep.crons import CronFirer
from holdfast.upkeep.dead_letters import Letters
from holdfast.upkeep.deadlines import Deadlines
from holdfast.upkeep.duty import EXPECTED_ERRORS, Duty
from holdfast.upkeep.items import ItemSweeper
from holdfast.upkeep.reaper import Reaper
from holdfast.upkeep.sweeper import Sweeper
from holdfast.upkeep.webhooks import Webhooks

log = structlog.get_logger(__name__)

# Blocking on the lock would keep a snapshot open for as long, and vacuum from cleaning the queue; so it is tried.
# `rush`: while runs are being executed, a dead leader is to be replaced soon, so the candidates try more often. The
# fewer there are, the more often: together they try ten times in the usual pause, as ten candidates do anyway.
TRY_LOCK = """
SELECT pg_try_advisory_lock(hashtextextended('holdfast upkeep ' || %(schema)s, 0)) AS leads,
       CASE WHEN EXISTS (SELECT 1 FROM run WHERE status = 'running')
            THEN least(1.0, 0.1 * (SELECT count(*) + 1 FROM worker WHERE status IN ('online', 'draining'))) END AS rush
"""

# Seconds that take-over waits for a lock before it continues with the runs that are not locked.
LOCK_TIMEOUT_SECONDS = 2.0
# The part of DATABASE_TIMEOUT that it is at most: less than an answer may take, or the session would be given up.
LOCK_TIMEOUT_SHARE = 0.2

# How long the leader's session may be idle before the server ends it, and the lead with it: these seconds, or so many
# times REAPER_INTERVAL_SECONDS if that is longer. A healthy leader uses it once an interval, and within two seconds
# after a failure. To end one too early costs a change of leader and no more: duties may be done twice.
SILENCE_SECONDS = 5.0
SILENCE_TIMES = 3.0

SET_TIMEOUTS = """
SELECT set_config('idle_session_timeout', %(silence)s, false),
       set_config('idle_in_transaction_session_timeout', %(silence)s, false),
       set_config('lock_timeout', %(lock)s, false)
"""


class Upkeep(TaskService):
    """Leads when it can, and does the duties while it leads."""

    name = "upkeep"

    def __init__(
        self,
        database: Database,
        signals: Signals,
        metrics: Metrics,
        items_interval: float = 300.0,
        threads: CheckpointerSection | None = None,
        webhooks: WebhooksSection | None = None,
    ) -> None:
        """`items_interval`: seconds between two looks for expired items of the store. `threads`: how to look for
        expired threads. To be made before the signals are started: it listens for
        webhooks."""
        super().__init__()
        self._database = database
        self._settings = database.settings
        self._reaper = Reaper(database, signals, metrics)
        timeout = self._settings.database_timeout * 3
        # A third of the pool: a process has other work to do, even if every table of the upkeep is locked. A small pool
        # has one place. What is due by the clock, and the children of a run that was stopped, wait for no other duty.
        turn = asyncio.Semaphore(max(1, self._settings.pool_max // 3))
        self.duties = [
            Duty("sweeps", Sweeper(database, metrics, threads).run, timeout=2 * timeout, turn=turn),
            Duty("items", ItemSweeper(database, metrics, items_interval).run, timeout=timeout, turn=turn),
            Duty("letters", Letters(database, signals, metrics).run, timeout=timeout, turn=turn),
            Duty("families", ChildKeeper(database, signals, metrics).run, timeout=timeout),
            Duty("deadlines", Deadlines(database, signals, metrics).run, timeout=timeout),
        ]
        if self._settings.crons:
            self.duties.append(Duty("crons", CronFirer(database, signals, metrics).run, timeout=timeout))
        self._webhooks = Webhooks(database, signals, metrics, webhooks or WebhooksSection())
        # Whether this process does the duties. Read by other threads, too.
        self.leading = False

    async def _run(self) -> None:
        backoff = Backoff("upkeep.outage", "upkeep.recovered")
        while True:
            try:
                if self._settings.session_url is None:
                    # Behind PgBouncer no process can hold an advisory lock. Each process does the duties, less often;
                    # they are idempotent.
                    await self._do_duties(None)
                else:
                    async with await self._database.session("upkeep") as session:
                        await self._win(session, backoff)
                        log.info("upkeep.leading")
                        await self._do_duties(session)
            except Exception as error:
                if not isinstance(error, EXPECTED_ERRORS) and not backoff.failing:
                    log.exception("upkeep.duty_crashed", duty="leadership")
                await backoff.failed(error)

    async def _win(self, session: AsyncConnection[DictRow], backoff: Backoff) -> None:
        """Return when the session holds the lock."""
        # A leader that is stopped, whose event loop is blocked, or whose network is gone keeps its session and so the
        # lock. The server ends the session for it, and others can lead.
        silence = max(SILENCE_SECONDS, SILENCE_TIMES * self._settings.reaper_interval)
        lock = min(LOCK_TIMEOUT_SECONDS, LOCK_TIMEOUT_SHARE * self._settings.database_timeout)
        timeouts = {"silence": f"{silence * 1000:.0f}", "lock": f"{lock * 1000:.0f}"}
        await session.execute(SET_TIMEOUTS, timeouts)
        while True:
            async with asyncio.timeout(self._settings.database_timeout):
                row = await (await session.execute(TRY_LOCK, {"schema": self._settings.db_schema})).fetchone()
            backoff.succeeded()
            assert row is not None
            if row["leads"]:
                return
            pause = self._settings.reaper_interval * random.uniform(1.0, 1.1)  # noqa: S311
            await asyncio.sleep(pause if row["rush"] is None else pause * float(row["rush"]))

    async def _do_duties(self, session: AsyncConnection[DictRow] | None) -> None:
        """Do all duties until the session, and with it the lead, is lost. None: the lead cannot be lost."""
        take_over = Duty(
            "takeover",
            lambda: self._look(session),
            # Longer than runs are released one by one. A statement that is not answered is given up before.
            timeout=3 * self._settings.database_timeout,
            longest_pause=2.0,
            lost=lambda: session is not None and session.closed,
        )
        # After an outage, or while the machine was suspended, all leases may have expired.
        self._reaper.distrust_leases()
        self.leading = True
        try:
            duties = {duty.name: duty.run() for duty in (take_over, *self.duties)}
            await run_together(**duties, webhooks=self._send_webhooks())
        finally:
            self.leading = False

    async def _look(self, session: AsyncConnection[DictRow] | None) -> float:
        """Look for lost workers once. Returns the seconds until the next look."""
        interval = self._settings.reaper_interval
        if session is not None:
            wanted = await self._reaper.run(SessionDatabase(self._database, session))
            # At least once an interval: the server ends the session of a leader that asks nothing.
            usual = interval * random.uniform(1.0, 1.1)  # noqa: S311
            return usual if wanted is None else min(usual, wanted)
        wanted = await self._reaper.run(self._database)
        pause = interval * random.uniform(5, 10)  # noqa: S311
        return pause if wanted is None else min(pause, wanted)

    async def _send_webhooks(self) -> None:
        while True:
            try:
                await self._webhooks.run()
            except Exception:
                log.exception("webhooks.crashed")
                await asyncio.sleep(random.uniform(0.5, 1.0))  # noqa: S311

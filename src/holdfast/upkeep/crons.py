"""The duty that fires crons when they are due."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

import psycopg
import structlog
from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import TRY_TIMEOUT_SHARE, RowsSetAside, ignore_failures
from holdfast.engine.create import LOCK_OPEN_THREADS
from holdfast.engine.new_run import CreatedRun, RunRequest
from holdfast.engine.submit import announce_run, create_run_within, make_run
from holdfast.errors import RequestError
from holdfast.graphs.client_config import client_metadata
from holdfast.resources.assistants import get_assistant
from holdfast.resources.crons import advance_cron, next_cron_due, postpone_cron, upcoming_crons
from holdfast.resources.tenants import default_quota
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.duty import LOOK_INTERVAL

# Until a cron is tried again that could not be fired.
RETRY_SECONDS = 60.0
# Until the next look when everything that is due is locked.
LOCKED_RETRY_SECONDS = 1.0
# Crons that one pass fires.
MAX_CRONS_PER_PASS = 100
# A due time before a cron's end is made up for until this long after the end: a change of leader may delay a firing by
# as much, but a cron that ended during an outage must not fire after it.
MAX_DELAY_AFTER_END = timedelta(minutes=1)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Firing:
    """What came of a due time: a run, or the reason why none was created."""

    created: CreatedRun | None = None
    skipped: str = ""


class CronFirer:
    """May run in any number of processes: a due time is moved on together with creating its run, by one of them."""

    def __init__(self, database: Database, signals: Signals, metrics: Metrics) -> None:
        self._database = database
        self._signals = signals
        self._aside = RowsSetAside("crons", "due_time", metrics, first_delay=RETRY_SECONDS)

    async def run(self) -> float:
        """Fire what is due, at most one batch. Returns the seconds until the next look."""
        aside = self._aside.ids()
        async with self._database.connection() as connection:
            due_in = await next_cron_due(connection, aside)
            if due_in is None or due_in > 0:
                return LOOK_INTERVAL if due_in is None else min(LOOK_INTERVAL, due_in)
            upcoming = await upcoming_crons(connection, MAX_CRONS_PER_PASS, aside)
        processed = [await self._fire(cron) for cron in upcoming if cron["due_in"] <= 0]
        # A cron that was fired may be due again soon, and more crons may be due than one pass fires.
        return 0.0 if any(processed) else LOCKED_RETRY_SECONDS

    async def _fire(self, due: DictRow) -> bool:
        """Whether the due time was processed: not if the cron is locked, or another process was first."""
        about = {"cron_id": str(due["cron_id"]), "due": due["next_run_date"].isoformat()}
        try:
            firing = await fire(self._database, due)
        except Exception as error:
            if is_outage(error) and not isinstance(error, TimeoutError):
                raise
            # A cron that cannot be fired, or whose thread is locked, must not keep the others from being fired.
            log.exception("cron.failed", **about)
            # Setting it aside in memory works even if its row cannot be written.
            async with ignore_failures(self._database):
                await postpone_cron(self._database, due, RETRY_SECONDS)
            self._aside.put(due, error)
            return True
        if firing is None:
            return False
        if firing.created is None:
            log.warning("cron.skipped", reason=firing.skipped, **about)
            return True
        log.info("cron.fired", run_id=str(firing.created.new.run_id), **about)
        announce_run(self._signals, firing.created)
        return True


async def fire(database: Database, due: DictRow) -> Firing | None:
    """Create the run of a due cron, as `upcoming_crons` found it, and move the cron on to its next due time, in one
    transaction. None when another process did so first, the cron is not what it was, or it is locked.

    However many due times have passed, there is one run. When the run is refused (the strategy is `reject` and the
    thread is busy), the due time has passed all the same.

    Raises TimeoutError after TRY_TIMEOUT_SHARE of DATABASE_TIMEOUT, so that one cron delays the others no longer.
    The wait for a connection of the pool does not count: it is not caused by the cron.
    """
    seconds = TRY_TIMEOUT_SHARE * database.settings.database_timeout
    async with database.transaction() as connection, asyncio.timeout(seconds):
        if due["thread_id"] is not None:
            # Before the cron: deleting a thread locks the thread first, then its crons.
            await connection.execute(LOCK_OPEN_THREADS, {"thread_ids": [due["thread_id"]]})
        cron = await advance_cron(connection, due)
        if cron is None:
            return None
        if due["end_time"] is not None and due["now"] > due["end_time"] + MAX_DELAY_AFTER_END:
            return Firing(skipped="the cron has ended")
        assistant = await get_assistant(connection, cron["assistant_id"])
        new = make_run(_run_request(cron, database.settings), assistant)
        try:
            async with connection.transaction():
                return Firing(await create_run_within(connection, new))
        except (RequestError, psycopg.DataError) as error:
            return Firing(skipped=str(error))


def _run_request(cron: DictRow, settings: Settings) -> RunRequest:
    template, thread_id = cron["template"], cron["thread_id"]
    # Crons that an earlier version stored may have any key.
    metadata = {**client_metadata(cron["metadata"]), "cron_id": str(cron["cron_id"])}
    return RunRequest(
        by="cron",
        kwargs=template["kwargs"],
        metadata=metadata,
        multitask_strategy=template["multitask_strategy"],
        after_seconds=template["after_seconds"],
        priority=template["priority"],
        thread_id=thread_id or uuid7(),
        create_thread=thread_id is None,
        temporary=cron["on_run_completed"] == "delete",
        thread_metadata=metadata,
        thread_ttl=template.get("thread_ttl"),
        tenant_id=cron["tenant_id"],
        quota=default_quota(settings) if cron["tenant_id"] else None,
    )

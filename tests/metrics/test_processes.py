"""What single parts of a process count, each where it happens."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import Mock

import httpx
import pytest

from holdfast.db.connect import Database
from holdfast.db.pool_readings import pool_readings
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.states import RunStatus
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.settings import Settings, load_settings
from holdfast.signals.choose import signals_mode
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry import metrics as declared
from holdfast.telemetry.loop_delay import measure_loop_delay
from holdfast.telemetry.metrics import OUTCOMES, Metrics
from holdfast.upkeep.leader import Upkeep
from holdfast.worker.figures import count_end
from tests.metrics.scrape import scrape
from tests.support import waiting
from tests.support.servers import free_port
from tests.support.smoke import working

LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('holdfast upkeep ' || %s, 0))"
QUEUED = """
SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name ~ '^holdfast upkeep' AND datname = current_database()
"""


async def test_a_loop_that_is_blocked_is_late() -> None:
    metrics = Metrics()
    watching = asyncio.create_task(measure_loop_delay(metrics, 0.01))
    await asyncio.sleep(0)  # It has begun to wait.
    time.sleep(0.3)

    def observed() -> tuple[int, float]:
        [(_, counts, total)] = metrics.loop_delay.tallies()
        return sum(counts), total

    await waiting.until_true(lambda: observed()[0] > 0, "the delay is seen")
    assert observed()[1] >= 0.2
    await cancel_all([watching])


async def test_a_process_that_lost_its_session_does_not_say_that_it_leads(database: Database) -> None:
    upkeep = Upkeep(database, PostgresSignals(database), Metrics())
    await upkeep.start()
    await waiting.until_true(lambda: upkeep.leading, "it leads")
    async with database.transaction() as connection, database.connection() as other:
        # Somebody is next in line, so that it does not lead again as soon as it has a new session.
        next_in_line = asyncio.create_task(connection.execute(LOCK, (database.settings.db_schema,)))

        async def queued() -> bool:
            return (await other.execute(QUEUED)).rowcount == 1

        await waiting.until(queued, "somebody waits for the lead")
        assert (await other.execute(TERMINATE)).rowcount == 1
        await next_in_line
        await waiting.until_true(lambda: not upkeep.leading, "it does not lead any more")
    await waiting.until_true(lambda: upkeep.leading, "it leads again")
    await upkeep.stop()
    assert not upkeep.leading


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Ended(status=RunStatus.SUCCESS, thread_status="idle"), "success"),
        (Ended(status=RunStatus.ERROR, thread_status="error", dead_letter="retries_exhausted"), "error"),
        (Ended(status=RunStatus.TIMEOUT, thread_status="idle"), "timeout"),
        (Ended(status=RunStatus.INTERRUPTED, thread_status="idle"), "interrupted"),
        (Released(after=1.0), "retry"),
        (Released(), "handed_back"),
        (RolledBack(), "rolled_back"),
        (Waiting(awaited={}), "waiting"),
        (None, "lost"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_end_of_an_attempt_has_its_word(outcome: Outcome | None, word: str) -> None:
    metrics = Metrics()
    count_end(metrics, Mock(graph_id="echo", elapsed=10.0), outcome, 2.0)
    assert metrics.attempts_ended.values() == {("echo", word): 1}
    assert word in OUTCOMES
    assert metrics.retries.values() == ({("echo",): 1} if word == "retry" else {})
    assert sum(metrics.dead_letters.values().values()) == (word == "error")
    # What the attempts before it took is part of the run.
    ended = [total for _, _, total in metrics.run_seconds.tallies()]
    assert ended == ([12.0] if isinstance(outcome, Ended) else [])


async def test_a_worker_counts_that_it_was_lost(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    # After a registration no renewal comes between what the test changes and what it looks at.
    monkeypatch.setattr("holdfast.worker.heartbeat.FIRST_RENEWAL_SECONDS", 3600.0)
    rare = {"heartbeat": 3600.0, "lease": 7200.0}
    watched = settings.model_copy(update={"health_port": free_port(), "poll_interval": 0.2, **rare})
    url = f"http://127.0.0.1:{watched.health_port}"
    async with working(watched) as worker, httpx.AsyncClient() as client:
        await waiting.until_true(lambda: worker.ready().well, "the worker is ready")
        before = await scrape(client, url)
        assert (before.value("leases_lost_total"), before.value("worker_ready")) == (0, 1)
        lost = worker.lease.worker_id
        assert lost is not None
        worker.lease.lose(lost)
        await waiting.until_true(lambda: worker.lease.worker_id not in (None, lost), "it is another worker")
        after = await scrape(client, url)
        assert (after.value("leases_lost_total"), after.value("worker_ready")) == (1, 1)
        # Without a lease, and without the loop: the answer comes from another thread.
        worker.heartbeat._deadline = time.monotonic() - 3
        lapsed = worker.metrics().json()["metrics"]
        [age], [left] = lapsed["holdfast_worker_lease_age_seconds"], lapsed["holdfast_worker_lease_left_seconds"]
        assert age["value"] >= watched.lease + 3
        assert left["value"] == 0


async def test_who_waits_for_a_connection_is_seen(database: Database) -> None:
    narrow = Database(database.settings.model_copy(update={"pool_max": 1, "pool_min": 1}), "test")
    await narrow.open()
    async with narrow.connection():

        async def wait() -> None:
            async with narrow.connection():
                pass

        waiter = asyncio.create_task(wait())
        await waiting.until_true(lambda: pool_readings(narrow)[declared.POOL_WAITING] == 1, "somebody waits")
        found = pool_readings(narrow)
        assert (found[declared.POOL_USED], found[declared.POOL_LIMIT], found[declared.POOL_SIZE]) == (1, 1, 1)
    await waiter
    waited = pool_readings(narrow)
    assert waited[declared.POOL_WAITING] == 0
    assert waited[declared.POOL_WAITED] > 0  # type: ignore[operator]
    assert waited[declared.POOL_REQUESTS] == 2
    await narrow.close()


@pytest.mark.parametrize(
    ("degraded", "changed", "mode"),
    [
        (False, {}, "postgres"),
        (True, {}, "polling"),
        (False, {"redis_url": "redis://localhost"}, "redis"),
        (True, {"redis_url": "redis://localhost"}, "polling"),
        (False, {"pgbouncer": True}, "polling"),
        (False, {"pgbouncer": True, "direct_database_url": "postgresql://localhost"}, "postgres"),
    ],
)
def test_how_hints_travel(degraded: bool, changed: dict[str, object], mode: str) -> None:
    settings = load_settings({}, database_url="postgresql://elsewhere/holdfast")
    assert signals_mode(Mock(degraded=degraded), settings.model_copy(update=changed)) == mode

"""Clients that have asked for a cancel on disconnect, and leave while the database is away."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
from structlog.testing import capture_logs

from holdfast.api import abandoned
from holdfast.api.abandoned import AbandonedRuns, Cancel
from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.support.postgres_proxy import PostgresProxy
from tests.support.records import query
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES
from tests.support.waiting import until, until_true

OUTAGE = psycopg.OperationalError("the connection is closed")


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[PostgresProxy]:
    async with PostgresProxy(database_url) as proxy:
        yield proxy


@pytest.fixture
async def distant(settings: Settings, proxy: PostgresProxy) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server without a worker, whose database is behind the proxy."""
    distant = settings.model_copy(update={"database_url": proxy.url, "database_timeout": 3.0})
    async with answering(distant, GraphCatalog.load(load_config(EXAMPLES))) as client:
        yield client


@pytest.mark.parametrize("way", ["stream", "wait"])
async def test_a_cancel_on_disconnect_waits_for_the_database(
    distant: httpx.AsyncClient, proxy: PostgresProxy, database: Database, way: str
) -> None:
    body = {"assistant_id": "steps", "input": {"seconds": 0}, "on_disconnect": "cancel"}
    with capture_logs() as logs:
        async with distant.stream("POST", f"/runs/{way}", json=body):
            proxy.cut()
        await until_true(
            lambda: any(line["event"] == "abandoned.outage" for line in logs), "the first cancel has failed"
        )
    proxy.restore()

    async def interrupted() -> bool:
        return [row["status"] for row in await query(database, "SELECT status FROM run")] == ["interrupted"]

    await until(interrupted, "the run is cancelled")


class Cancelling:
    """Fails as often as it is told, and counts."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.done: list[UUID] = []

    async def __call__(self, thread_id: UUID, run_ids: list[UUID], action: Any) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.done += run_ids


@asynccontextmanager
async def running(runs: AbandonedRuns, cancel: Cancel) -> AsyncIterator[None]:
    runs.cancel = cancel
    await runs.start()
    yield
    await runs.stop()


async def test_cancel_is_tried_again_on_a_server_that_is_not_primary_yet() -> None:
    runs, cancelling, run_id = AbandonedRuns(), Cancelling(psycopg.errors.ReadOnlySqlTransaction()), uuid4()
    runs.add(uuid4(), run_id)
    async with running(runs, cancelling):
        await until_true(lambda: cancelling.done == [run_id], "the run is cancelled by the second try")


async def test_abandoned_run_that_cannot_be_cancelled_does_not_stop_the_others() -> None:
    runs, cancelling = AbandonedRuns(), Cancelling(ValueError("a defect"), OUTAGE)
    ids = [uuid4() for _ in range(10)]
    for run_id in ids:
        runs.add(uuid4(), run_id)
    async with running(runs, cancelling):
        await until_true(lambda: len(cancelling.done) == 9, "all but one are cancelled")
    assert set(cancelling.done) == set(ids[1:])


@pytest.mark.parametrize("fails", [False, True], ids=["waits for a lock", "fails"])
async def test_cancels_that_do_not_succeed_delay_no_other(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(abandoned, "CANCEL_TIMEOUT_SECONDS", 0.05)
    runs, unlocked = AbandonedRuns(), asyncio.Event()
    locked, others = [uuid4() for _ in range(2 * abandoned.MAX_CONCURRENT_CANCELS)], [uuid4() for _ in range(20)]
    done = set[UUID]()

    async def cancel(thread_id: UUID, run_ids: list[UUID], action: Any) -> None:
        if run_ids[0] in locked and not unlocked.is_set():
            if fails:
                raise psycopg.errors.LockNotAvailable
            await unlocked.wait()
        done.update(run_ids)

    for run_id in [*locked, *others]:
        runs.add(uuid4(), run_id)
    with capture_logs() as logs:
        async with running(runs, cancel):
            await until_true(lambda: done == set(others), "the others are cancelled")
            unlocked.set()
            await runs.drain()
    assert done == {*locked, *others}
    assert [line["event"] for line in logs] == ["abandoned.outage", "abandoned.recovered"]


async def test_further_tries_leave_a_place_for_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, unlocked = AbandonedRuns(), asyncio.Event()
    locked, other = [uuid4() for _ in range(abandoned.MAX_CONCURRENT_CANCELS)], uuid4()
    tries, done = Counter[UUID](), set[UUID]()

    async def cancel(thread_id: UUID, run_ids: list[UUID], action: Any) -> None:
        tries.update(run_ids)
        if run_ids[0] in locked and tries[run_ids[0]] == 1:
            raise OUTAGE
        if run_ids[0] in locked:
            await unlocked.wait()
        done.update(run_ids)

    monkeypatch.setattr(abandoned, "CANCEL_TIMEOUT_SECONDS", 600.0)
    for run_id in locked:
        runs.add(uuid4(), run_id)
    async with running(runs, cancel):
        await until_true(
            lambda: sum(tries.values()) == 2 * abandoned.MAX_CONCURRENT_CANCELS - 1, "all but one are tried again"
        )
        runs.add(uuid4(), other)
        await until_true(lambda: done == {other}, "the other one is cancelled")


async def test_a_process_that_stops_tries_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, cancelling, run_id = AbandonedRuns(), Cancelling(OUTAGE, OUTAGE), uuid4()
    runs.add(uuid4(), run_id)
    async with running(runs, cancelling):
        pass
    assert cancelling.done == [run_id]
    monkeypatch.setattr(abandoned, "DRAIN_TIMEOUT_SECONDS", 0.05)
    runs = AbandonedRuns()
    runs.add(uuid4(), run_id)
    with capture_logs() as logs:
        async with running(runs, Cancelling(*[OUTAGE] * 100)):
            pass
    assert [line["run_id"] for line in logs if line["event"] == "run.not_cancelled"] == [str(run_id)]


async def test_the_number_that_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abandoned, "MAX_WAITING_RUNS", 2)
    runs, cancelling = AbandonedRuns(), Cancelling()
    ids = [uuid4() for _ in range(3)]
    with capture_logs() as logs:
        for run_id in [*ids, *ids[:2]]:
            runs.add(uuid4(), run_id)
    assert [line["run_id"] for line in logs] == [str(ids[2])]
    async with running(runs, cancelling):
        await runs.drain()
    assert set(cancelling.done) == set(ids[:2])

"""What is owed is written with the end of the run, whoever writes that, and is sent by one process at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.new_run import NewRun
from holdfast.engine.reap import release_orphans
from holdfast.engine.states import MultitaskStrategy
from holdfast.engine.submit import create_run
from holdfast.errors import Cancelled, JournalFailed
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.journal import batch
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.settings import Settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep import webhooks as duty
from holdfast.upkeep.sweeper import Sweeper
from holdfast.upkeep.webhooks import Webhooks
from holdfast.webhooks.deliveries import (
    FIRST_TURN,
    Delivery,
    UrlKind,
    claim_deliveries,
    find_due,
    mark_delivered,
    mark_failed,
    next_due,
)
from tests.support.catalogs import catalog_of
from tests.support.nodes import GO, Flaky, Gate, first, line
from tests.support.receiver import Receiver
from tests.support.records import post_run, query, run_row
from tests.support.station import DECLARE_LOST, open_station
from tests.support.waiting import until, until_true

URL = "https://example.com/hook"
LARGE_VALUES = """UPDATE webhook_delivery SET "values" = jsonb_build_object('text', repeat('x', 500000)) RETURNING 1"""


async def queued(database: Database) -> list[DictRow]:
    return await query(database, "SELECT * FROM webhook_delivery ORDER BY created_at")


async def owe(database: Database, url: str, count: int = 1) -> list[UUID]:
    """Runs that were cancelled before anybody began them, each with a webhook to be sent."""
    runs = []
    for _ in range(count):
        created = await post_run(database, "graph", input=GO, webhook=url)
        await cancel_runs(database, created.run["thread_id"], None, "interrupt")
        runs.append(created.run["run_id"])
    return runs


async def claim_due(
    connection: AsyncConnection[DictRow], lease: float, max_bytes: int = 10**6, kind: UrlKind = "any"
) -> list[Delivery]:
    found, turn = await find_due(connection, kind, FIRST_TURN, receivers=10, each=50)
    assert turn == FIRST_TURN
    return await claim_deliveries(connection, [one.delivery_id for one in found], lease, max_bytes)


async def executed(settings: Settings, database: Database, graph: Any, **kwargs: Any) -> DictRow:
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        await post_run(database, "graph", input=GO, **kwargs)
        attempt, _ = await station.execute_next()
    return await run_row(database, attempt.run.run_id)


@pytest.mark.parametrize(
    ("node", "changes", "status"),
    [
        (first, {}, "success"),
        (Flaky(ValueError("no"), 1), {}, "error"),
        (Gate(), {"run_timeout": 4.0}, "timeout"),
    ],
    ids=["success", "error", "timeout"],
)
async def test_journal_writes_the_delivery_of_an_ended_run(
    settings: Settings, database: Database, node: Any, changes: dict[str, Any], status: str
) -> None:
    run = await executed(settings.model_copy(update=changes), database, line(node), webhook=URL)
    assert run["status"] == status
    [owed] = await queued(database)
    assert (owed["run_id"], owed["thread_id"], owed["url"]) == (run["run_id"], run["thread_id"], URL)
    assert (owed["run"]["status"], owed["state"], owed["attempts"]) == (status, "pending", 0)
    assert owed["values"]["words"][0] == "go"
    assert (owed["run"]["error"] is None) is (status == "success")


async def test_run_without_webhook_costs_no_statement(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "QUEUE_WEBHOOKS", "no statement at all")
    assert (await executed(settings, database, line(first)))["status"] == "success"
    # It would have been noticed.
    with pytest.raises(JournalFailed):
        await executed(settings, database, line(first), webhook=URL)


async def test_run_that_will_be_retried_writes_no_delivery(settings: Settings, database: Database) -> None:
    run = await executed(settings, database, line(Flaky(ConnectionError("not yet"), 1)), webhook=URL)
    assert run["status"] == "pending"
    assert await queued(database) == []


async def test_a_rolled_back_run_owes_nothing(settings: Settings, database: Database) -> None:
    gate = Gate()
    async with open_station(settings, database, catalog_of(graph=line(gate))) as station:
        created = await post_run(database, "graph", input=GO, webhook=URL)
        [attempt] = await station.claim()
        execution = asyncio.create_task(station.executor.execute(attempt))
        await gate.reached.wait()
        await cancel_runs(database, created.run["thread_id"], None, "rollback")
        attempt.stop(Cancelled("rollback"))
        await execution
    assert await query(database, "SELECT 1 FROM run") == []
    assert await queued(database) == []


async def test_reaper_writes_the_delivery_of_a_poison_run(settings: Settings, database: Database) -> None:
    async with open_station(settings, database, catalog_of(graph=line(first))) as station:
        for webhook, action in ((URL, None), (None, None), (URL, "rollback")):
            created = await post_run(database, "graph", input=GO, webhook=webhook)
            [_] = await station.claim()
            if action is not None:
                await cancel_runs(database, created.run["thread_id"], None, "rollback")
        # Not the first crash of any of them, so that none is excused by the others.
        await query(database, "UPDATE run SET crashes_in_a_row = 1 RETURNING 1")
        await query(database, DECLARE_LOST, station.worker_id)
        released = await release_orphans(database, max_crashes=1)
    assert [run["status"] for run in released] == ["error"] * 3
    [owed] = await queued(database)
    assert owed["run"]["error"]["error"] == "PoisonRun"


@pytest.mark.parametrize(("strategy", "owed"), [("interrupt", 1), ("rollback", 0)])
async def test_a_run_that_takes_the_place_of_another(
    database: Database, strategy: MultitaskStrategy, owed: int
) -> None:
    before = await post_run(database, "graph", input=GO, webhook=URL)
    new = NewRun(
        thread_id=before.run["thread_id"],
        assistant_id=before.run["assistant_id"],
        graph_id="graph",
        kwargs={"webhook": URL},
        multitask_strategy=strategy,
    )
    created = await create_run(database, new)
    assert created.cancelled.webhooks is bool(owed)
    assert [row["run_id"] for row in await queued(database)] == [before.run["run_id"]] * owed


# --- sending ---------------------------------------------------------------------------------------


@asynccontextmanager
async def sending(database: Database, *, count: int = 1) -> AsyncIterator[list[PostgresSignals]]:
    """Processes that send what is due, as the leader does. Their signals, which carry nothing."""
    signals = [PostgresSignals(database) for _ in range(count)]
    tasks = [asyncio.create_task(Webhooks(database, each, Metrics(), WebhooksSection()).run()) for each in signals]
    try:
        yield signals
    finally:
        await cancel_all(tasks)


async def all_are(database: Database, state: str) -> list[DictRow]:
    async def there() -> list[DictRow] | None:
        rows = await queued(database)
        return rows if all(row["state"] == state for row in rows) else None

    rows = await until(there, f"every webhook is {state}")
    assert rows is not None
    return rows


async def test_several_processes_send_each_once(database: Database, receiver: Receiver) -> None:
    """More than one calls at once."""
    runs = await owe(database, receiver.url, 120)
    async with sending(database, count=4):
        await all_are(database, "delivered")
    assert len(receiver.received) == len(runs)
    assert {one.json["run_id"] for one in receiver.received} == {str(run) for run in runs}


async def test_a_lost_hint_costs_time_and_no_more(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duty, "LOOK_INTERVAL", 0.05)
    async with sending(database):
        await owe(database, receiver.url)
        await all_are(database, "delivered")


async def test_after_a_day_it_is_given_up(settings: Settings, database: Database, receiver: Receiver) -> None:
    receiver.answer = lambda _: 503
    await owe(database, receiver.url, 2)
    await query(
        database,
        "UPDATE webhook_delivery SET retry_since = now() - interval '25 hours' WHERE run_id = "
        "(SELECT run_id FROM webhook_delivery LIMIT 1) RETURNING 1",
    )
    patient = Database(settings.model_copy(update={"webhook_retry_base": 5.0}), "test")
    await patient.open()
    try:
        async with sending(patient):

            async def tried() -> bool:
                return all(row["attempts"] == 1 and not row["sending"] for row in await queued(database))

            await until(tried, "both are tried")
    finally:
        await patient.close()
    rows = {row["state"]: row for row in await queued(database)}
    assert rows.keys() == {"failed", "pending"}
    assert rows["failed"]["settled_at"] is not None
    assert "503" in rows["failed"]["last_error"]
    pause = rows["pending"]["next_attempt_at"] - rows["pending"]["created_at"]
    assert pause.total_seconds() >= 4


async def test_the_last_try_is_when_the_time_is_up(database: Database) -> None:
    await owe(database, URL)
    await query(
        database, "UPDATE webhook_delivery SET retry_since = now() - interval '23 hours 59 minutes' RETURNING 1"
    )
    async with database.connection() as connection:
        [claimed] = await claim_due(connection, 10.0)
        state = await mark_failed(
            connection, claimed, status=500, error="no", final=False, pause=10_000.0, retry_for=86_400.0
        )
        due = await next_due(connection)
    assert state == "pending"
    assert due is not None
    assert due <= 60


async def test_claim_is_bounded_by_bytes(database: Database) -> None:
    for _ in range(3):
        await owe(database, URL)
    await query(database, LARGE_VALUES)
    async with database.connection() as connection:
        claimed = await claim_due(connection, 3600.0, 1_200_000)
        assert len(claimed) == 2
        assert all(500_000 < one.size < 600_000 for one in claimed)
        assert len(await claim_due(connection, 3600.0, 1000)) == 1, "one is sent whatever its size"


class CountedLooks(Webhooks):
    """Counts how often it has looked for what is due."""

    looks = 0

    async def _look(self, calls: asyncio.TaskGroup) -> float:
        self.looks += 1
        return await super()._look(calls)


async def test_deliveries_under_way_are_bounded_by_bytes(
    database: Database, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent gives its part of the budget back."""
    monkeypatch.setattr(duty, "MAX_SENDING_BYTES", 2_100_000)
    monkeypatch.setattr(duty, "LOOK_INTERVAL", 0.01)
    receiver.hold = asyncio.Event()
    await owe(database, receiver.url, 6)
    await query(database, LARGE_VALUES)
    webhooks = CountedLooks(database, PostgresSignals(database), Metrics(), WebhooksSection())
    sender = asyncio.create_task(webhooks.run())
    # Two of four fit: the rest is for other receivers.
    await receiver.get(2)
    looks = webhooks.looks
    await until_true(lambda: webhooks.looks >= looks + 5, "it looks again")
    assert [row["attempts"] for row in await queued(database) if row["attempts"]] == [1, 1]
    receiver.hold.set()
    await all_are(database, "delivered")
    await cancel_all([sender])
    assert len(receiver.received) == 6


async def test_a_claim_keeps_others_away_until_it_is_over(database: Database) -> None:
    await owe(database, URL)
    async with database.connection() as connection:
        [lost] = await claim_due(connection, 3600.0)
        assert await claim_due(connection, 3600.0) == []
        await query(database, "UPDATE webhook_delivery SET next_attempt_at = now() RETURNING 1")
        [again] = await claim_due(connection, 3600.0)
        assert (lost.attempts, again.attempts) == (1, 2)
        # Who comes back late and has failed has nothing to say; who has succeeded has.
        late: dict[str, Any] = {"status": None, "error": "late", "final": True, "pause": 1.0, "retry_for": 9999.0}
        assert await mark_failed(connection, lost, **late) is None
        await mark_delivered(connection, lost, 200)
        assert await mark_failed(connection, again, **late) is None
    [row] = await queued(database)
    assert (row["state"], row["last_status"], row["last_error"]) == ("delivered", 200, None)


async def test_those_that_are_over_are_swept(database: Database) -> None:
    await owe(database, URL, 4)
    rows = await queued(database)
    settle = (
        "UPDATE webhook_delivery SET state = %s, settled_at = now() - %s::interval, delivered_at = now() "
        "WHERE delivery_id = %s RETURNING 1"
    )
    for row, state, ago in zip(
        rows, ("delivered", "failed", "delivered"), ("8 days", "8 days", "6 days"), strict=False
    ):
        await query(database, settle, state, ago, row["delivery_id"])
    await Sweeper(database, Metrics()).finish()
    left = await queued(database)
    assert [row["delivery_id"] for row in left] == [row["delivery_id"] for row in rows[2:]]

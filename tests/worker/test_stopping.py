"""Stopping: a run that is cancelled, takes too long or has to leave its worker, and the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import psycopg
import pytest
from langgraph.pregel import Pregel

from holdfast.claiming import unexecuted_runs
from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.outcome import Ended
from holdfast.errors import Cancelled
from holdfast.execution import stopping
from holdfast.journal import journal
from holdfast.lifecycle.service import run_until
from holdfast.settings import Settings
from holdfast.worker import attempts
from holdfast.worker.main import Worker
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Gate, Words, first, last, line
from tests.support.records import (
    attempts_told,
    payloads,
    post_run,
    query,
    run_ended,
    run_events,
    run_row,
    thread_events,
    thread_row,
)
from tests.support.station import Station, open_station
from tests.support.waiting import until, until_true
from tests.worker.conftest import JournalSessions

OpenStation = Callable[..., Any]


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url)


@pytest.fixture
def station_for(settings: Settings, database: Database) -> OpenStation:
    @asynccontextmanager
    async def opened(graph: Pregel[Any, Any, Any, Any], **changes: Any) -> AsyncIterator[Station]:
        changed = settings.model_copy(update=changes)
        async with open_station(changed, database, catalog_of(graph=graph)) as station:
            yield station

    return opened


async def test_a_run_that_takes_too_long_is_stopped(station_for: OpenStation, database: Database) -> None:
    gate = Gate()
    async with station_for(line(first, gate), run_timeout=4.0) as station:
        await post_run(database, "graph", input=GO)
        attempt, _ = await station.execute_next()
    run, thread = await run_row(database, attempt.run.run_id), await thread_row(database, attempt.run.thread_id)
    assert gate.stopped == 1
    assert run["status"] == "timeout"
    assert run["error"]["error"] == "RunTimeout"
    assert thread["values"] == {"words": ["go", "first"]}
    assert payloads(await thread_events(database, run["thread_id"]), "error") == [run["error"]]


async def test_time_used_by_earlier_attempts_counts(station_for: OpenStation, database: Database) -> None:
    gate = Gate()
    async with station_for(line(gate), run_timeout=3600.0) as station:
        await post_run(database, "graph", input=GO)
        await query(database, "UPDATE run SET started_at = now() - interval '2 hours' RETURNING 1")
        attempt, _ = await station.execute_next()
    assert (await run_row(database, attempt.run.run_id))["status"] == "timeout"


async def test_a_cancel_interrupts_a_node_where_it_stands(settings: Settings, database: Database) -> None:
    gate = Gate()
    async with running_worker(settings, catalog_of(graph=line(first, gate, last))):
        created = await post_run(database, "graph", input=GO)
        await asyncio.wait_for(gate.reached.wait(), 60)
        await cancel_runs(database, created.run["thread_id"], None, "interrupt")
        run = await run_ended(database, created.run["run_id"])

    thread = await thread_row(database, run["thread_id"])
    assert (gate.visits, gate.stopped) == (1, 1)
    assert run["status"] == "interrupted"
    assert (thread["status"], thread["values"]) == ("interrupted", {"words": ["go", "first"]})
    events = await run_events(database, run["thread_id"], run["run_id"])
    assert payloads(events, "end")[0]["status"] == "interrupted"


async def test_a_rollback_leaves_nothing_of_the_run(settings: Settings, database: Database) -> None:
    gate = Gate()
    gate.opened.set()
    async with running_worker(settings, catalog_of(graph=line(first, gate, last))):
        kept = await post_run(database, "graph", input=GO)
        thread_id = kept.run["thread_id"]
        await run_ended(database, kept.run["run_id"])
        before = await thread_row(database, thread_id)
        checkpoints = "SELECT checkpoint_id, metadata ->> 'run_id' AS run_id FROM checkpoints ORDER BY checkpoint_id"
        kept_checkpoints = await query(database, checkpoints)
        gate.opened.clear()
        gate.reached.clear()
        undone = await post_run(database, "graph", thread_id=thread_id, input={"words": ["undone"]})
        await asyncio.wait_for(gate.reached.wait(), 60)
        await cancel_runs(database, thread_id, [undone.run["run_id"]], "rollback")
        await until(lambda: gone(database, undone.run["run_id"]), "the run is rolled back")

    after = await thread_row(database, thread_id)
    assert kept_checkpoints
    assert await query(database, checkpoints) == kept_checkpoints
    assert (after["status"], after["values"]) == ("idle", before["values"])
    # The numbers of its events stay used.
    assert after["last_seq"] > before["last_seq"]


async def gone(database: Database, run_id: Any) -> bool:
    return await query(database, "SELECT 1 FROM run WHERE run_id = %s", run_id) == []


@pytest.mark.expects_errors("run.unstoppable")
async def test_code_that_will_not_stop_is_left_behind(
    station_for: OpenStation, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "STOP_TIMEOUT_SECONDS", 0.1)
    reached, let_go, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stubborn(state: Words) -> dict[str, Any]:
        reached.set()
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        over.set()
        return {"words": ["too late"]}

    async with station_for(line(first, stubborn, last)) as station:
        await post_run(database, "graph", input=GO)
        [attempt] = await station.claim()
        executing = asyncio.create_task(station.executor.execute(attempt))
        await reached.wait()
        await cancel_runs(database, attempt.run.thread_id, None, "interrupt")
        attempt.stop(Cancelled("interrupt"))
        outcome = await executing
        ended = await thread_events(database, attempt.run.thread_id)
        let_go.set()
        await over.wait()
        for task in asyncio.all_tasks():
            if task.get_name() == f"run {attempt.run.run_id}":
                await asyncio.wait({task}, timeout=5)

    assert isinstance(outcome, Ended)
    assert (await run_row(database, attempt.run.run_id))["status"] == "interrupted"
    assert (await thread_row(database, attempt.run.thread_id))["values"] == {"words": ["go", "first"]}
    assert await thread_events(database, attempt.run.thread_id) == ended
    late = await query(database, "SELECT 1 FROM checkpoint_writes WHERE task_path LIKE '%%stubborn%%'")
    assert late == []


async def test_a_drained_run_keeps_its_place_and_goes_on_elsewhere(settings: Settings, database: Database) -> None:
    gate = Gate()
    graph = line(first, gate, last)
    async with running_worker(settings, catalog_of(graph=graph)) as leaving:
        created = await post_run(database, "graph", input=GO)
        await asyncio.wait_for(gate.reached.wait(), 60)
        place = (await run_row(database, created.run["run_id"]))["ready_at"]
        leaving.request_stop()
    run = await run_row(database, created.run["run_id"])
    assert gate.stopped == 1
    assert (run["status"], run["ready_at"], run["retries"], run["crashes"]) == ("pending", place, 0, 0)

    gate.opened.set()
    async with running_worker(settings, catalog_of(graph=graph)):
        run = await run_ended(database, created.run["run_id"])
    events = await run_events(database, run["thread_id"], run["run_id"])
    assert (run["status"], run["attempt"], gate.visits) == ("success", 2, 2)
    assert attempts_told(events) == [1, 2]
    assert payloads(events, "error") == []
    assert orjson.loads(events[-2].data) == {"words": ["go", "first", "gate", "last"]}


@pytest.mark.parametrize("returned_by", ["the worker", "upkeep"])
async def test_worker_whose_journal_cannot_write_stops(
    settings: Settings,
    database: Database,
    journal_sessions: JournalSessions,
    monkeypatch: pytest.MonkeyPatch,
    returned_by: str,
) -> None:
    """Its runs go on elsewhere, and its end is no crash of theirs."""

    async def refused(*_: Any) -> Any:
        raise psycopg.OperationalError("too many connections")

    for timeout in ("ATTEMPTS_END_TIMEOUT_SECONDS", "GIVE_UP_TIMEOUT_SECONDS"):
        monkeypatch.setattr(attempts, timeout, 0.5)
    monkeypatch.setattr(journal, "FLUSH_TIMEOUT_SECONDS", 0.5)
    if returned_by == "upkeep":
        monkeypatch.setattr(unexecuted_runs, "return_unexecuted", refused)
    gate = Gate()
    graph = line(first, gate, last)
    async with running_worker(settings, catalog_of(graph=graph)) as leaving:
        created = await post_run(database, "graph", input=GO)
        await asyncio.wait_for(gate.reached.wait(), 60)
        journal_sessions.refused = True
        await leaving.journal.session.close()
        leaving.request_stop()
    assert [row["status"] for row in await query(database, "SELECT status FROM worker")] == ["offline"]

    journal_sessions.refused = False
    gate.opened.set()
    async with running_worker(settings, catalog_of(graph=graph)):
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["attempt"], run["retries"], run["crashes"]) == ("success", 2, 0, 0)
    assert gate.visits == 2


async def test_a_cancel_that_is_swallowed_does_not_keep_it(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 swallows a cancel that comes just when a pooled connection does."""
    connection = Database.connection
    waiting: set[str] = set()
    swallowed: set[str] = set()
    stopping = asyncio.Event()

    @asynccontextmanager
    async def swallowing(self: Database) -> AsyncIterator[Any]:
        task = asyncio.current_task()
        assert task is not None
        try:
            if stopping.is_set() and task.get_name() in {"claim", "crons"} - swallowed:
                waiting.add(task.get_name())
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            swallowed.add(task.get_name())
        async with connection(self) as opened:
            yield opened

    monkeypatch.setattr(Database, "connection", swallowing)
    worker = Worker(settings, catalog_of(graph=line(first)))
    running = asyncio.create_task(run_until(worker, worker.stop_requested))
    await worker.heartbeat.registered()
    stopping.set()
    # Both come back to the pool by themselves: the claim by its slow poll, the crons by theirs.
    await until_true(lambda: {"claim", "crons"} <= waiting, "both wait for a connection")
    worker.request_stop()
    await asyncio.wait_for(running, 60)

    assert {"claim", "crons"} <= swallowed
    assert [row["status"] for row in await query(database, "SELECT status FROM worker")] == ["offline"]


async def test_worker_can_be_stopped_at_any_moment(settings: Settings, database: Database) -> None:
    for ticks in range(0, 200, 10):
        worker = Worker(settings, catalog_of(graph=line(first)))
        running = asyncio.create_task(run_until(worker, worker.stop_requested))
        for _ in range(ticks):
            await asyncio.sleep(0)
        worker.request_stop()
        await asyncio.wait_for(running, 60)
    assert await query(database, "SELECT 1 FROM worker WHERE status <> 'offline'") == []

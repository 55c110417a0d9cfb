"""A worker that cannot work claims nothing and says why; one that never will again leaves, to be replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import Send
from structlog.testing import capture_logs

from holdfast.claiming import claim_loop
from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.claim import claim
from holdfast.journal.journal import Journal
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.lifecycle.service import run_until
from holdfast.settings import Settings
from holdfast.telemetry.run_context import RUN_FIELDS, logging_run
from holdfast.worker.condition import Condition, Problem
from holdfast.worker.heartbeat import Heartbeat
from holdfast.worker.main import Worker
from holdfast.worker.threads import NodeThreads
from holdfast.worker.watchdog import LoopWatchdog
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Gate, Words, first, line
from tests.support.records import post_run, query, run_ended, run_row
from tests.support.waiting import until, until_true
from tests.worker.conftest import JournalSessions

WORKER = "SELECT worker_id, status, problem, lease_until FROM worker ORDER BY started_at DESC LIMIT 1"


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs goes on after the test."""
    event = threading.Event()
    yield event
    event.set()


@asynccontextmanager
async def leaving_worker(
    settings: Settings, graph: Pregel[Any, Any, Any, Any], **options: Any
) -> AsyncIterator[Worker]:
    """A worker that must leave by itself within the block."""
    worker = Worker(settings, catalog_of(graph=graph), **options)
    running = asyncio.create_task(run_until(worker, worker.stop_requested), name="worker")
    try:
        yield worker
        await asyncio.wait_for(asyncio.shield(running), 60)
    finally:
        worker.request_stop()
        await asyncio.wait_for(running, 60)


async def claims_while_renewing(database: Database, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the worker looks for runs while it renews its lease some times: usually as often."""
    looks = []

    async def counted(*given: Any, **named: Any) -> Any:
        looks.append("one")
        return await claim(*given, **named)

    monkeypatch.setattr(claim_loop, "claim", counted)
    last = None
    for _ in range(4):

        async def renewed(before: Any = last) -> Any:
            [row] = await query(database, WORKER)
            return row["lease_until"] if row["lease_until"] != before else None

        last = await until(renewed, "the lease is renewed")
    return len(looks)


def hanging_fan_out(width: int, hanging: list[str], released: threading.Event) -> Pregel[Any, Any, Any, Any]:
    def hang(state: Words) -> dict[str, Any]:
        hanging.append("one")
        released.wait()
        return {"words": ["late"]}

    builder = StateGraph(Words).add_node("hang", hang)
    builder.add_conditional_edges(START, lambda state: [Send("hang", state) for _ in range(width)], ["hang"])
    return builder.compile()


async def test_worker_whose_threads_finish_for_ended_runs_claims_nothing_and_stays(
    settings: Settings, database: Database, released: threading.Event
) -> None:
    """As after a wide step of which one node has failed: the others go on for as long as their calls take."""
    going_on: list[str] = []
    threads = NodeThreads(settings.jobs)
    asyncio.get_running_loop().set_default_executor(threads)
    too_many = threads.places - settings.jobs + 1
    catalog = catalog_of(graph=hanging_fan_out(too_many, going_on, released), quick=line(first))
    async with running_worker(settings, catalog, node_threads=threads) as worker:
        created = [await post_run(database, "graph", input=GO) for _ in range(2)]
        await until_true(lambda: len(going_on) == too_many, "the nodes execute that get a thread")
        for one in created:
            await cancel_runs(database, one.run["thread_id"], None, "interrupt")
        await until_true(lambda: worker.condition.problem() is not None, "the worker cannot execute more")
        assert worker.live().well
        assert not worker.ready().well
        waiting = await post_run(database, "quick", input=GO)
        released.set()
        assert (await run_ended(database, waiting.run["run_id"]))["status"] == "success"
    assert not worker.replaced


async def test_a_worker_whose_threads_hang_in_ended_runs_leaves(
    settings: Settings, database: Database, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.condition.ENDED_CALL_SECONDS", 0.0)
    hanging: list[str] = []
    threads = NodeThreads(settings.jobs)
    asyncio.get_running_loop().set_default_executor(threads)
    too_many = threads.places - settings.jobs + 1
    graph = hanging_fan_out(too_many, hanging, released)
    async with leaving_worker(settings, graph, node_threads=threads) as worker:
        created = [await post_run(database, "graph", input=GO) for _ in range(2)]
        await until_true(lambda: len(hanging) == too_many, "all nodes hang that get a thread")
        assert worker.condition.problem() is None, "its runs are under way"
        for one in created:
            await cancel_runs(database, one.run["thread_id"], None, "interrupt")
        await until_true(lambda: not worker.live().well, "the worker says that it can do nothing more")
        # Not what `ready` says: the worker may be leaving already.
        assert "plain nodes" in worker.live().reason
    assert worker.replaced
    assert (await query(database, WORKER))[0]["status"] == "offline"
    released.set()


async def test_wide_step_that_hangs_leaves_threads_to_other_runs(
    settings: Settings, database: Database, released: threading.Event
) -> None:
    hanging: list[str] = []
    threads = NodeThreads(settings.jobs)
    asyncio.get_running_loop().set_default_executor(threads)
    width = threads.places + 5

    def plain(state: Words) -> dict[str, Any]:
        return {"words": ["plain"]}

    catalog = catalog_of(wide=hanging_fan_out(width, hanging, released), plain=line(plain))
    async with running_worker(settings, catalog, node_threads=threads) as worker:
        wide = await post_run(database, "wide", input=GO)
        await until_true(lambda: len(hanging) == threads.places - settings.jobs, "the step has all it may have")
        others = [await post_run(database, "plain", input=GO) for _ in range(settings.jobs)]
        for other in others:
            assert (await run_ended(database, other.run["run_id"]))["status"] == "success"
        assert worker.condition.problem() is None
        released.set()
        assert (await run_ended(database, wide.run["run_id"]))["status"] == "success"
    assert len(hanging) == width


async def test_worker_does_not_claim_while_its_own_calls_occupy_all_threads(
    settings: Settings, database: Database, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.condition.THREAD_WAIT_SECONDS", 0.2)
    busy = "all threads of plain nodes are busy"
    threads = NodeThreads(settings.jobs)
    asyncio.get_running_loop().set_default_executor(threads)
    async with running_worker(settings, catalog_of(quick=line(first)), node_threads=threads) as worker:
        for _ in range(threads.places + 1):
            threads.submit(released.wait)
        await until_true(lambda: worker.condition.reason() == busy, "a call waits for a thread")
        assert worker.live().well
        assert not worker.ready().well

        async def told() -> bool:
            return [row["problem"] for row in await query(database, WORKER)] == [busy]

        await until(told, "its row says why")
        quick = await post_run(database, "quick", input=GO)
        looked = await claims_while_renewing(database, monkeypatch)
        assert (looked, (await run_row(database, quick.run["run_id"]))["status"]) == (0, "pending")
        released.set()
        assert (await run_ended(database, quick.run["run_id"]))["status"] == "success"
        await until_true(lambda: worker.ready().well, "the worker can work again")


async def test_worker_does_not_claim_while_all_connections_of_its_pool_are_in_use(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(update={"database_timeout": 60.0})
    monkeypatch.setattr("holdfast.worker.condition.POOL_WAIT_SHARE", 0.01)
    async with running_worker(settings, catalog_of(quick=line(first))) as worker, AsyncExitStack() as stack:
        await until_true(lambda: worker.ready().well, "the worker can work")

        async def use_one() -> None:
            async with worker.database.connection():
                await asyncio.Event().wait()

        using = [asyncio.create_task(use_one()) for _ in range(settings.pool_max)]
        stack.push_async_callback(cancel_all, using)
        reason = "all connections of its pool are in use"
        await until_true(lambda: worker.ready().reason == reason, "somebody waits for a connection")
        assert worker.live().well
        quick = await post_run(database, "quick", input=GO)
        assert await claims_while_renewing(database, monkeypatch) == 0
        await cancel_all(using)
        assert (await run_ended(database, quick.run["run_id"]))["status"] == "success"


async def test_checkpoints_are_read_while_plain_nodes_occupy_all_threads(
    settings: Settings, database: Database, released: threading.Event
) -> None:
    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    async with running_worker(settings, catalog_of(graph=line(first))):
        created = await post_run(database, "graph", input=GO)
        assert (await run_ended(database, created.run["run_id"]))["status"] == "success"
        threads.submit(released.wait)
        # It goes on from the checkpoint of the first.
        again = await post_run(database, "graph", input=GO, thread_id=created.run["thread_id"])
        assert (await run_ended(database, again.run["run_id"]))["status"] == "success"
    released.set()


async def test_worker_does_not_claim_before_its_journal_is_connected(
    settings: Settings, database: Database, journal_sessions: JournalSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal_sessions.refused = True
    created = await post_run(database, "graph", input=GO)
    async with running_worker(settings, catalog_of(graph=line(first))) as worker:

        async def told() -> bool:
            rows = await query(database, WORKER)
            return bool(rows and rows[0]["problem"] == "the journal cannot write")

        await until(told, "its row says why it claims nothing")
        assert worker.live().well
        assert worker.ready().reason == "the journal cannot write"
        looked = await claims_while_renewing(database, monkeypatch)
        assert (looked, (await run_row(database, created.run["run_id"]))["status"]) == (0, "pending")
        journal_sessions.refused = False
        assert (await run_ended(database, created.run["run_id"]))["status"] == "success"


async def test_a_worker_does_not_claim_while_its_journal_cannot_write(
    settings: Settings, database: Database, journal_sessions: JournalSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with running_worker(settings, catalog_of(graph=line(gate), quick=line(first))) as worker:
        created = await post_run(database, "graph", input=GO)
        await asyncio.wait_for(gate.reached.wait(), 60)
        journal_sessions.refused = True
        await worker.journal.session.close()
        gate.opened.set()

        async def told() -> bool:
            return bool((await query(database, WORKER))[0]["problem"] == "the journal cannot write")

        await until(told, "its row says why it claims nothing")
        assert worker.live().well
        assert worker.ready().reason == "the journal cannot write"
        quick = await post_run(database, "quick", input=GO)
        looked = await claims_while_renewing(database, monkeypatch)
        assert (looked, (await run_row(database, quick.run["run_id"]))["status"]) == (0, "pending")
        journal_sessions.refused = False
        for run in (created, quick):
            assert (await run_ended(database, run.run["run_id"]))["status"] == "success"


async def test_worker_whose_journal_cannot_connect_leaves(
    database_url: str, database: Database, journal_sessions: JournalSessions
) -> None:
    """At once, because none of its runs can come to an end. No run gets a crash."""
    settings = quick_settings(database_url, lease=5.0, drain_timeout=600.0)
    gate = Gate()
    graph = line(gate)
    async with leaving_worker(settings, graph) as worker:
        created = await post_run(database, "graph", input=GO)
        await asyncio.wait_for(gate.reached.wait(), 60)
        journal_sessions.refused = True
        await worker.journal.session.close()
        gate.opened.set()
        await until_true(lambda: not worker.live().well, "the worker says that it can do nothing more")
        assert worker.live().reason == "the journal cannot connect"
    assert worker.replaced
    assert (await query(database, WORKER))[0]["status"] == "offline"
    journal_sessions.refused = False
    async with running_worker(settings, catalog_of(graph=graph)):
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["attempt"], run["retries"], run["crashes"]) == ("success", 2, 0, 0)


def nothing() -> None:
    pass


@dataclass
class Renewals:
    """Stands in for the heartbeat."""

    deadline: float = 0.0
    ended: bool = False


@pytest.mark.parametrize("outage", ["of the journal alone", "of the database"])
async def test_worker_is_replaced_for_its_journal_only_while_its_lease_is_renewed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, outage: str
) -> None:
    """An outage of the whole database that is nearly as long as the lease, and the seconds in which all reconnect."""
    now = 1000.0
    monkeypatch.setattr("holdfast.worker.condition.time", SimpleNamespace(monotonic=lambda: now))
    writing = Journal(settings, lambda visible, ready: None, lambda writer: None)
    heartbeat = Renewals(deadline=now + settings.lease)
    database = Database(settings, "worker")
    condition = Condition(
        settings,
        database,
        heartbeat,  # type: ignore[arg-type]
        writing,
        LoopWatchdog(1.0),
        None,
        lambda: [("run", 1)],
        nothing,
        nothing,
    )
    reasons = set()
    began = now
    while now < began + 1.5 * settings.lease:
        now += 0.5
        if outage == "of the journal alone" or now > began + 0.95 * settings.lease:
            heartbeat.deadline = now + settings.lease
        condition._check_journal()
        found = condition.problem()
        assert found is not None
        reasons.add((found.reason, found.lasting))
    passing, lasting = ("the journal cannot write", False), ("the journal cannot connect", True)
    assert reasons == ({passing} if outage == "of the database" else {passing, lasting})


async def test_a_worker_whose_watchdog_has_ended_leaves(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would notice that its event loop is blocked."""
    ends = threading.Event()
    monkeypatch.setattr(LoopWatchdog, "_work", lambda self: ends.wait(60))
    with capture_logs() as logs:
        async with leaving_worker(settings, line(first)) as worker:
            created = await post_run(database, "graph", input=GO)
            assert (await run_ended(database, created.run["run_id"]))["status"] == "success"
            assert worker.live().well
            ends.set()
    assert worker.replaced
    reasons = [entry["reason"] for entry in logs if entry["event"] == "worker.unable"]
    assert "the watchdog of the event loop has ended" in reasons


async def test_a_worker_whose_heartbeat_has_ended_leaves(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()
    beat = Heartbeat._beat

    def last_beat(self: Heartbeat, *given: Any, **named: Any) -> bool:
        return beat(self, *given, **named) and not ends.is_set()

    monkeypatch.setattr(Heartbeat, "_beat", last_beat)
    async with leaving_worker(settings, line(first)) as worker:
        created = await post_run(database, "graph", input=GO)
        assert (await run_ended(database, created.run["run_id"]))["status"] == "success"
        ends.set()
    assert worker.replaced


async def test_worker_that_takes_long_to_resign_is_not_replaced(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal has ended by then, as it should."""
    monkeypatch.setattr("holdfast.worker.condition.CHECK_SECONDS", 0.01)
    resign, problem = Heartbeat._stop, Condition.problem
    looks = 0

    def counted(self: Condition) -> Any:
        nonlocal looks
        looks += 1
        return problem(self)

    async def slow(self: Heartbeat) -> None:
        before = looks
        await until_true(lambda: looks > before + 2, "the worker's condition is looked at")
        assert worker.live().well
        await resign(self)

    monkeypatch.setattr(Condition, "problem", counted)
    monkeypatch.setattr(Heartbeat, "_stop", slow)
    async with running_worker(settings, catalog_of(graph=line(first))) as worker:
        pass
    assert not worker.replaced


async def test_node_threads_count_calls_of_no_run_that_hang(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the embedding of items of the store, which several runs may wait for."""
    threads = NodeThreads(1)
    threads.submit(released.wait)
    await until_true(lambda: bool(threads._running), "the call has a thread")
    assert threads.abandoned([]) == 0
    monkeypatch.setattr("holdfast.worker.threads.SHARED_CALL_SECONDS", 0.0)
    assert threads.abandoned([]) == 1


async def test_worker_that_has_not_begun_is_not_taken_for_one_that_has_ended(settings: Settings) -> None:
    worker = Worker(settings, catalog_of(graph=line(first)))
    assert worker.condition.problem() == Problem("the journal cannot write"), "its journal is not connected yet"


def test_cancelled_calls_that_wait_for_a_thread_are_never_called(released: threading.Event) -> None:
    threads = NodeThreads(1)
    called: list[int] = []
    with logging_run(**{**dict.fromkeys(RUN_FIELDS, "one"), "attempt": 1}):
        for _ in range(threads.places):
            threads.submit(released.wait)
        parked = [threads.submit(called.append, number) for number in range(3)]
    assert parked[1].cancel()
    released.set()
    assert (parked[0].result(60), parked[2].result(60)) == (None, None)
    assert sorted(called) == [0, 2]
    threads.shutdown()
    assert (threads._waiting, threads._running, threads._admitted, threads._parked) == ({}, {}, {}, {})

"""How an attempt ends, and what a run and its thread look like afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from langgraph.graph import START, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import interrupt
from typing_extensions import TypedDict

from holdfast.db.connect import Database
from holdfast.engine.outcome import Ended, Released
from holdfast.engine.reap import release_orphans
from holdfast.errors import Retry
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Flaky, Words, first, last, line
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
from tests.support.station import DECLARE_LOST, Station, open_station


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, max_retries=2, max_entry_bytes=64 * 1024)


OpenStation = Callable[..., Any]


@pytest.fixture
def station_for(settings: Settings, database: Database) -> OpenStation:
    @asynccontextmanager
    async def opened(graph: Pregel[Any, Any, Any, Any], **changes: Any) -> AsyncIterator[Station]:
        changed = settings.model_copy(update=changes)
        async with open_station(changed, database, catalog_of(graph=graph)) as station:
            yield station

    return opened


async def test_run_that_succeeds_leaves_values_events_and_an_idle_thread(
    station_for: OpenStation, database: Database
) -> None:
    async with station_for(line(first, last)) as station:
        created = await post_run(database, "graph", input=GO)
        attempt, outcome = await station.execute_next()

    run, thread = await run_row(database, attempt.run.run_id), await thread_row(database, attempt.run.thread_id)
    assert isinstance(outcome, Ended)
    assert created.ready
    assert (run["status"], run["attempt"], run["retries"], run["error"], run["worker_id"]) == (
        "success",
        1,
        0,
        None,
        None,
    )
    assert (thread["status"], thread["values"]) == ("idle", {"words": ["go", "first", "last"]})
    events = await thread_events(database, attempt.run.thread_id)
    assert [event.kind for event in events] == ["metadata", "values", "values", "values", "end"]
    assert [end["status"] for end in payloads(events, "end")] == ["success"]
    assert thread["last_seq"] == 5


async def test_output_is_in_the_log_when_values_were_not_requested(
    station_for: OpenStation, database: Database
) -> None:
    async with station_for(line(first, last)) as station:
        await post_run(database, "graph", input=GO, stream_mode=["updates"])
        attempt, _ = await station.execute_next()
    events = await thread_events(database, attempt.run.thread_id)
    assert [event.kind for event in events] == ["metadata", "updates", "updates", "output", "end"]
    assert payloads(events, "output") == [{"words": ["go", "first", "last"]}]


async def test_permanent_error_ends_the_run_at_once(station_for: OpenStation, database: Database) -> None:
    async def explode(state: Words) -> None:
        raise ValueError("no\0good")

    async with station_for(line(first, explode)) as station:
        await post_run(database, "graph", input=GO)
        attempt, _ = await station.execute_next()

    run, thread = await run_row(database, attempt.run.run_id), await thread_row(database, attempt.run.thread_id)
    assert (run["status"], run["attempt"], run["dead_letter"]) == ("error", 1, None)
    # Postgres has no room for NUL.
    assert run["error"] == {"error": "ValueError", "message": "no\ufffdgood"}
    assert "in explode" in run["traceback"]
    assert (thread["status"], thread["error"]) == ("error", run["error"])
    events = await thread_events(database, attempt.run.thread_id)
    assert payloads(events, "error") == [{"error": "ValueError", "message": "no\0good"}]
    assert [event.kind for event in events[-2:]] == ["error", "end"]


async def test_transient_error_is_retried_from_the_last_checkpoint(settings: Settings, database: Database) -> None:
    executed = 0

    async def once(state: Words) -> dict[str, Any]:
        nonlocal executed
        executed += 1
        return {"words": ["once"]}

    flaky = Flaky(ConnectionError("refused"), 2)
    async with running_worker(settings, catalog_of(graph=line(once, flaky))):
        created = await post_run(database, "graph", input=GO)
        run = await run_ended(database, created.run["run_id"])

    assert (run["status"], run["attempt"], run["retries"], run["crashes"]) == ("success", 3, 2, 0)
    assert (executed, flaky.tries) == (1, 3)
    events = await run_events(database, run["thread_id"], run["run_id"])
    assert attempts_told(events) == [1, 2, 3]
    assert payloads(events, "error") == []
    assert (await thread_row(database, run["thread_id"]))["values"] == {"words": ["go", "once", "flaky"]}


async def test_retries_wait_longer_each_time(station_for: OpenStation, database: Database) -> None:
    flaky = Flaky(TimeoutError("slow"), 3)
    async with station_for(line(flaky), retry_base=8.0, retry_cap=12.0, max_retries=3) as station:
        created = await post_run(database, "graph", input=GO)
        pauses = []
        for _ in range(3):
            _, outcome = await station.execute_next()
            assert isinstance(outcome, Released)
            run = await run_row(database, created.run["run_id"])
            pauses.append((run["ready_at"] - run["updated_at"]).total_seconds())
            await query(database, "UPDATE run SET ready_at = now() RETURNING 1")
        _, outcome = await station.execute_next()
    assert isinstance(outcome, Ended)
    for pause, most in zip(pauses, (8, 12, 12), strict=True):
        assert most / 2 <= pause <= most


async def test_error_can_set_the_time_of_its_retry(station_for: OpenStation, database: Database) -> None:
    async with station_for(line(Flaky(Retry("rate limited", after=77.0), 1))) as station:
        created = await post_run(database, "graph", input=GO)
        await station.execute_next()
    run = await run_row(database, created.run["run_id"])
    assert (run["status"], run["retries"]) == ("pending", 1)
    assert (run["ready_at"] - run["updated_at"]).total_seconds() == 77.0


async def test_run_without_retries_left_becomes_a_dead_letter(settings: Settings, database: Database) -> None:
    flaky = Flaky(ConnectionError("refused"), 100)
    async with running_worker(settings, catalog_of(graph=line(flaky))):
        created = await post_run(database, "graph", input=GO)
        run = await run_ended(database, created.run["run_id"])

    assert flaky.tries == 3
    assert (run["status"], run["retries"], run["dead_letter"]) == ("error", 2, "retries_exhausted")
    assert run["error"] == {"error": "ConnectionError", "message": "refused"}
    events = await run_events(database, run["thread_id"], run["run_id"])
    assert payloads(events, "error") == [run["error"]]


async def test_interrupt_leaves_the_thread_interrupted(station_for: OpenStation, database: Database) -> None:
    async def ask(state: Words) -> dict[str, Any]:
        return {"words": [interrupt({"question": "really?"})]}

    async with station_for(line(first, ask)) as station:
        await post_run(database, "graph", input=GO)
        attempt, _ = await station.execute_next()
    run, thread = await run_row(database, attempt.run.run_id), await thread_row(database, attempt.run.thread_id)
    assert run["status"] == "success"
    assert (thread["status"], thread["values"]) == ("interrupted", {"words": ["go", "first"]})
    tasks = await query(database, "SELECT DISTINCT task_id FROM checkpoint_writes WHERE channel = '__interrupt__'")
    assert list(thread["interrupts"]) == [tasks[0]["task_id"]]
    [asked] = thread["interrupts"][tasks[0]["task_id"]]
    assert asked["value"] == {"question": "really?"}
    values = payloads(await thread_events(database, run["thread_id"]), "values")
    assert values[-1]["__interrupt__"] == [asked]


@pytest.mark.parametrize("where", ["run", "graph"])
async def test_breakpoint_leaves_the_thread_interrupted(
    where: str, station_for: OpenStation, database: Database
) -> None:
    graph = line(first, last, interrupt_before=["last"]) if where == "graph" else line(first, last)
    async with station_for(graph) as station:
        await post_run(database, "graph", input=GO, interrupt_before=["last"] if where == "run" else None)
        attempt, _ = await station.execute_next()
    run, thread = await run_row(database, attempt.run.run_id), await thread_row(database, attempt.run.thread_id)
    assert run["status"] == "success"
    assert (thread["status"], thread["interrupts"]) == ("interrupted", {})
    assert thread["values"] == {"words": ["go", "first"]}


async def test_value_that_is_too_large_fails_its_run(station_for: OpenStation, database: Database) -> None:
    async def much(state: Words) -> dict[str, Any]:
        return {"words": ["x" * 65 * 1024]}

    async with station_for(line(first, much)) as station:
        await post_run(database, "graph", input=GO)
        attempt, _ = await station.execute_next()
    run = await run_row(database, attempt.run.run_id)
    assert (run["status"], run["error"]["error"]) == ("error", "JournalFailed")
    assert "MAX_ENTRY_BYTES" in run["error"]["message"]
    assert [event.kind for event in await thread_events(database, run["thread_id"])][-2:] == ["error", "end"]


async def test_data_that_the_database_refuses_fails_its_run(station_for: OpenStation, database: Database) -> None:
    odd: Any = TypedDict("odd", {"wo\0rds": str})
    builder = StateGraph(odd)
    builder.add_node("node", lambda state: {"wo\0rds": "x"})
    builder.add_edge(START, "node")
    async with station_for(builder.compile()) as station:
        await post_run(database, "graph", input={"wo\0rds": "go"})
        attempt, _ = await station.execute_next()
    run, thread = await run_row(database, attempt.run.run_id), await thread_row(database, attempt.run.thread_id)
    assert (run["status"], run["error"]["error"], thread["status"]) == ("error", "JournalFailed", "error")
    assert "refused" in run["error"]["message"]


async def test_run_that_kills_its_workers_becomes_poison(settings: Settings, database: Database) -> None:
    created = await post_run(database, "graph", input=GO)
    queued = await post_run(database, "graph", thread_id=created.run["thread_id"], input=GO)
    for crash in range(1, 4):
        async with open_station(settings, database, catalog_of(graph=line(first))) as station:
            [attempt] = await station.claim()
            assert attempt.run.run_id == created.run["run_id"]
            await query(database, DECLARE_LOST, station.worker_id)
            [released] = await release_orphans(database, max_crashes=3)
            assert (released["crashes"], released["status"]) == (crash, "error" if crash == 3 else "pending")
    run = await run_row(database, created.run["run_id"])
    assert (run["status"], run["dead_letter"], run["error"]["error"]) == ("error", "poison", "PoisonRun")
    assert "HOLDFAST_MAX_CRASHES" in run["error"]["message"]
    # The next run of the thread gets its turn.
    assert (await run_row(database, queued.run["run_id"]))["ready_at"] is not None

"""When a run ends and frees its slot, the worker claims if a run may be waiting, and only then."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest

from holdfast.claiming import claim_loop
from holdfast.db.connect import Database
from holdfast.engine.claim import claim as engine_claim
from holdfast.engine.new_run import NewRun
from holdfast.engine.ready import ReadyRun, announce_ready
from holdfast.engine.submit import create_run
from holdfast.graphs.assistants import assistant_id
from holdfast.settings import Settings
from holdfast.worker.main import Worker
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import Words, line
from tests.support.records import post_run, query, run_ended
from tests.support.waiting import until_true

RUNS = 5


@pytest.fixture
def settings(database_url: str) -> Settings:
    # So long that nothing in here is found by it.
    return quick_settings(database_url, poll_interval=60, jobs=2)


async def say(state: Words) -> dict[str, Any]:
    return {"words": ["said"]}


async def test_worker_claims_waiting_runs_when_slots_become_free(settings: Settings, database: Database) -> None:
    runs = [await post_run(database, "line", input={"words": []}) for _ in range(RUNS)]
    async with running_worker(settings, catalog_of(line=line(say))):
        for created in runs:
            assert (await run_ended(database, created.run["run_id"]))["status"] == "success"


async def test_worker_claims_next_run_of_limited_tenant_when_one_ends(settings: Settings, database: Database) -> None:
    await query(database, "INSERT INTO tenant (tenant_id, max_running) VALUES ('acme', 1) RETURNING tenant_id")
    runs = [
        NewRun(
            thread_id=uuid4(),
            assistant_id=assistant_id("line"),
            graph_id="line",
            kwargs={"input": {"words": []}},
            create_thread=True,
            tenant_id="acme",
        )
        for _ in range(RUNS)
    ]
    for new in runs:
        await create_run(database, new)
    async with running_worker(settings, catalog_of(line=line(say))):
        for new in runs:
            assert (await run_ended(database, new.run_id))["status"] == "success"


def at_rest(worker: Worker) -> bool:
    wake: Any = worker.claims._wake
    return bool(wake._waiters and not wake.is_set())


async def test_worker_does_not_claim_after_a_run_when_queue_was_empty(settings: Settings, database: Database) -> None:
    looks = Counter[str]()
    claim = engine_claim

    async def counted(*arguments: Any, **options: Any) -> Any:
        looks["all"] += 1
        return await claim(*arguments, **options)

    with patch.object(claim_loop, "claim", counted):
        async with running_worker(settings, catalog_of(line=line(say))) as worker:
            heard: list[str | None] = []
            worker.signals.listen("work", heard.append)
            await until_true(lambda: None in heard, "the worker listens, which is a reason to look")
            for number in range(RUNS + 1):
                created = await post_run(database, "line", input={"words": []})
                announce_ready(worker.signals, [ReadyRun(created.run["run_id"], "line")])
                await run_ended(database, created.run["run_id"])
                await until_true(lambda: at_rest(worker), "the worker waits for a reason to look")
                if number == 0:
                    looks.clear()
    assert looks["all"] == RUNS


async def test_worker_claims_again_when_slot_becomes_free_during_claim(settings: Settings, database: Database) -> None:
    """The look asks for the places that were free when it began."""
    gates = {"first": asyncio.Event(), "others": asyncio.Event()}
    looking = asyncio.Event()

    async def first(state: Words) -> dict[str, Any]:
        await gates["first"].wait()
        return {"words": ["waited"]}

    async def other(state: Words) -> dict[str, Any]:
        await gates["others"].wait()
        return {"words": ["waited"]}

    async def slow(*arguments: Any, **options: Any) -> Any:
        if looking.is_set():
            looking.clear()
            gates["first"].set()
            await until_true(lambda: worker.attempts.finished == 1, "the first run ends meanwhile")
        return await engine_claim(*arguments, **options)

    with patch.object(claim_loop, "claim", slow):
        async with running_worker(settings, catalog_of(first=line(first), other=line(other))) as worker:
            created = await post_run(database, "first", input={"words": []})
            announce_ready(worker.signals, [ReadyRun(created.run["run_id"], "first")])
            await until_true(lambda: len(worker.attempts.executing()) == 1, "it has begun")
            others = [await post_run(database, "other", input={"words": []}) for _ in range(2)]
            looking.set()
            announce_ready(worker.signals, [ReadyRun(one.run["run_id"], "other") for one in others])
            # Neither of them ends before the other has begun.
            await until_true(lambda: len(worker.attempts.executing()) == 2, "both places are taken")
            gates["others"].set()
            for one in others:
                assert (await run_ended(database, one.run["run_id"]))["status"] == "success"


async def test_claim_connection_reuses_query_plan(settings: Settings, database: Database) -> None:
    """It takes many times as long as the claim, and whether Postgres would do so is a matter of luck."""
    async with running_worker(settings, catalog_of(line=line(say))) as worker:
        for _ in range(8):
            created = await post_run(database, "line", input={"words": []})
            announce_ready(worker.signals, [ReadyRun(created.run["run_id"], "line")])
            await run_ended(database, created.run["run_id"])
        async with worker.claims._connection.connection() as connection:
            cursor = await connection.execute(
                "SELECT custom_plans FROM pg_prepared_statements WHERE statement LIKE '%WITH RECURSIVE level%'"
            )
            assert await cursor.fetchall() == [{"custom_plans": 0}]

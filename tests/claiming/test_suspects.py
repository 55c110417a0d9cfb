"""A run that was on a dead worker is a suspect until it has come further than any attempt before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.func import entrypoint, task

from holdfast.db.connect import Database
from holdfast.errors import LeaseLost
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, first, line
from tests.support.records import post_run, query, run_ended, run_row
from tests.support.station import open_station
from tests.support.waiting import until, until_true

SUSPECT = "UPDATE run SET crashes = 1, crashes_in_a_row = 1 RETURNING run_id"


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url)


class Gate:
    def __init__(self) -> None:
        self.inside = 0
        self.open = asyncio.Event()

    async def wait(self, state: Words) -> dict[str, Any]:
        self.inside += 1
        await self.open.wait()
        return {"words": ["gate"]}


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def suspicion(database: Database, run_id: Any) -> tuple[int, int]:
    row = await run_row(database, run_id)
    return row["crashes"], row["crashes_in_a_row"]


async def test_suspect_is_cleared_once_a_step_is_durable(settings: Settings, database: Database, gate: Gate) -> None:
    created = [await post_run(database, "graph", input=GO) for _ in range(3)]
    await query(database, SUSPECT)
    async with running_worker(settings, catalog_of(graph=line(first, gate.wait))):

        async def all_inside() -> bool:
            return gate.inside == 3

        await until(all_inside, "the worker has taken one after the other, each after a step of the one before")
        for one in created:

            async def cleared(run_id: Any = one.run["run_id"]) -> bool:
                return await suspicion(database, run_id) == (1, 0)

            await until(cleared, "the run is no suspect")
        gate.open.set()
        for one in created:
            assert (await run_ended(database, one.run["run_id"]))["status"] == "success"


async def test_worker_holds_one_suspect_without_a_durable_step(
    settings: Settings, database: Database, gate: Gate
) -> None:
    created = [await post_run(database, "graph", input=GO) for _ in range(2)]
    await query(database, SUSPECT)
    late = await post_run(database, "other", input=GO)
    async with running_worker(settings, catalog_of(graph=line(gate.wait), other=line(first))):

        async def one_inside() -> bool:
            return gate.inside == 1

        await until(one_inside, "the first suspect is executed")
        assert (await run_ended(database, late.run["run_id"]))["status"] == "success"
        assert [await suspicion(database, one.run["run_id"]) for one in created] == [(1, 1), (1, 1)]
        statuses = [(await run_row(database, one.run["run_id"]))["status"] for one in created]
        assert sorted(statuses) == ["pending", "running"]
        gate.open.set()
        for one in created:
            assert (await run_ended(database, one.run["run_id"]))["status"] == "success"


class DyingWorker:
    """Executes the run twice. The first worker dies while the run waits at the gate, the second one finishes it.

    `progressed` has the numbers of the attempts that came further than any before.
    """

    def __init__(self, settings: Settings, database: Database, gate: Gate) -> None:
        self._settings = settings
        self._database = database
        self._gate = gate
        self.progressed: list[int] = []

    async def attempt(self, number: int, graph: Any) -> None:
        """Assert that the attempt has made no progress while it waits at the gate."""
        async with open_station(self._settings, self._database, catalog_of(graph=graph)) as station:
            [attempt] = await station.claim()
            attempt.writer.on_progress = lambda: self.progressed.append(number)
            executing = asyncio.create_task(station.executor.execute(attempt))
            await until_true(lambda: self._gate.inside == number, "the run waits at the gate")
            await attempt.writer.flush()
            assert self.progressed == []
            if number == 1:
                await station.die()
                attempt.stop(LeaseLost("the process died"))
            else:
                self._gate.open.set()
            await executing


@pytest.fixture
def dying_worker(settings: Settings, database: Database, gate: Gate) -> DyingWorker:
    return DyingWorker(settings, database, gate)


async def test_steps_of_inner_graph_are_progress_only_when_attempt_continues_it(
    database: Database, gate: Gate, dying_worker: DyingWorker
) -> None:
    """Those of one that an attempt begins anew may only repeat what the attempt before did."""
    inner = line(first, gate.wait)

    async def call(state: Words) -> Any:
        return await inner.ainvoke(state)

    await post_run(database, "graph", input=GO)
    for number in (1, 2):
        await dying_worker.attempt(number, line(call))
    assert dying_worker.progressed == [2]


async def test_first_step_of_langgraph_is_no_progress_when_only_the_input_was_durable(
    database: Database, gate: Gate, dying_worker: DyingWorker
) -> None:
    """A run that kills each of its workers at once would never be a poison run."""
    await post_run(database, "graph", input=GO)
    await dying_worker.attempt(1, line(gate.wait))
    # As if the process had died a moment earlier.
    lost = "DELETE FROM checkpoints WHERE metadata ->> 'source' = 'loop' RETURNING 1"
    assert len(await query(database, lost)) == 1
    await dying_worker.attempt(2, line(gate.wait))
    assert dying_worker.progressed == [2]


async def test_returned_task_of_an_entrypoint_is_progress(settings: Settings, database: Database) -> None:
    """An entrypoint has no other: a run of many tasks outlives any number of hosts that fail."""
    inside = allowed = 0
    never = asyncio.Event()

    @task
    async def work(number: int) -> int:
        nonlocal inside
        if number >= allowed:
            inside += 1
            await never.wait()
        return number

    @entrypoint()
    async def graph(given: Any) -> list[int]:
        return [await work(number) for number in range(5)]

    def next_task_hangs() -> bool:
        return inside == allowed

    created = await post_run(database, "graph", input=GO)
    for death in range(1, 5):
        allowed = death
        async with open_station(settings, database, catalog_of(graph=graph)) as station:
            [attempt] = await station.claim()
            attempt.writer.on_progress = lambda: None
            executing = asyncio.create_task(station.executor.execute(attempt))
            await until_true(next_task_hangs, "one more task has returned")
            await attempt.writer.flush()
            await station.die()
            attempt.stop(LeaseLost("the process died"))
            await executing
        assert await suspicion(database, created.run["run_id"]) == (death, 1)

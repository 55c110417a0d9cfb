"""A run that answers a question is undone: what becomes of its question, and of the answers of other runs."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.runs import delete_run
from holdfast.engine.states import CancelAction
from holdfast.errors import Cancelled
from holdfast.settings import Settings
from tests.interrupts.decisions import Decisions, ask_once, ask_twice, asker
from tests.interrupts.scene import Scene, inside
from tests.interrupts.without_worker import side_by_side, waiting
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.records import post_run, query, run_ended
from tests.support.station import open_station
from tests.support.waiting import until

STORED_WITH_A_TASK = """
SELECT 1 FROM checkpoint_writes WHERE idx = -4 AND task_id <> '00000000-0000-0000-0000-000000000000'
"""


@pytest.mark.parametrize("how", ["rollback", "interrupt"])
async def test_answer_of_a_stopped_run_that_was_asked_again(
    database_url: str, database: Database, how: CancelAction
) -> None:
    builder = StateGraph(Decisions)
    for node in (ask_twice, ask_once):
        builder.add_node(node)
        builder.add_edge(START, node.__name__)
    thread_id = uuid4()
    async with running_worker(quick_settings(database_url), catalog_of(graph=builder.compile())):
        first = await post_run(database, "graph", thread_id=thread_id, input={"decisions": []})
        await run_ended(database, first.run["run_id"])
        ids = await waiting(database)
        answers = {ids["first?"]: "one", ids["beside?"]: "hang"}
        second = await post_run(database, "graph", thread_id=thread_id, command={"resume": answers})

        async def asks_again() -> bool:
            return bool(await query(database, STORED_WITH_A_TASK))

        await until(asks_again, "the second question is durable")
        await cancel_runs(database, thread_id, None, how)

        async def stopped() -> bool:
            rows = await query(database, "SELECT status FROM run WHERE run_id = %s", second.run["run_id"])
            return not rows or rows[0]["status"] == "interrupted"

        await until(stopped, "the answering run is stopped")
        ids = await waiting(database)
        if how == "interrupt":
            assert set(ids) == {"second?", "beside?"}, "a used answer stays"
            return
        assert set(ids) == {"first?", "beside?"}
        answers = {ids["first?"]: "uno", ids["beside?"]: "ok"}
        third = await post_run(database, "graph", thread_id=thread_id, command={"resume": answers})
        await run_ended(database, third.run["run_id"])
        assert set(await waiting(database)) == {"second?"}, "the new answer is the first question's"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("how", ["between two attempts", "while it runs", "after its error", "after its success"])
async def test_undoing_one_of_two_answers_keeps_the_work_of_the_other(
    settings: Settings, database: Database, how: str, depth: int
) -> None:
    """In a graph inside another one as well. What is asked again is answered by the next answer."""
    acted: list[str] = []

    async def left(state: Decisions) -> Decisions:
        answer = interrupt("left?")
        acted.append(answer)
        return {"decisions": [f"left {answer}"]}

    async def right(state: Decisions) -> Decisions:
        answer = interrupt("right?")
        match how if answer == "APPROVE" else None:
            case "between two attempts":
                raise ConnectionError("away for a moment")
            case "while it runs":
                acted.append(answer)
                await asyncio.Event().wait()
            case "after its error":
                raise ValueError("not that one")
        return {"decisions": [f"right {answer}"]}

    async with open_station(settings, database, catalog_of(graph=inside(side_by_side(left, right), depth))) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": []})
        ids = await waiting(database)
        await scene.run(command={"resume": {ids["left?"]: "ok"}})
        assert await scene.asks() == {"right?"}
        approve: dict[str, Any] = {"command": {"resume": {ids["right?"]: "APPROVE"}}}
        if how == "between two attempts":
            await scene.release(**approve)
            await cancel_runs(database, scene.thread_id, None, "rollback")
        elif how == "while it runs":
            await scene.queue(**approve)
            [attempt] = await station.claim()
            running = asyncio.create_task(station.executor.execute(attempt))

            async def has_begun() -> bool:
                return "APPROVE" in acted

            await until(has_begun, "the answer is worked on")
            await cancel_runs(database, scene.thread_id, None, "rollback")
            attempt.stop(Cancelled("rollback"))
            await running
            acted.remove("APPROVE")
        else:
            await delete_run(database, scene.thread_id, await scene.run(**approve))
        assert await scene.asks() == {"right?"}
        await scene.run(command={"resume": {ids["right?"]: "REJECT"}})
        assert acted == ["ok"]
        assert await scene.decided() == ["left ok", "right REJECT"]


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_undoing_an_answer_after_a_failed_one_undoes_its_work(
    settings: Settings, database: Database, depth: int
) -> None:
    """A graph inside has stored all questions with its node, and the failed run has answered one of them."""

    async def beside(state: Decisions) -> Decisions:
        if interrupt("beside?") == "raise":
            raise ValueError("not that one")
        return {}

    graph = inside(side_by_side(asker("left"), asker("right"), beside), depth)
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": []})
        ids = await waiting(database)
        await scene.run(command={"resume": {ids["left?"]: "ok", ids["beside?"]: "raise"}})
        assert await scene.asks() == {"right?", "beside?"}
        run_id = await scene.run(command={"resume": {ids["right?"]: "APPROVE", ids["beside?"]: "ok"}})
        await delete_run(database, scene.thread_id, run_id)
        assert await scene.asks() == {"right?", "beside?"}
        await scene.run(command={"resume": {ids["right?"]: "REJECT", ids["beside?"]: "ok"}})
        assert await scene.decided() == ["left ok", "right REJECT"]

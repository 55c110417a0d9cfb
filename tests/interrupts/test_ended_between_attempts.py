"""Runs that end between two attempts: what becomes of the questions that they used, left alone or passed by."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.types import interrupt

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.errors import AlreadyAnswered
from holdfast.settings import Settings
from tests.interrupts.decisions import Decisions, ask_about_last, ask_twice, asker
from tests.interrupts.scene import NEW_TURN, Scene, inside, turns
from tests.interrupts.without_worker import ENDS, side_by_side, waiting
from tests.support.catalogs import catalog_of
from tests.support.records import query, run_row
from tests.support.station import open_station
from tests.support.waiting import until

DURABILITIES = ["async", "exit"]
STORED = "SELECT 1 FROM checkpoint_writes WHERE idx = -3"


def failing_once_asked(database: Database) -> Any:
    """A node that fails when a question of another is stored, as something that is away for a moment."""

    async def fail(state: Decisions) -> Decisions:
        async def stored() -> bool:
            return bool(await query(database, STORED))

        await until(stored, "the question is stored")
        raise ConnectionError("away for a moment")

    return fail


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
async def test_answer_used_in_a_nested_graph_answers_no_later_question(
    settings: Settings, database: Database, used: bool, depth: int, durability: str
) -> None:
    nodes = [ask_twice if used else asker("first", failures=1), asker("beside", failures=1)]
    catalog = catalog_of(graph=inside(side_by_side(*nodes), depth))
    async with open_station(settings, database, catalog) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": []}, durability=durability)
        ids = await waiting(database)
        resume = {ids["first?"]: "APPROVE", ids["beside?"]: "ok"}
        await scene.release(command={"resume": resume}, durability=durability)
        await cancel_runs(database, scene.thread_id, None, "interrupt")

        assert await scene.asks() == {"second?" if used else "first?", "beside?"}
        if used:
            with pytest.raises(AlreadyAnswered):
                await scene.queue(command={"resume": {ids["first?"]: "REJECT"}})
        await scene.answer({"first?": "no", "second?": "yes", "beside?": "ok"}, durability=durability)
        assert await scene.decided() == ["beside ok", *(["first APPROVE", "second yes"] if used else ["first no"])]
        assert await scene.asks() == set()


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_unused_answer_to_a_second_question_in_a_nested_graph_is_given_back(
    settings: Settings, database: Database, depth: int
) -> None:
    failures = ["second"]

    async def ask_again(state: Decisions) -> Decisions:
        decided = await ask_twice(state)
        if failures:
            failures.pop()
            raise ConnectionError("away for a moment")
        return decided

    catalog = catalog_of(graph=inside(side_by_side(ask_again, asker("beside", failures=2)), depth))
    async with open_station(settings, database, catalog) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": []})
        for answers in ({"first?": "one", "beside?": "ok"}, {"second?": "no", "beside?": "ok"}):
            ids = await waiting(database)
            assert set(ids) == set(answers)
            await scene.release(command={"resume": {ids[asked]: answer for asked, answer in answers.items()}})
            await cancel_runs(database, scene.thread_id, None, "interrupt")
            assert await scene.asks() == {"second?", "beside?"}
        await scene.answer({"second?": "two", "beside?": "ok"})
        assert await scene.decided() == ["beside ok", "first one", "second two"]
        assert await scene.asks() == set()


async def test_unused_answer_to_a_question_after_a_nested_graph_waits_again(
    settings: Settings, database: Database
) -> None:
    called, failures = side_by_side(asker("called")), [1]

    async def call_and_ask(state: Decisions) -> Decisions:
        before = await called.ainvoke({"decisions": []})
        answer = interrupt("after?")
        if failures:
            failures.pop()
            raise ConnectionError("away for a moment")
        return {"decisions": [*before["decisions"], f"after {answer}"]}

    async with open_station(settings, database, catalog_of(graph=side_by_side(call_and_ask))) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": []})
        await scene.answer({"called?": "yes"})
        [asked] = (await waiting(database)).values()
        await scene.release(command={"resume": {asked: "no"}})
        await cancel_runs(database, scene.thread_id, None, "interrupt")
        assert await scene.asks() == {"after?"}
        await scene.answer({"after?": "yes"})
        assert await scene.decided() == ["after yes", "called yes"]


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_question_of_a_nested_graph_is_shown_although_a_node_beside_it_failed(
    settings: Settings, database: Database, depth: int, how: str
) -> None:
    """The nodes around it have not asked it yet."""
    graph = inside(side_by_side(asker("first"), failing_once_asked(database)), depth)
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        scene = Scene(database, station)
        await scene.release(input={"decisions": []})
        await scene.end(how)
        assert await scene.asks() == {"first?"}


@pytest.mark.parametrize("depth", [0, 1])
async def test_retried_dead_letter_that_does_nothing_closes_no_question(
    settings: Settings, database: Database, depth: int
) -> None:
    """It has its letter's progress from the beginning."""
    graph = inside(side_by_side(asker("first"), failing_once_asked(database)), depth)
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        scene = Scene(database, station)
        await scene.release(input={"decisions": []})
        await cancel_runs(database, scene.thread_id, None, "interrupt")
        await scene.queue(input=None)
        await query(database, "UPDATE run SET progress = 2 WHERE status = 'pending' RETURNING 1")
        await scene.retry()
        await cancel_runs(database, scene.thread_id, None, "interrupt")
        assert await scene.asks() == {"first?"}


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("how", ENDS)
async def test_run_that_answers_one_of_two_questions_leaves_the_other_open(
    settings: Settings, database: Database, how: str, durability: str
) -> None:
    graph = side_by_side(asker("left", failures=1), asker("right"))
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": []}, durability=durability)
        ids = await waiting(database)
        await scene.release(command={"resume": {ids["left?"]: "no"}}, durability=durability)
        await scene.end(how)
        assert await scene.asks() == {"left?", "right?"}
        await scene.answer({"left?": "yes", "right?": "ok"}, durability=durability)
        assert await scene.decided() == ["left yes", "right ok"]


async def test_cancelled_queued_answer_keeps_the_running_answer(settings: Settings, database: Database) -> None:
    graph = side_by_side(asker("left", failures=1), asker("right"))
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": []})
        ids = await waiting(database)
        await scene.release(command={"resume": {ids["left?"]: "yes"}, "update": {"decisions": ["note"]}})
        queued = await scene.queue(command={"resume": {ids["right?"]: "no"}})
        await cancel_runs(database, scene.thread_id, [queued], "interrupt")
        await scene.due()
        await station.execute_next()
        assert await scene.asks() == {"right?"}
        await scene.answer({"right?": "ok"})
        assert await scene.decided() == ["left yes", "note", "right ok"]


@pytest.mark.parametrize("by", ["value", "id"])
@pytest.mark.parametrize("how", ENDS)
async def test_question_that_the_thread_has_passed_by_is_closed(
    settings: Settings, database: Database, how: str, by: str
) -> None:
    async with open_station(settings, database, catalog_of(graph=turns())) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": []})
        [first] = (await waiting(database)).values()
        run_id = await scene.release(input=NEW_TURN)
        await scene.end(how)

        assert await scene.asks() == set()
        [closed] = await query(database, "SELECT closed_by, answered_by FROM interrupt")
        assert closed == {"closed_by": run_id, "answered_by": None}
        with pytest.raises(AlreadyAnswered, match="gone on without one"):
            await scene.queue(command={"resume": {first: "yes"} if by == "id" else "yes"})


async def test_queued_value_answers_no_question_that_is_asked_before_its_turn(
    settings: Settings, database: Database
) -> None:
    """It was for the question that waited then. The run before it goes on without an answer, and asks another."""
    async with open_station(settings, database, catalog_of(graph=side_by_side(ask_about_last))) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": ["first"]})
        await scene.queue(input={"decisions": ["delete"]})
        late = await scene.queue(command={"resume": "yes"})
        await station.execute_next()
        await station.execute_next()
        row = await run_row(database, late)
        assert (row["status"], row["error"]["error"]) == ("error", "AnswerTooLate")
        assert await scene.asks() == {"delete?"}
        await scene.run(command={"resume": "no"})
        assert await scene.asks() == set()
        assert await scene.decided() == ["delete", "delete no", "first"]


async def test_queued_value_answers_the_question_that_still_waits(settings: Settings, database: Database) -> None:
    async with open_station(settings, database, catalog_of(graph=side_by_side(ask_twice))) as station:
        scene = Scene(database, station)
        await scene.run(input={"decisions": []})
        await scene.queue(command={"resume": "yes"})
        await station.execute_next()
        assert await scene.asks() == {"second?"}

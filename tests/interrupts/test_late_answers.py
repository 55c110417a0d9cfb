"""Answers that come when their question is over, or before it is asked: they reach that question or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.func import task
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.dead_letters.letters import get_letter
from holdfast.engine.dead_letters.retry import RetryOptions, retry_letter
from holdfast.engine.interrupts.resume import names_interrupts
from holdfast.engine.runs import delete_run
from holdfast.errors import AlreadyAnswered, Conflict
from holdfast.settings import Settings
from tests.interrupts.decisions import Decisions, ask_about_last, ask_twice, asker
from tests.interrupts.scene import NEW_TURN, Scene, turns
from tests.interrupts.without_worker import ENDS, end, side_by_side, waiting
from tests.support.catalogs import catalog_of
from tests.support.records import query, run_row
from tests.support.station import open_station
from tests.support.waiting import until

BY = pytest.mark.parametrize("by", ["value", "id"])
STORED = "SELECT blob FROM checkpoint_writes WHERE idx = -3"


@asynccontextmanager
async def scene_of(settings: Settings, database: Database, graph: Any) -> AsyncIterator[Scene]:
    async with open_station(settings, database, catalog_of(graph=graph)) as station:
        yield Scene(database, station)


def answer(interrupt_id: str, value: str, by: str) -> dict[str, Any]:
    return {"resume": {interrupt_id: value} if by == "id" else value}


async def is_too_late(database: Database, run_id: UUID) -> bool:
    row = await run_row(database, run_id)
    return (row["status"], (row["error"] or {}).get("error")) == ("error", "AnswerTooLate")


async def stored_question(database: Database, asked: str) -> str:
    """The id of a question that a running run has asked, as LangGraph has stored it."""

    async def stored() -> str | None:
        for row in await query(database, STORED):
            for one in JsonPlusSerializer().loads_typed(("msgpack", row["blob"])):
                if one.value == asked:
                    interrupt_id: str = one.id
                    return interrupt_id
        return None

    interrupt_id = await until(stored, f"{asked} is stored")
    assert interrupt_id is not None
    return interrupt_id


def ask_something_else() -> Any:
    """A node that asks another question in each execution, under the same id."""
    count = 0

    async def right(state: Decisions) -> Decisions:
        nonlocal count
        count += 1
        asked = f"right {count}?"
        return {"decisions": [f"{asked} {interrupt(asked)}"]}

    return right


@BY
@pytest.mark.parametrize("how", ENDS)
async def test_queued_answer_is_refused_after_its_question_was_passed(
    settings: Settings, database: Database, how: str, by: str
) -> None:
    """By a run that ends without a worker."""
    async with scene_of(settings, database, turns()) as scene:
        await scene.run(input={"decisions": []})
        [first] = (await waiting(database)).values()
        ahead = await scene.release(input=NEW_TURN)
        late = await scene.queue(command=answer(first, "yes", by))
        if how == "cancelled":
            await cancel_runs(database, scene.thread_id, [ahead], "interrupt")
        else:
            await scene.end(how)
        await scene.station.execute_next()
        assert await is_too_late(database, late)
        [closed] = await query(database, "SELECT closed_by, answered_by FROM interrupt WHERE interrupt_id = %s", first)
        assert closed == {"closed_by": ahead, "answered_by": late}


async def test_answer_to_whatever_is_asked_next_reaches_no_second_question(
    settings: Settings, database: Database
) -> None:
    async with scene_of(settings, database, side_by_side(ask_about_last)) as scene:
        await scene.queue(input={"decisions": ["first"]})
        [attempt] = await scene.station.claim()
        await scene.queue(input={"decisions": ["delete"]})
        late = await scene.queue(command={"resume": "yes"})
        await scene.station.executor.execute(attempt)
        await scene.station.execute_next()
        assert await scene.asks() == {"delete?"}
        await scene.station.execute_next()
        assert await is_too_late(database, late)
        assert await scene.asks() == {"delete?"}


@pytest.mark.parametrize("asks", [asker("first"), ask_twice], ids=["once", "twice"])
async def test_answer_by_id_is_refused_while_a_value_is_accepted_for_what_is_asked_next(
    settings: Settings, database: Database, asks: Any
) -> None:
    go = asyncio.Event()

    async def beside(state: Decisions) -> Decisions:
        await go.wait()
        return {"decisions": ["beside"]}

    async with scene_of(settings, database, side_by_side(asks, beside)) as scene:
        await scene.queue(input={"decisions": []})
        [attempt] = await scene.station.claim()
        running = asyncio.create_task(scene.station.executor.execute(attempt))
        first = await stored_question(database, "first?")
        by_value = await scene.queue(command={"resume": "REJECT"})
        with pytest.raises(AlreadyAnswered, match=str(by_value)):
            await scene.queue(command={"resume": {first: "APPROVE"}})
        go.set()
        await running
        await scene.station.execute_next()
        if asks is ask_twice:
            assert await scene.asks() == {"second?"}
        else:
            assert await scene.decided() == ["beside", "first REJECT"]


async def test_answer_by_id_is_accepted_when_the_value_has_its_question(settings: Settings, database: Database) -> None:
    go = asyncio.Event()

    async def beside(state: Decisions) -> Decisions:
        if state["decisions"][-1] == "delete":
            await go.wait()
        return {}

    async with scene_of(settings, database, side_by_side(ask_about_last, beside)) as scene:
        await scene.queue(input={"decisions": ["first"]})
        [attempt] = await scene.station.claim()
        await scene.queue(input={"decisions": ["delete"]})
        late = await scene.queue(command={"resume": "yes"})
        await scene.station.executor.execute(attempt)
        [attempt] = await scene.station.claim()
        running = asyncio.create_task(scene.station.executor.execute(attempt))
        delete = await stored_question(database, "delete?")
        await scene.queue(command={"resume": {delete: "no"}})
        go.set()
        await running
        await scene.station.execute_next()
        assert await is_too_late(database, late)
        await scene.station.execute_next()
        assert "delete no" in await scene.decided()


async def test_queued_answer_by_id_is_refused_when_the_id_asks_something_else(
    settings: Settings, database: Database
) -> None:
    async with scene_of(settings, database, side_by_side(asker("left"), ask_something_else())) as scene:
        await scene.run(input={"decisions": []})
        ids = await waiting(database)
        await scene.queue(command={"resume": {ids["left?"]: "ok"}})
        late = await scene.queue(command={"resume": {ids["right 1?"]: "yes"}})
        await scene.station.execute_next()
        assert await scene.asks() == {"right 2?"}
        await scene.station.execute_next()
        assert await is_too_late(database, late)
        assert await scene.asks() == {"right 2?"}


async def test_late_answer_hides_no_question_that_waits_under_the_same_id(
    settings: Settings, database: Database
) -> None:
    async with scene_of(settings, database, side_by_side(ask_something_else())) as scene:
        await scene.run(input={"decisions": []})
        await scene.queue(input=None)
        late = await scene.queue(command={"resume": "yes"})
        await scene.station.execute_next()
        await scene.station.execute_next()
        assert await is_too_late(database, late)
        assert await scene.asks() == {"right 2?"}


@BY
async def test_late_answer_does_not_go_on_from_a_breakpoint(settings: Settings, database: Database, by: str) -> None:
    async def begin(state: Decisions) -> Decisions:
        return {} if "new turn" in state["decisions"] else {"decisions": [f"first {interrupt('first?')}"]}

    async def pay(state: Decisions) -> Decisions:
        return {"decisions": ["paid"]}

    builder = StateGraph(Decisions).add_sequence([begin, pay]).add_edge(START, "begin")
    async with scene_of(settings, database, builder.compile(interrupt_before=["pay"])) as scene:
        await scene.run(input={"decisions": []})
        [first] = (await waiting(database)).values()
        await scene.queue(input=NEW_TURN)
        late = await scene.queue(command=answer(first, "yes", by))
        await scene.station.execute_next()
        await scene.station.execute_next()
        assert await is_too_late(database, late)
        assert await scene.decided() == ["new turn"]
        await scene.run(input=None)
        assert await scene.decided() == ["new turn", "paid"]


@BY
async def test_answer_that_names_the_head_answers_nothing_a_second_time(
    settings: Settings, database: Database, by: str
) -> None:
    async with scene_of(settings, database, side_by_side(ask_twice)) as scene:
        await scene.run(input={"decisions": []})
        [first] = (await waiting(database)).values()
        if by == "value":
            await scene.queue(command={"resume": "yes"})
        else:
            await scene.run(command={"resume": {first: "yes"}})
            assert await scene.asks() == {"second?"}
        [head] = await query(database, "SELECT max(checkpoint_id) AS id FROM checkpoints")
        with pytest.raises(AlreadyAnswered):
            await scene.queue(
                command=answer(first, "changed", by), config={"configurable": {"checkpoint_id": head["id"]}}
            )


async def test_queued_answer_counts_when_the_run_that_passed_its_question_is_deleted(
    settings: Settings, database: Database
) -> None:
    async with scene_of(settings, database, side_by_side(ask_about_last)) as scene:
        await scene.run(input={"decisions": ["first"]})
        ahead = await scene.queue(input={"decisions": ["delete"]})
        await scene.queue(command={"resume": "yes"})
        await scene.station.execute_next()
        await delete_run(database, scene.thread_id, ahead)
        await scene.station.execute_next()
        assert await scene.decided() == ["first", "first yes"]


@BY
@pytest.mark.parametrize("how", ["deleted after its error", "rolled back in the queue"])
async def test_late_answer_that_is_undone_opens_no_question(
    settings: Settings, database: Database, how: str, by: str
) -> None:
    async with scene_of(settings, database, side_by_side(ask_about_last)) as scene:
        await scene.run(input={"decisions": ["first"]})
        [first] = (await waiting(database)).values()
        await scene.queue(input={"decisions": ["delete"]})
        late = await scene.queue(command=answer(first, "yes", by))
        await scene.station.execute_next()
        if how == "rolled back in the queue":
            await cancel_runs(database, scene.thread_id, [late], "rollback")
        else:
            await scene.station.execute_next()
            await delete_run(database, scene.thread_id, late)
        assert await scene.asks() == {"delete?"}
        with pytest.raises(AlreadyAnswered, match="gone on without one"):
            await scene.queue(command={"resume": {first: "REJECT"}})


async def test_value_is_refused_when_the_run_that_passed_the_question_was_stopped(
    settings: Settings, database: Database
) -> None:
    """Also when the answer that came too late, which was the last run, is deleted."""
    async with scene_of(settings, database, turns()) as scene:
        await scene.run(input={"decisions": []})
        ahead = await scene.release(input=NEW_TURN)
        late = await scene.queue(command={"resume": "yes"})
        await cancel_runs(database, scene.thread_id, [ahead], "interrupt")
        await scene.station.execute_next()
        assert await is_too_late(database, late)
        await delete_run(database, scene.thread_id, late)
        with pytest.raises(AlreadyAnswered, match="gone on without one"):
            await scene.queue(command={"resume": "yes"})


@pytest.mark.parametrize("begin", ["checkpoint", "start"])
async def test_letter_is_not_retried_by_value_when_the_thread_has_passed_its_question(
    settings: Settings, database: Database, begin: str
) -> None:
    async with scene_of(settings, database, side_by_side(ask_about_last)) as scene:
        await scene.run(input={"decisions": ["first"]})
        await scene.queue(input={"decisions": ["delete"]})
        late = await scene.queue(command={"resume": "yes"})
        await scene.station.execute_next()
        await end(database, scene.thread_id, "graph gone")
        assert await scene.asks() == {"delete?"}
        with pytest.raises(Conflict, match="discard this letter"):
            await retry(database, late, start=begin == "start")


async def test_letter_is_not_retried_by_value_when_later_runs_were_swept(
    settings: Settings, database: Database
) -> None:
    async with scene_of(settings, database, side_by_side(ask_about_last)) as scene:
        await scene.run(input={"decisions": ["first"]})
        late = await scene.queue(command={"resume": "yes"})
        await end(database, scene.thread_id, "graph gone")
        later = await scene.run(input={"decisions": ["delete"]})
        assert await scene.asks() == {"delete?"}
        await query(database, "DELETE FROM run WHERE run_id = %s RETURNING 1", later)
        with pytest.raises(Conflict, match="discard this letter"):
            await retry(database, late)


async def test_update_of_a_failed_retry_is_not_applied_with_the_next_answer(
    settings: Settings, database: Database
) -> None:
    """Although the answer that came with it is the letter's, which has used it."""
    failures = 4

    async def beside(state: Decisions) -> Decisions:
        nonlocal failures

        async def stored() -> bool:
            return bool(await query(database, STORED))

        await until(stored, "the question is stored")
        if failures:
            failures -= 1
            raise ValueError("not now")
        return {}

    async with scene_of(settings, database, side_by_side(ask_twice, beside)) as scene:
        await scene.run(input={"decisions": []})
        [first] = (await waiting(database)).values()
        run_id = await scene.run(command={"resume": {first: "yes"}, "update": {"decisions": ["note"]}})
        for _ in range(2):
            await query(database, "UPDATE run SET dead_letter = 'error' WHERE run_id = %s RETURNING 1", run_id)
            run_id = await retry(database, run_id)
            await scene.station.execute_next()
            assert (await run_row(database, run_id))["status"] == "error"
        assert await scene.asks() == {"second?"}
        await scene.answer({"second?": "no"})
        assert await scene.decided() == ["first yes", "second no"]


@BY
async def test_failed_retry_asks_nothing_that_the_letter_has_used_an_answer_to(
    settings: Settings, database: Database, by: str
) -> None:
    """LangGraph goes on showing the question of a task that a node calls."""
    failures = 4

    @task
    async def ask() -> str:
        answer: str = interrupt("pay?")
        return answer

    async def decide(state: Decisions) -> Decisions:
        nonlocal failures
        decided = await ask()
        if failures:
            failures -= 1
            raise ValueError("not now")
        return {"decisions": [decided]}

    async with scene_of(settings, database, side_by_side(decide)) as scene:
        await scene.run(input={"decisions": []})
        [pay] = (await waiting(database)).values()
        run_id = await scene.run(command=answer(pay, "APPROVE", by))
        assert await scene.asks() == set()
        for _ in range(2):
            await query(database, "UPDATE run SET dead_letter = 'error' WHERE run_id = %s RETURNING 1", run_id)
            run_id = await retry(database, run_id)
            await scene.station.execute_next()
            assert (await run_row(database, run_id))["status"] == "error"
            assert await scene.asks() == set()
        assert len(await query(database, "SELECT 1 FROM interrupt")) == 1


async def retry(database: Database, run_id: UUID, **how: Any) -> UUID:
    async with database.connection() as connection:
        letter = await get_letter(connection, run_id)
    created = await retry_letter(database, letter, RetryOptions(kwargs=dict(letter["kwargs"]), **how))
    return created.new.run_id


@pytest.mark.parametrize(
    ("resume", "by_id"),
    [
        ({"0123456789abcdef" * 2: 1}, True),
        ({"0123456789ABCDEF" * 2: 1}, False),
        ({"approve_the_payment_of_customers": 1}, False),
        ({"0123456789abcdef" * 2: 1, "note": 2}, False),
        ({"0123456789abcdef" * 2 + "\n": 1}, False),
        ({}, False),
        ("0123456789abcdef" * 2, False),
    ],
    ids=["id", "upper case", "words", "one other key", "line end", "empty", "text"],
)
def test_answers_by_id_are_told_from_a_value_as_in_langgraph(resume: Any, by_id: bool) -> None:
    assert names_interrupts(resume) is by_id

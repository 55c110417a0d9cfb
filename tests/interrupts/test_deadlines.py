"""What happens when nobody answers in time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.engine.interrupts.inbox import serve_deadline, upcoming_deadlines
from tests.interrupts.asking import Asked, Desk
from tests.support.receiver import receiving
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_AGO = (datetime.now(UTC) - timedelta(hours=1)).isoformat()


async def due_question(desk: Desk, asked: Asked) -> Any:
    """Make a question due, and find it as upkeep does."""
    await desk.rows(
        "UPDATE interrupt SET due_at = now() - interval '1 s' WHERE thread_id = %(id)s RETURNING 1", id=asked.thread_id
    )
    async with desk.database.connection() as connection:
        found = await upcoming_deadlines(connection, 100)
    return next(one for one in found if str(one["thread_id"]) == asked.thread_id)


async def test_default_is_the_answer_after_the_deadline(desk: Desk) -> None:
    asked = await desk.ask(
        input={"terms": {"deadline": LONG_AGO, "default": "no"}}, config={"configurable": {"colour": "blue"}}
    )
    # Upkeep may have been quicker than we.
    [question] = await desk.inbox(thread_id=asked.thread_id, state="all")
    run_id = await desk.answered_by(asked.thread_id, question["interrupt_id"])
    assert (await desk.join(asked.thread_id, run_id))["answer"] == "no"
    [question] = await desk.inbox(thread_id=asked.thread_id, state="answered")
    assert question["defaulted"] is True
    run = await desk.get(f"/threads/{asked.thread_id}/runs/{run_id}")
    assert run["kwargs"]["config"]["configurable"]["colour"] == "blue"
    refused = await desk.answer(asked.thread_id, {question["interrupt_id"]: "yes"}, 409)
    assert refused["run_id"] == run_id


async def test_answer_in_time_cancels_the_deadline(idle: Desk) -> None:
    async with idle.worker():
        asked = await idle.ask(input={"terms": {"deadline": 3600, "default": "no"}})
    due = await due_question(idle, asked)
    run = await idle.answer(asked.thread_id, "yes")
    assert await serve_deadline(idle.database, due) is None
    assert [one["run_id"] for one in await idle.runs(asked.thread_id)] == [run["run_id"], asked.run_id]


async def test_a_deadline_is_served_once(idle: Desk) -> None:
    async with idle.worker():
        asked = await idle.ask(input={"terms": {"deadline": 3600, "default": "no"}})
    due = await due_question(idle, asked)
    path = f"/threads/{asked.thread_id}/runs"
    body = {"assistant_id": "gate", "command": {"resume": {asked.ids[0]: "yes"}}}
    clicking = asyncio.create_task(idle.client.post(path, json=body))
    served = await asyncio.gather(*(serve_deadline(idle.database, due) for _ in range(3)))
    click = await clicking
    created = [one for one in served if one is not None and one.created is not None]
    assert len(created) + (click.status_code == 200) == 1
    assert len(await idle.runs(asked.thread_id)) == 2


async def test_a_default_that_fails_is_not_given_again(desk: Desk) -> None:
    thread_id = await desk.thread()
    value = {"question": "Which?", "deadline": LONG_AGO, "default": "wrong"}
    asked = await desk.ask("picky")
    await desk.rows(
        "UPDATE interrupt SET value = value, due_at = now(), default_answer = to_jsonb(%(d)s::text) "
        "WHERE thread_id = %(id)s RETURNING 1",
        d=value["default"],
        id=asked.thread_id,
    )

    async def failed() -> bool:
        return [run["status"] for run in await desk.runs(asked.thread_id)] == ["error", "success"]

    await until(failed, "the default fails", patience=60)
    [question] = await desk.inbox(thread_id=asked.thread_id)
    [row] = await desk.rows("SELECT due_at FROM interrupt WHERE thread_id = %(id)s", id=asked.thread_id)
    assert (question["state"], row["due_at"]) == ("waiting", None)
    await desk.client.delete(f"/threads/{thread_id}")


async def test_an_escalation_is_shown_and_told(desk: Desk) -> None:
    async with receiving() as receiver:
        escalate = {"to": "the boss", "webhook": receiver.url, "deadline": 3600}
        terms = {"deadline": LONG_AGO, "default": "no", "escalate": escalate}
        asked = await desk.ask(input={"terms": terms})

        async def escalated() -> list[dict[str, Any]]:
            return await desk.inbox(thread_id=asked.thread_id, escalated="true")

        [question] = await until(escalated, "the question is escalated", patience=60)
        assert (question["state"], question["escalated_to"]) == ("waiting", "the boss")
        assert question["deadline_at"] > question["asked_at"], "it has another deadline"
        [told] = await receiver.get()
    assert told.json["event"] == "interrupt.escalated"
    assert told.json["interrupt"]["interrupt_id"] == asked.ids[0]
    assert (told.json["run_id"], told.json["thread_id"]) == (asked.run_id, asked.thread_id)
    await due_question(desk, asked)
    run_id = await desk.answered_by(asked.thread_id, asked.ids[0])
    assert (await desk.join(asked.thread_id, run_id))["answer"] == "no"


async def test_an_escalation_without_a_second_deadline_waits_on(idle: Desk) -> None:
    async with idle.worker():
        asked = await idle.ask(input={"terms": {"deadline": 3600, "escalate": True}})
    due = await due_question(idle, asked)
    served = [await serve_deadline(idle.database, due) for _ in range(2)]
    assert served[0] is not None
    assert (served[0].escalated, served[0].webhook_queued, served[1]) == (True, False, None)
    [question] = await idle.inbox(thread_id=asked.thread_id)
    assert question["escalated_at"] is not None


async def test_a_default_without_the_run_that_asked(idle: Desk) -> None:
    """Its row may be gone, swept or deleted by hand; the question is not."""
    async with idle.worker():
        asked = await idle.ask(input={"terms": {"deadline": 3600, "default": "no"}})
    due = await due_question(idle, asked)
    await idle.rows("DELETE FROM run WHERE run_id = %(id)s RETURNING 1", id=asked.run_id)
    served = await serve_deadline(idle.database, due)
    assert served is not None
    assert served.created is not None
    async with idle.worker():
        assert (await idle.join(asked.thread_id, str(served.created.new.run_id)))["answer"] == "no"

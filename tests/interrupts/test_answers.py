"""An answer is accepted once, and a question that got none after all waits again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.interrupts.asking import Asked, Desk

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_of_many_clicks_one_is_accepted(idle: Desk) -> None:
    async with idle.worker():
        asked = await idle.ask()
    # Nobody works meanwhile: the first is not over when the others come.
    path, body = f"/threads/{asked.thread_id}/runs", {"assistant_id": "gate", "command": {"resume": "yes"}}
    by_id = {"assistant_id": "gate", "command": {"resume": {asked.ids[0]: "yes"}}}
    posts = [idle.client.post(path, json=body) for _ in range(4)] + [idle.client.post(path, json=by_id)]
    posts.append(idle.client.post(f"{asked.path}/resume", json={"answer": "yes"}))
    posts.append(idle.client.post(f"{path}/stream", json=body))
    answers = await asyncio.gather(*posts)
    [won] = [answer for answer in answers if answer.status_code == 200] if answers[-1].status_code != 200 else [None]
    runs = await idle.runs(asked.thread_id)
    assert len(runs) == 2, "the question and one answer"
    winner = runs[0]["run_id"]
    if won is not None:
        assert won.json()["run_id"] == winner
    lost = [answer for answer in answers if answer.status_code != 200]
    assert len(lost) == len(answers) - 1
    for answer in lost:
        assert answer.status_code == 409
        assert answer.json()["run_id"] == winner
        assert winner in answer.json()["detail"]
    await idle.client.delete(f"/threads/{asked.thread_id}")


async def test_an_answer_that_comes_too_late(desk: Desk) -> None:
    asked = await desk.ask()
    first = await desk.answer(asked.thread_id, "yes")
    assert (await desk.join(asked.thread_id, first["run_id"]))["answer"] == "yes"
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "answered"}
    for resume in ("no", {asked.ids[0]: "no"}):
        assert (await desk.answer(asked.thread_id, resume, 409))["run_id"] == first["run_id"]
    refused = await desk.post(f"{asked.path}/resume", 409, answer="no")
    assert refused["run_id"] == first["run_id"]
    assert len(await desk.runs(asked.thread_id)) == 2


async def test_in_the_thread_centric_protocol(idle: Desk) -> None:
    async with idle.worker():
        asked = await idle.ask()
    params = {"interrupt_id": asked.ids[0], "response": "yes", "namespace": []}
    path = f"/threads/{asked.thread_id}/commands"
    said = [await idle.post(path, id=number, method="input.respond", params=params) for number in (1, 2)]
    assert said[0]["type"] == "success"
    [answering, _] = await idle.runs(asked.thread_id)
    assert (said[1]["error"], said[1]["run_id"]) == ("no_such_interrupt", answering["run_id"])
    await idle.client.delete(f"/threads/{asked.thread_id}")


async def test_an_answer_before_its_question_is_written(idle: Desk) -> None:
    """A watcher sees the question a moment before the run that asks has ended."""
    async with idle.worker():
        asked = await idle.ask()
    await idle.client.delete(f"/threads/{asked.thread_id}")
    thread_id = await idle.thread()
    asking = await idle.post(f"/threads/{thread_id}/runs", assistant_id="gate", input={})
    early = await idle.answer(thread_id, "yes")
    assert (await idle.answer(thread_id, "no", 409))["run_id"] == early["run_id"]
    assert await idle.inbox(thread_id=thread_id, state="all") == []
    async with idle.worker():
        assert (await idle.join(thread_id, early["run_id"]))["answer"] == "yes"
    [question] = await idle.inbox(thread_id=thread_id, state="all")
    assert (question["run_id"], question["answered_by"]) == (asking["run_id"], early["run_id"])
    assert await idle.rows("SELECT 1 FROM interrupt WHERE asked_at IS NULL") == []


async def test_two_questions_one_after_the_other(desk: Desk) -> None:
    asked = await desk.ask("twice")
    first = await desk.answer(asked.thread_id, {asked.ids[0]: 1}, assistant_id="twice")
    await desk.join(asked.thread_id, first["run_id"])
    [second] = await desk.inbox(thread_id=asked.thread_id)
    assert (second["run_id"], second["value"]) == (first["run_id"], "second?")
    # A click on the first question, which somebody still has on the screen.
    assert (await desk.post(f"{asked.path}/resume", 409, answer="stale"))["run_id"] == first["run_id"]
    path = f"/threads/{asked.thread_id}/runs/{first['run_id']}/resume"
    done = await desk.post(path, answer=2)
    assert (await desk.join(asked.thread_id, done["run_id"]))["answers"] == [1, 2]


async def test_two_questions_side_by_side(desk: Desk) -> None:
    asked = await desk.ask("pair")
    assert len(asked.ids) == 2
    one, other = asked.ids
    assert "several questions" in (await desk.post(f"{asked.path}/resume", 422, answer="x"))["detail"]
    first = await desk.post(f"{asked.path}/resume", answers={one: 1})
    await desk.join(asked.thread_id, first["run_id"])
    assert await desk.states(asked.thread_id) == {one: "answered", other: "waiting"}
    [left] = await desk.inbox(thread_id=asked.thread_id)
    assert left["run_id"] == asked.run_id, "it was asked by the first, whoever left it"
    # Whoever thinks in runs asks the last one.
    done = await desk.post(f"/threads/{asked.thread_id}/runs/{first['run_id']}/resume", answer=2)
    result = await desk.join(asked.thread_id, done["run_id"])
    assert sorted(answer for _, answer in result["answers"]) == [1, 2]


async def undo(desk: Desk, asked: Asked, how: str, run: dict[str, Any]) -> None:
    path = f"/threads/{asked.thread_id}/runs/{run['run_id']}"
    if how == "delete":
        await desk.client.post(f"{path}/cancel")
        assert (await desk.client.delete(path)).status_code == 204
    else:
        response = await desk.client.post(f"{path}/cancel", params={"action": how})
        assert response.status_code == 202


@pytest.mark.parametrize("how", ["interrupt", "rollback", "delete"])
async def test_an_answer_that_is_taken_back_before_it_is_used(idle: Desk, how: str) -> None:
    async with idle.worker():
        asked = await idle.ask()
    run = await idle.answer(asked.thread_id, "yes")
    assert await idle.inbox(thread_id=asked.thread_id) == []
    await undo(idle, asked, how, run)
    assert await idle.states(asked.thread_id) == {asked.ids[0]: "waiting"}
    again = await idle.answer(asked.thread_id, "no")
    async with idle.worker():
        assert (await idle.join(asked.thread_id, again["run_id"]))["answer"] == "no"


async def test_an_answer_whose_run_is_deleted_later(desk: Desk) -> None:
    asked = await desk.ask()
    first = await desk.answer(asked.thread_id, "yes")
    await desk.join(asked.thread_id, first["run_id"])
    assert (await desk.client.delete(f"/threads/{asked.thread_id}/runs/{first['run_id']}")).status_code == 204
    thread = await desk.get(f"/threads/{asked.thread_id}")
    assert thread["status"] == "interrupted"
    [[waiting]] = thread["interrupts"].values()
    assert waiting["id"] == asked.ids[0]
    again = await desk.answer(asked.thread_id, {asked.ids[0]: "no"})
    assert (await desk.join(asked.thread_id, again["run_id"]))["answer"] == "no"


async def test_a_deleted_answer_opens_no_question_after_an_edit_of_the_state(desk: Desk) -> None:
    asked = await desk.ask("decisions_in_steps", {"decisions": ["x"]})
    run = await desk.answer(asked.thread_id, "yes", assistant_id="decisions_in_steps")
    await desk.join(asked.thread_id, run["run_id"])
    await desk.post(f"/threads/{asked.thread_id}/state", values={"decisions": ["by hand"]}, as_node="second")
    assert (await desk.client.delete(f"/threads/{asked.thread_id}/runs/{run['run_id']}")).status_code == 204
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "answered"}
    assert (await desk.get(f"/threads/{asked.thread_id}"))["interrupts"] == {}
    for resume in ("REJECT", {asked.ids[0]: "REJECT"}):
        await desk.answer(asked.thread_id, resume, 409, assistant_id="decisions_in_steps")


async def test_an_answer_whose_run_is_rolled_back_while_it_runs(desk: Desk) -> None:
    asked = await desk.ask(input={"seconds": 60})
    first = await desk.answer(asked.thread_id, "yes", stream_mode="updates")
    async with desk.client.stream("GET", f"/threads/{asked.thread_id}/runs/{first['run_id']}/stream") as response:
        async for line in response.aiter_lines():
            if line.startswith("event: updates"):
                break
    replaced = await desk.answer(asked.thread_id, {asked.ids[0]: "no"}, multitask_strategy="rollback")
    assert (await desk.get(f"/threads/{asked.thread_id}/runs/{replaced['run_id']}"))["status"] in ("pending", "running")
    [question] = await desk.inbox(thread_id=asked.thread_id, state="answered")
    assert question["answered_by"] == replaced["run_id"]
    await desk.client.post(
        f"/threads/{asked.thread_id}/runs/{replaced['run_id']}/cancel", params={"action": "rollback", "wait": "true"}
    )
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}


async def test_a_failed_answer_leaves_the_question_waiting(desk: Desk) -> None:
    asked = await desk.ask("picky")
    failed = await desk.post(f"{asked.path}/resume", answer="wrong")
    assert "__error__" in await desk.join(asked.thread_id, failed["run_id"])
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}


async def test_going_on_without_an_answer_closes_the_question(desk: Desk) -> None:
    asked = await desk.ask("picky")
    await desk.post(f"/threads/{asked.thread_id}/runs/wait", assistant_id="picky", input={"answer": None})
    states = await desk.states(asked.thread_id)
    assert states.pop(asked.ids[0]) == "closed"
    assert list(states.values()) == ["waiting"], "the new turn asks its own"
    refused = await desk.answer(asked.thread_id, {asked.ids[0]: "x"}, 409)
    assert "does not wait" in refused["detail"]
    # By hand as well.
    await desk.post(f"/threads/{asked.thread_id}/state", values={"answer": "mine"}, as_node="refuse")
    assert set((await desk.states(asked.thread_id)).values()) == {"closed"}


async def test_a_run_that_asks_nothing_closes_the_question_too(desk: Desk) -> None:
    asked = await desk.ask()
    done = await desk.post(f"/threads/{asked.thread_id}/runs/wait", assistant_id="quiet", input={})
    assert done["done"] == ["work"]
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "closed"}


async def test_copy_of_a_waiting_thread_waits_too(desk: Desk) -> None:
    asked = await desk.ask()
    copy = (await desk.post(f"/threads/{asked.thread_id}/copy"))["thread_id"]
    assert await desk.states(copy) == {asked.ids[0]: "waiting"}
    run = await desk.answer(copy, "yes")
    assert (await desk.join(copy, run["run_id"]))["answer"] == "yes"
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}


async def test_a_thread_that_asked_nothing_goes_on_as_ever(desk: Desk) -> None:
    thread_id = await desk.thread()
    for _ in range(2):
        run = await desk.answer(thread_id, "yes")
        await desk.join(thread_id, run["run_id"])
    asked = await desk.ask()
    # As if it had been asked before there were rows.
    await desk.rows("DELETE FROM interrupt WHERE thread_id = %(id)s RETURNING 1", id=asked.thread_id)
    run = await desk.answer(asked.thread_id, {asked.ids[0]: "yes"})
    assert (await desk.join(asked.thread_id, run["run_id"]))["answer"] == "yes"


async def test_rows_that_are_behind_do_not_lock_anybody_out(desk: Desk) -> None:
    """A worker of an earlier version ended the run that asks again, and knew nothing of rows."""
    asked = await desk.ask()
    stranger = "00000000-0000-0000-0000-000000000001"
    await desk.rows(
        "UPDATE interrupt SET answered_by = %(run)s WHERE thread_id = %(id)s RETURNING 1",
        run=stranger,
        id=asked.thread_id,
    )
    run = await desk.post(f"{asked.path}/resume", answer="yes")
    assert (await desk.join(asked.thread_id, run["run_id"]))["answer"] == "yes"
    [question] = await desk.inbox(thread_id=asked.thread_id, state="answered")
    assert question["answered_by"] == run["run_id"]


async def test_resume_is_refused_without_a_waiting_interrupt(desk: Desk) -> None:
    asked = await desk.ask()
    assert (await desk.post(f"{asked.path}/resume", 422))["detail"].startswith("Give either answer")
    assert "not input" in (await desk.post(f"{asked.path}/resume", 422, answer=1, input={}))["detail"]
    unknown = {"0" * 32: "x"}
    assert "has not asked" in (await desk.post(f"{asked.path}/resume", 422, answers=unknown))["detail"]
    missing = f"/threads/{asked.thread_id}/runs/00000000-0000-0000-0000-000000000000/resume"
    await desk.post(missing, 404, answer="yes")
    run = await desk.answer(asked.thread_id, "yes")
    await desk.join(asked.thread_id, run["run_id"])
    path = f"/threads/{asked.thread_id}/runs/{run['run_id']}/resume"
    assert "has not asked anything" in (await desk.post(path, 422, answer="yes"))["detail"]


async def test_a_resumed_run_is_as_the_one_that_asked(desk: Desk) -> None:
    asked = await desk.ask(config={"configurable": {"colour": "blue"}, "tags": ["t"]}, stream_mode=["updates"])
    run = await desk.post(f"{asked.path}/resume", answer="yes", metadata={"who": "me"})
    assert run["kwargs"]["config"]["configurable"]["colour"] == "blue"
    assert (run["kwargs"]["stream_mode"], run["metadata"]["who"]) == (["updates"], "me")
    other = await desk.ask(config={"configurable": {"colour": "blue"}})
    run = await desk.post(f"{other.path}/resume", answer="yes", config={"configurable": {"colour": "red"}})
    assert run["kwargs"]["config"]["configurable"]["colour"] == "red"


async def test_an_object_with_keys_like_ids_is_a_value(idle: Desk) -> None:
    """To LangGraph an id has the digits 0-9 and a-f. So the object is for all that waits, and the only answer."""
    async with idle.worker():
        asked = [await idle.ask("decisions") for _ in range(2)]
    for one, key in zip(asked, ("approve_the_payment_of_customers", "0123456789ABCDEF" * 2), strict=True):
        first = await idle.answer(one.thread_id, {key: True}, assistant_id="decisions")
        refused = await idle.answer(one.thread_id, {one.ids[0]: "REJECT"}, 409, assistant_id="decisions")
        assert refused["run_id"] == first["run_id"]
        refused = await idle.post(f"{one.path}/resume", 422, answers={key: True})
        assert "for each interrupt id" in refused["detail"]


async def test_an_answer_names_a_limited_number_of_interrupts(idle: Desk) -> None:
    thread_id = await idle.thread()
    first, second = ({f"{number:032x}": True for number in range(at, at + 10_000)} for at in (0, 10_000))
    refused = await idle.answer(thread_id, {**first, "f" * 32: True}, 422)
    assert refused["detail"] == "An answer can be for 10,000 interrupts at most. This one names 10,001."
    await idle.answer(thread_id, first)
    await idle.answer(thread_id, second)
    await idle.client.delete(f"/threads/{thread_id}")

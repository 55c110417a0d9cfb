"""A run that answers a question is a dead letter: retried, it answers that question and no other, with all that it was
given."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from holdfast.engine.dead_letters.graph_gone import end_graphless_runs
from tests.interrupts.asking import Asked, Desk
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

names = itertools.count()


def new(how: str) -> str:
    return f"{how} retried {next(names)}"


def start(begin: str = "start") -> dict[str, Any]:
    return {"from": begin}


def resume(asked: Asked, answer: Any, by: str) -> Any:
    return {asked.ids[0]: answer} if by == "id" else answer


async def letter(desk: Desk, asked: Asked, answer: Any, graph: str, **body: Any) -> str:
    """Answer, and let the run that does so fail for good. Returns its path as a dead letter."""
    run = await desk.answer(asked.thread_id, answer, assistant_id=graph, **body)
    assert "__error__" in await desk.join(asked.thread_id, run["run_id"])
    path = f"/dead-letters/{run['run_id']}"
    assert (await desk.get(path))["state"] == "open"
    return path


async def progress_of(desk: Desk, path: str) -> int:
    [row] = await desk.rows("SELECT progress FROM run WHERE run_id = %(id)s", id=path.rpartition("/")[2])
    progress: int = row["progress"]
    return progress


async def waiting(desk: Desk, thread_id: str) -> list[Any]:
    """What waits, as the inbox and the thread agree."""
    inbox = await desk.inbox(thread_id=thread_id)
    by_task = (await desk.get(f"/threads/{thread_id}"))["interrupts"]
    shown = [one["id"] for asked in by_task.values() for one in asked]
    assert sorted(shown) == sorted(question["interrupt_id"] for question in inbox)
    return [question["value"] for question in inbox]


async def decided(desk: Desk, thread_id: str, answer: Any, graph: str) -> Any:
    run = await desk.answer(thread_id, answer, assistant_id=graph)
    return (await desk.join(thread_id, run["run_id"]))["decisions"]


@pytest.mark.parametrize("begin", ["checkpoint", "start"])
@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_letter_that_did_nothing_does_not_answer_a_later_question(desk: Desk, by: str, begin: str) -> None:
    asked = await desk.ask("factory_away")
    config = {"configurable": {"away": new("flakier")}}
    path = await letter(desk, asked, resume(asked, "yes", by), "factory_away", config=config)
    assert await progress_of(desk, path) == 0
    assert await waiting(desk, asked.thread_id) == ["first?"]
    await desk.join(asked.thread_id, (await desk.answer(asked.thread_id, "no", assistant_id="factory_away"))["run_id"])
    assert await waiting(desk, asked.thread_id) == ["second?"]
    for fork in (False, True):
        refused = await desk.post(f"{path}/retry", 409, **start(begin), fork=fork)
        assert "discard this letter" in refused["detail"]
    assert await waiting(desk, asked.thread_id) == ["second?"]
    assert await decided(desk, asked.thread_id, "maybe", "factory_away") == ["no", "maybe"]


async def test_a_letter_that_did_nothing_is_retried_with_another_input(desk: Desk) -> None:
    asked = await desk.ask("factory_away")
    path = await letter(desk, asked, "yes", "factory_away", config={"configurable": {"away": new("flakier")}})
    await desk.join(asked.thread_id, (await desk.answer(asked.thread_id, "no", assistant_id="factory_away"))["run_id"])
    retried = await desk.post(f"{path}/retry", **start(), input={"decisions": []})
    await desk.join(asked.thread_id, retried["run_id"])
    assert await waiting(desk, asked.thread_id) == ["first?"]


@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_letter_that_did_nothing_answers_its_own_question(desk: Desk, by: str) -> None:
    asked = await desk.ask("factory_away")
    config = {"configurable": {"away": new("flakier")}}
    path = await letter(desk, asked, resume(asked, "yes", by), "factory_away", config=config)
    retried = await desk.post(f"{path}/retry")
    await desk.join(asked.thread_id, retried["run_id"])
    assert await waiting(desk, asked.thread_id) == ["second?"]
    assert await decided(desk, asked.thread_id, "maybe", "factory_away") == ["yes", "maybe"]


async def test_many_letters_of_a_lost_graph_answer_no_later_question(idle: Desk) -> None:
    async def ended(thread_id: str) -> bool:
        return bool((await idle.get(f"/threads/{thread_id}"))["status"] != "busy")

    asked: list[Asked] = []
    async with idle.worker():
        asked += [await idle.ask("decisions") for _ in range(2)]
    stale, fresh = asked
    for one, by in ((stale, "id"), (fresh, "value")):
        await idle.answer(one.thread_id, resume(one, "yes", by), assistant_id="decisions")
    assert len(await end_graphless_runs(idle.database, ["decisions"], after=0, batch=10)) == 2
    later = await idle.answer(stale.thread_id, "no", assistant_id="decisions")
    async with idle.worker():
        await idle.join(stale.thread_id, later["run_id"])
        bulk = await idle.post("/dead-letters/retry", reason="graph_gone")
        assert (bulk["retried"], len(bulk["skipped"])) == (1, 1)
        for one in asked:
            await until(lambda one=one: ended(one.thread_id), "the thread rests")  # type: ignore[misc]
        assert [await waiting(idle, one.thread_id) for one in asked] == [["second?"], ["second?"]]
        assert await decided(idle, stale.thread_id, "maybe", "decisions") == ["no", "maybe"]
        assert await decided(idle, fresh.thread_id, "maybe", "decisions") == ["yes", "maybe"]


@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_question_of_the_letter_itself_waits_beside_the_retry(idle: Desk, by: str) -> None:
    """Whether the retry is unfinished or was cancelled."""
    failing = new("flakier")
    async with idle.worker():
        asked = await idle.ask("decisions_in_steps", {"decisions": [failing]})
        path = await letter(idle, asked, resume(asked, "yes", by), "decisions_in_steps")
    assert await progress_of(idle, path) == 2
    assert await waiting(idle, asked.thread_id) == ["second?"]
    retried = await idle.post(f"{path}/retry")
    assert [one["value"] for one in await idle.inbox(thread_id=asked.thread_id)] == ["second?"]
    await idle.client.post(f"/threads/{asked.thread_id}/runs/{retried['run_id']}/cancel")
    assert await waiting(idle, asked.thread_id) == ["second?"]
    async with idle.worker():
        done = await decided(idle, asked.thread_id, "no", "decisions_in_steps")
    assert done == [failing, "first? yes", "second? no"]


@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_retry_from_the_start_answers_the_question_again(idle: Desk, by: str) -> None:
    """The letter had used the answer and gone on. If the retry is cancelled, the question waits."""
    failing = new("flakier")
    async with idle.worker():
        asked = await idle.ask("decisions_in_steps", {"decisions": [failing]})
        path = await letter(idle, asked, resume(asked, "yes", by), "decisions_in_steps")
    assert await progress_of(idle, path) == 2
    retried = await idle.post(f"{path}/retry", **start())
    assert await idle.inbox(thread_id=asked.thread_id) == []
    await idle.client.post(f"/threads/{asked.thread_id}/runs/{retried['run_id']}/cancel")
    assert await waiting(idle, asked.thread_id) == ["first?"]
    async with idle.worker():
        run = await idle.answer(asked.thread_id, "no", assistant_id="decisions_in_steps")
        await idle.join(asked.thread_id, run["run_id"])
        assert await waiting(idle, asked.thread_id) == ["second?"]
        done = await decided(idle, asked.thread_id, "maybe", "decisions_in_steps")
    assert done == [failing, "first? no", "second? maybe"]


async def test_a_question_of_the_letter_itself_is_answered_while_the_retry_is_unfinished(idle: Desk) -> None:
    failing = new("flakier")
    async with idle.worker():
        asked = await idle.ask("decisions_in_steps", {"decisions": [failing]})
        path = await letter(idle, asked, "yes", "decisions_in_steps")
    await idle.post(f"{path}/retry")
    [question] = await idle.inbox(thread_id=asked.thread_id)
    run = await idle.answer(asked.thread_id, {question["interrupt_id"]: "no"}, assistant_id="decisions_in_steps")
    async with idle.worker():
        done = (await idle.join(asked.thread_id, run["run_id"]))["decisions"]
    assert done == [failing, "first? yes", "second? no"]
    assert set((await idle.states(asked.thread_id)).values()) == {"answered"}


@pytest.mark.parametrize("begin", ["checkpoint", "start"])
@pytest.mark.parametrize("durability", ["async", "exit"])
@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_used_answer_is_not_given_to_the_next_question_of_its_node(
    desk: Desk, by: str, durability: str, begin: str
) -> None:
    """The node asks again beside one that fails, so that the graph does not go on to another checkpoint."""
    failing = new("flakiest")
    first = await desk.ask("decisions_beside", {"decisions": [failing]}, durability=durability)
    path = await letter(desk, first, resume(first, "yes", by), "decisions_beside", durability=durability)
    assert await progress_of(desk, path) < 2
    assert await waiting(desk, first.thread_id) == ["second?"]
    retried = await desk.post(f"{path}/retry", **start(begin))
    await desk.join(first.thread_id, retried["run_id"])
    assert await waiting(desk, first.thread_id) == ["second?"]
    assert await decided(desk, first.thread_id, "no", "decisions_beside") == [failing, "yes", "no"]


@pytest.mark.parametrize("begin", ["checkpoint", "start"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_retry_applies_the_update_that_came_with_the_answer(
    desk: Desk, by: str, durability: str, begin: str
) -> None:
    asked = await desk.ask("decision")
    answer = new("flakier")
    command = {"resume": resume(asked, answer, by), "update": {"decisions": ["note"]}}
    path = await letter(desk, asked, answer, "decision", command=command, durability=durability)
    assert await progress_of(desk, path) == 1
    retried = await desk.post(f"{path}/retry", **start(begin))
    assert (await desk.join(asked.thread_id, retried["run_id"]))["decisions"] == ["note", answer]
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "answered"}


@pytest.mark.parametrize("durability", ["async", "exit"])
@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_retry_goes_where_the_command_of_the_answer_said(desk: Desk, by: str, durability: str) -> None:
    asked = await desk.ask("decision_or_note")
    answer = new("flakier")
    command = {"resume": resume(asked, answer, by), "goto": "note"}
    path = await letter(desk, asked, answer, "decision_or_note", command=command, durability=durability)
    retried = await desk.post(f"{path}/retry")
    assert sorted((await desk.join(asked.thread_id, retried["run_id"]))["decisions"]) == [answer, "noted"]


@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_second_retry_applies_the_update_as_well(desk: Desk, by: str) -> None:
    asked = await desk.ask("decision")
    answer = new("flakiest")
    command = {"resume": resume(asked, answer, by), "update": {"decisions": ["note"]}}
    path = await letter(desk, asked, answer, "decision", command=command)
    for outcome in ("__error__", "decisions"):
        retried = await desk.post(f"{path}/retry")
        done = await desk.join(asked.thread_id, retried["run_id"])
        assert outcome in done
        path = f"/dead-letters/{retried['run_id']}"
    assert done["decisions"] == ["note", answer]


@pytest.mark.parametrize("by", ["value", "id"])
async def test_an_update_is_applied_again_without_an_answer_that_was_used(desk: Desk, by: str) -> None:
    failing = new("flakiest")
    first = await desk.ask("decisions_beside", {"decisions": [failing]})
    command = {"resume": resume(first, "yes", by), "update": {"decisions": ["note"]}}
    path = await letter(desk, first, "yes", "decisions_beside", command=command, strict_resume=True)
    retried = await desk.post(f"{path}/retry")
    await desk.join(first.thread_id, retried["run_id"])
    assert await waiting(desk, first.thread_id) == ["second?"]
    assert await decided(desk, first.thread_id, "no", "decisions_beside") == [failing, "note", "yes", "no"]


async def test_another_input_replaces_the_answer_and_its_update(desk: Desk) -> None:
    asked = await desk.ask("decision")
    answer = new("flakier")
    command = {"resume": answer, "update": {"decisions": ["note"]}}
    path = await letter(desk, asked, answer, "decision", command=command)
    retried = await desk.post(f"{path}/retry", **start(), input={"decisions": ["edited"]})
    await desk.join(asked.thread_id, retried["run_id"])
    assert await waiting(desk, asked.thread_id) == ["approve?"]
    assert await decided(desk, asked.thread_id, "no", "decision") == ["edited", "no"]


@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_retry_applies_the_update_for_a_nested_graph(desk: Desk, by: str) -> None:
    asked = await desk.ask("nested_decision")
    answer = new("flakier")
    command = {"resume": resume(asked, answer, by), "update": {"decisions": ["note"]}}
    path = await letter(desk, asked, answer, "nested_decision", command=command)
    retried = await desk.post(f"{path}/retry")
    done = (await desk.join(asked.thread_id, retried["run_id"]))["decisions"]
    assert (done.count("note"), done.count(answer)) == (1, 1)


async def test_an_update_that_is_still_stored_is_applied_once(desk: Desk) -> None:
    asked = await desk.ask("decision_pair")
    values = {question["value"]: question["interrupt_id"] for question in await desk.inbox(thread_id=asked.thread_id)}
    answer = new("flakier")
    answers = {values["left"]: "yes", values["right"]: answer}
    command = {"resume": answers, "update": {"decisions": ["note"]}}
    path = await letter(desk, asked, answers, "decision_pair", command=command)
    retried = await desk.post(f"{path}/retry")
    done = (await desk.join(asked.thread_id, retried["run_id"]))["decisions"]
    assert sorted(done) == ["left yes", "note", f"right {answer}"]


async def test_an_update_on_a_branch_is_applied_once(desk: Desk) -> None:
    asked = await desk.ask("decision")
    checkpoint = (await desk.get(f"/threads/{asked.thread_id}/state"))["checkpoint"]
    assert await decided(desk, asked.thread_id, "first", "decision") == ["first"]
    place = {"checkpoint_id": checkpoint["checkpoint_id"], "checkpoint_ns": ""}
    answer = new("flakier")
    command = {"resume": {asked.ids[0]: answer}, "update": {"decisions": ["note"]}}
    path = await letter(desk, asked, answer, "decision", command=command, checkpoint=place)
    retried = await desk.post(f"{path}/retry")
    assert (await desk.join(asked.thread_id, retried["run_id"]))["decisions"] == ["note", answer]


@pytest.mark.parametrize("how", ["rolled back", "deleted"])
@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_retry_that_is_undone_keeps_the_answer_that_the_letter_has_used(idle: Desk, by: str, how: str) -> None:
    async with idle.worker():
        asked = await idle.ask("decisions_in_steps", {"decisions": [new("flakier")]})
        path = await letter(idle, asked, resume(asked, "APPROVE", by), "decisions_in_steps")
    assert await progress_of(idle, path) == 2
    retried = await idle.post(f"{path}/retry")
    place = f"/threads/{asked.thread_id}/runs/{retried['run_id']}"
    if how == "deleted":
        async with idle.worker():
            await idle.join(asked.thread_id, retried["run_id"])
        assert (await idle.client.delete(place)).status_code == 204
    else:
        await idle.client.post(f"{place}/cancel", params={"action": "rollback"})
    refused = await idle.answer(asked.thread_id, {asked.ids[0]: "REJECT"}, 409, assistant_id="decisions_in_steps")
    assert refused["run_id"] == path.rpartition("/")[2]


@pytest.mark.parametrize("begin", ["checkpoint", "start"])
@pytest.mark.parametrize("as_node", ["first", None])
async def test_a_letter_that_did_nothing_answers_by_value_nothing_after_an_edit_of_the_state(
    idle: Desk, as_node: str | None, begin: str
) -> None:
    async with idle.worker():
        asked = await idle.ask("decisions_in_steps", {"decisions": ["x"]})
    run = await idle.answer(asked.thread_id, "APPROVE", assistant_id="decisions_in_steps")
    assert len(await end_graphless_runs(idle.database, ["decisions_in_steps"], after=0, batch=10)) == 1
    values = {"decisions": ["first? REJECT"]}
    await idle.post(f"/threads/{asked.thread_id}/state", values=values, as_node=as_node)
    refused = await idle.post(f"/dead-letters/{run['run_id']}/retry", 409, **start(begin))
    assert "discard this letter" in refused["detail"]


@pytest.mark.parametrize("begin", ["checkpoint", "start"])
async def test_a_letter_with_an_update_answers_by_value_nothing_after_an_edit_of_the_state(
    desk: Desk, begin: str
) -> None:
    asked = await desk.ask("decisions_in_steps", {"decisions": ["x"]})
    answer = new("flakier")
    command = {"resume": answer, "update": {"decisions": ["note"]}}
    path = await letter(desk, asked, answer, "decisions_in_steps", command=command)
    assert await progress_of(desk, path) < 2
    await desk.post(f"/threads/{asked.thread_id}/state", values={"decisions": ["by hand"]}, as_node="first")
    refused = await desk.post(f"{path}/retry", 409, **start(begin))
    assert "discard this letter" in refused["detail"]

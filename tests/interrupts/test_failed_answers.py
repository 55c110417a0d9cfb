"""A run that answers a question fails: the question waits again, and the next answer is the one that counts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from tests.interrupts.asking import PROJECT, Asked, Desk, desk_settings
from tests.support.databases import own_database
from tests.support.live_worker import running_worker
from tests.support.serving import answering
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

names = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def desk(server_url: str) -> AsyncIterator[Desk]:
    """With a bound on what a run may write that a test can reach."""
    with own_database(server_url) as database_url:
        settings = desk_settings(database_url).model_copy(update={"max_entry_bytes": 2_000_000})
        catalog = GraphCatalog.load(load_config(PROJECT))
        database = Database(settings, "test")
        await database.open()
        try:
            async with answering(settings, catalog) as client, running_worker(settings, catalog):
                yield Desk(client, database, settings, catalog)
        finally:
            await database.close()


def resume(asked: Asked, answer: Any, by: str) -> Any:
    return {asked.ids[0]: answer} if by == "id" else answer


async def running(desk: Desk, asked: Asked, run: dict[str, Any]) -> str:
    """The path of a run, once its node is executing."""
    path = f"/threads/{asked.thread_id}/runs/{run['run_id']}"

    async def begun() -> bool:
        return bool((await desk.get(path))["status"] == "running")

    await until(begun, "the answering run is executing")
    return path


async def fail(desk: Desk, asked: Asked, graph: str, how: str, by: str, **body: Any) -> None:
    """Answer, and let the run that does so come to nothing."""
    answer = "raise" if how == "error" else "hang"
    run = await desk.answer(asked.thread_id, resume(asked, answer, by), assistant_id=graph, **body)
    if answer == "hang":
        path = await running(desk, asked, run)
        await desk.client.post(f"{path}/cancel", params={"action": how, "wait": "true"})
    else:
        assert "__error__" in await desk.join(asked.thread_id, run["run_id"])


async def decided(desk: Desk, asked: Asked, answer: Any, **body: Any) -> Any:
    run = await desk.answer(asked.thread_id, answer, **body)
    return (await desk.join(asked.thread_id, run["run_id"]))["decisions"]


@pytest.mark.parametrize("by", ["value", "id"])
@pytest.mark.parametrize("how", ["error", "interrupt", "rollback"])
@pytest.mark.parametrize(
    ("graph", "durability"), [("decision", "async"), ("decision", "exit"), ("nested_decision", "async")]
)
async def test_second_answer_counts_after_the_first_has_failed(
    desk: Desk, graph: str, how: str, by: str, durability: str
) -> None:
    asked = await desk.ask(graph)
    await fail(desk, asked, graph, how, by, durability=durability)
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}
    done = await decided(desk, asked, resume(asked, "no", by), assistant_id=graph, durability=durability)
    assert done == ["no"]
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "answered"}


@pytest.mark.parametrize("how", ["error", "interrupt", "rollback"])
@pytest.mark.parametrize("by", ["value", "id"])
async def test_of_two_questions_of_a_node_the_first_stays_answered(desk: Desk, by: str, how: str) -> None:
    first = await desk.ask("decisions")
    run = await desk.answer(first.thread_id, resume(first, "one", by), assistant_id="decisions")
    await desk.join(first.thread_id, run["run_id"])
    [question] = await desk.inbox(thread_id=first.thread_id)
    second = Asked(first.thread_id, run["run_id"], [question["interrupt_id"]])
    await fail(desk, second, "decisions", how, by)
    [waiting] = await desk.inbox(thread_id=first.thread_id)
    assert waiting["value"] == "second?"
    assert await decided(desk, second, resume(second, "two", by), assistant_id="decisions") == ["one", "two"]


async def test_a_branch_that_has_used_its_answer_keeps_it(desk: Desk) -> None:
    asked = await desk.ask("decision_pair")
    values = {question["value"]: question["interrupt_id"] for question in await desk.inbox(thread_id=asked.thread_id)}
    first = {values["left"]: "yes", values["right"]: "hang"}
    run = await desk.answer(asked.thread_id, first, assistant_id="decision_pair", stream_mode="updates")
    path = f"/threads/{asked.thread_id}/runs/{run['run_id']}"
    async with desk.client.stream("GET", f"{path}/stream") as response:
        async for line in response.aiter_lines():
            if line.startswith("event: updates"):
                break  # The left one has finished.
    await desk.client.post(f"{path}/cancel", params={"wait": "true"})
    assert await desk.states(asked.thread_id) == {values["left"]: "answered", values["right"]: "waiting"}
    done = await decided(desk, asked, {values["right"]: "no"}, assistant_id="decision_pair")
    assert sorted(done) == ["left yes", "right no"]


async def test_failed_answer_leaves_both_interrupts_waiting(desk: Desk) -> None:
    asked = await desk.ask("decision_pair")
    values = {question["value"]: question["interrupt_id"] for question in await desk.inbox(thread_id=asked.thread_id)}
    run = await desk.answer(asked.thread_id, {values["right"]: "raise"}, assistant_id="decision_pair")
    await desk.join(asked.thread_id, run["run_id"])
    assert set((await desk.states(asked.thread_id)).values()) == {"waiting"}
    both = {values["left"]: "yes", values["right"]: "no"}
    assert sorted(await decided(desk, asked, both, assistant_id="decision_pair")) == ["left yes", "right no"]


async def test_a_nested_graph_that_has_used_its_answer_keeps_it(desk: Desk) -> None:
    asked = await desk.ask("nested_steps")
    run = await desk.answer(asked.thread_id, "yes", assistant_id="nested_steps")
    assert "__error__" in await desk.join(asked.thread_id, run["run_id"])
    # The step that asked has finished: another answer would be accepted and have no effect.
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "answered"}
    path = f"/threads/{asked.thread_id}/runs/wait"
    assert (await desk.post(path, assistant_id="nested_steps", input=None))["decisions"] == ["yes"]


USED_OUT_OF_SIGHT = ["task_in_node", "called_by_name", "entry"]


@pytest.mark.parametrize("durability", ["async", "exit"])
@pytest.mark.parametrize("by", ["value", "id"])
@pytest.mark.parametrize("how", ["error", "interrupt"])
@pytest.mark.parametrize("graph", USED_OUT_OF_SIGHT)
async def test_an_answer_used_where_langgraph_does_not_look_stays(
    desk: Desk, graph: str, how: str, by: str, durability: str
) -> None:
    """Whether by a task or by a graph that a node calls by a name of its own: another answer would have no effect."""
    asked = await desk.ask(graph)
    used = await stop_after_use(desk, asked, graph, how, by, durability=durability)
    later = await desk.client.post(
        f"/threads/{asked.thread_id}/runs",
        json={"assistant_id": graph, "command": {"resume": resume(asked, "no", by)}},
    )
    [state] = (await desk.states(asked.thread_id)).values()
    if later.status_code == 409:
        assert state == "answered"
        assert (await desk.get(f"/threads/{asked.thread_id}"))["interrupts"] == {}
        path = f"/threads/{asked.thread_id}/runs/wait"
        assert (await desk.post(path, assistant_id=graph, input=None))["decisions"] == [used]
    else:
        done = await desk.join(asked.thread_id, later.json()["run_id"])
        assert done["decisions"] == ["no"]


@pytest.mark.parametrize("by", ["value", "id"])
@pytest.mark.parametrize("graph", USED_OUT_OF_SIGHT)
async def test_a_rolled_back_answer_is_not_used(desk: Desk, graph: str, by: str) -> None:
    asked = await desk.ask(graph)
    await stop_after_use(desk, asked, graph, "rollback", by)
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}
    assert await decided(desk, asked, resume(asked, "no", by), assistant_id=graph) == ["no"]


async def stop_after_use(desk: Desk, asked: Asked, graph: str, how: str, by: str, **body: Any) -> str:
    """Answer, and let the run that does so end after something has used the answer."""
    answer = f"yes {next(names)}, {'raise' if how == 'error' else 'hang'}"
    body |= {"assistant_id": graph, "stream_mode": "custom", "stream_subgraphs": True}
    run = await desk.answer(asked.thread_id, resume(asked, answer, by), **body)
    if how == "error":
        assert "__error__" in await desk.join(asked.thread_id, run["run_id"])
        return answer
    path = f"/threads/{asked.thread_id}/runs/{run['run_id']}"
    async with desk.client.stream("GET", f"{path}/stream") as response:
        async for line in response.aiter_lines():
            if line.startswith("event: custom"):
                break
    await desk.client.post(f"{path}/cancel", params={"action": how, "wait": "true"})
    return answer


@pytest.mark.parametrize("durability", ["async", "exit"])
@pytest.mark.parametrize("by", ["value", "id"])
@pytest.mark.parametrize("graph", ["decision", "nested_decision"])
async def test_a_retry_goes_on_with_its_own_answer(desk: Desk, graph: str, by: str, durability: str) -> None:
    asked = await desk.ask(graph)
    answer = f"flaky {next(names)}"
    run = await desk.answer(asked.thread_id, resume(asked, answer, by), assistant_id=graph, durability=durability)
    assert (await desk.join(asked.thread_id, run["run_id"]))["decisions"] == [answer]
    [row] = await desk.rows("SELECT retries FROM run WHERE run_id = %(id)s", id=run["run_id"])
    assert row["retries"] == 2
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "answered"}


@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_dead_letter_is_retried_with_its_own_answer(desk: Desk, by: str) -> None:
    asked = await desk.ask("decision")
    answer = f"flakier {next(names)}"
    run = await desk.answer(asked.thread_id, resume(asked, answer, by), assistant_id="decision")
    assert "__error__" in await desk.join(asked.thread_id, run["run_id"])
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}
    retried = await desk.post(f"/dead-letters/{run['run_id']}/retry")
    assert (await desk.join(asked.thread_id, retried["run_id"]))["decisions"] == [answer]
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "answered"}


async def test_a_dead_letter_does_not_answer_what_was_asked_since(desk: Desk) -> None:
    asked = await desk.ask("decision")
    run = await desk.answer(asked.thread_id, f"flakier {next(names)}", assistant_id="decision")
    assert "__error__" in await desk.join(asked.thread_id, run["run_id"])
    await desk.post(f"/threads/{asked.thread_id}/runs/wait", assistant_id="decision", input={"decisions": []})
    await desk.post(f"/dead-letters/{run['run_id']}/retry", 409)
    [question] = await desk.inbox(thread_id=asked.thread_id)
    assert question["interrupt_id"] != asked.ids[0]


async def between_attempts(desk: Desk, run: dict[str, Any]) -> None:
    async def released() -> bool:
        rows = await desk.rows("SELECT status, retries FROM run WHERE run_id = %(id)s", id=run["run_id"])
        return rows == [{"status": "pending", "retries": 1}]

    await until(released, "the run waits for its next attempt")


@pytest.mark.parametrize("how", ["interrupt", "rollback"])
async def test_an_answer_is_cancelled_between_two_attempts(desk: Desk, how: str) -> None:
    asked = await desk.ask("decision")
    run = await desk.answer(asked.thread_id, "later", assistant_id="decision")
    await between_attempts(desk, run)
    await desk.client.post(f"/threads/{asked.thread_id}/runs/{run['run_id']}/cancel", params={"action": how})
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}
    assert await decided(desk, asked, {asked.ids[0]: "no"}, assistant_id="decision") == ["no"]


async def test_a_used_answer_stays_when_a_run_is_cancelled_between_two_attempts(desk: Desk) -> None:
    asked = await desk.ask("decision_pair")
    values = {question["value"]: question["interrupt_id"] for question in await desk.inbox(thread_id=asked.thread_id)}
    answers = {values["left"]: "yes", values["right"]: "later"}
    run = await desk.answer(asked.thread_id, answers, assistant_id="decision_pair")
    await between_attempts(desk, run)
    await desk.client.post(f"/threads/{asked.thread_id}/runs/{run['run_id']}/cancel")
    assert await desk.states(asked.thread_id) == {values["left"]: "answered", values["right"]: "waiting"}
    [[waiting]] = (await desk.get(f"/threads/{asked.thread_id}"))["interrupts"].values()
    assert waiting["id"] == values["right"]
    done = await decided(desk, asked, "no", assistant_id="decision_pair")
    assert sorted(done) == ["left yes", "right no"]


@pytest.mark.parametrize("by", ["value", "id"])
async def test_a_retry_answers_its_own_question_only(desk: Desk, by: str) -> None:
    first = await desk.ask("decisions")
    run = await desk.answer(first.thread_id, resume(first, f"flaky {next(names)}", by), assistant_id="decisions")
    await desk.join(first.thread_id, run["run_id"])
    [question] = await desk.inbox(thread_id=first.thread_id)
    assert question["value"] == "second?"


@pytest.mark.parametrize("by", ["value", "id"])
async def test_an_answer_with_an_update_fails(desk: Desk, by: str) -> None:
    asked = await desk.ask("decision")
    for answer in ("raise", "no"):
        command = {"resume": resume(asked, answer, by), "update": {"decisions": [f"with {answer}"]}}
        run = await desk.post(f"/threads/{asked.thread_id}/runs", assistant_id="decision", command=command)
        done = await desk.join(asked.thread_id, run["run_id"])
    assert done["decisions"] == ["with no", "no"]


@pytest.mark.parametrize("by", ["value", "id"])
async def test_the_journal_refuses_what_the_answer_led_to(desk: Desk, by: str) -> None:
    asked = await desk.ask("too_large")
    run = await desk.answer(asked.thread_id, resume(asked, "too large", by), assistant_id="too_large")
    assert (await desk.join(asked.thread_id, run["run_id"]))["__error__"]["error"] == "JournalFailed"
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}
    [[waiting]] = (await desk.get(f"/threads/{asked.thread_id}"))["interrupts"].values()
    assert waiting["id"] == asked.ids[0]
    assert await decided(desk, asked, resume(asked, "no", by), assistant_id="too_large") == ["no"]


async def test_the_graph_cannot_be_opened_for_an_answer(desk: Desk) -> None:
    asked = await desk.ask("factory")
    broken = {"configurable": {"broken": True}}
    run = await desk.answer(asked.thread_id, "yes", assistant_id="factory", config=broken)
    assert "__error__" in await desk.join(asked.thread_id, run["run_id"])
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}
    assert await decided(desk, asked, "no", assistant_id="factory") == ["no"]


@pytest.mark.parametrize("by", ["value", "id"])
async def test_another_branch_of_the_history_has_its_own_answer(desk: Desk, by: str) -> None:
    asked = await desk.ask("decision")
    checkpoint = (await desk.get(f"/threads/{asked.thread_id}/state"))["checkpoint"]
    assert await decided(desk, asked, resume(asked, "yes", by), assistant_id="decision") == ["yes"]
    place = {"checkpoint": {"checkpoint_id": checkpoint["checkpoint_id"], "checkpoint_ns": ""}}
    assert await decided(desk, asked, resume(asked, "no", by), assistant_id="decision", **place) == ["no"]

"""GET /interrupts, and answers to questions that have a form."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from tests.interrupts.asking import Desk

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIELDS = [{"name": "verdict", "type": "select", "options": ["approve", "reject"], "label": "What now?"}]


async def test_inbox_shows_waiting_interrupts(desk: Desk) -> None:
    terms = {"fields": FIELDS, "deadline": 3600, "default": {"verdict": "reject"}, "amount": 12}
    asked = await desk.ask(input={"terms": terms}, metadata={"team": "ops"})
    [question] = await desk.inbox(thread_id=asked.thread_id)
    assert question["interrupt_id"] == asked.ids[0]
    assert question["value"] == {"question": "Ship it?", **terms}
    assert question["form"] == {"fields": FIELDS}
    assert (question["run_id"], question["graph_id"], question["state"]) == (asked.run_id, "gate", "waiting")
    assert question["deadline_at"] > question["asked_at"]
    assert (question["escalated_at"], question["answered_by"], question["defaulted"]) == (None, None, False)
    assert question["metadata"]["team"] == "ops"


async def test_an_answer_must_fit_the_form(desk: Desk) -> None:
    asked = await desk.ask(input={"terms": {"fields": FIELDS}})
    for resume in ({asked.ids[0]: {"verdict": "maybe"}}, {"verdict": "maybe"}):
        assert "'verdict'" in (await desk.answer(asked.thread_id, resume, 422))["detail"]
    assert "'verdict'" in (await desk.post(f"{asked.path}/resume", 422, answer={}))["detail"]
    assert len(await desk.runs(asked.thread_id)) == 1
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}
    run = await desk.answer(asked.thread_id, {"verdict": "approve"})
    assert (await desk.join(asked.thread_id, run["run_id"]))["answer"] == {"verdict": "approve"}


async def test_filters_and_pages(desk: Desk) -> None:
    tag = str(uuid4())
    asked = [await desk.ask(metadata={"tag": tag, "n": number}) for number in range(3)]
    other = await desk.ask("picky", metadata={"tag": tag})
    mine = f'{{"tag": "{tag}"}}'
    found = await desk.inbox(metadata=mine)
    assert [one["thread_id"] for one in found] == [*(one.thread_id for one in asked), other.thread_id]
    assert [one["thread_id"] for one in await desk.inbox(metadata=mine, order="desc", limit=1)] == [other.thread_id]
    response = await desk.client.get("/interrupts", params={"metadata": mine, "limit": 3})
    assert response.headers["x-pagination-next"] == "3"
    assert len(await desk.inbox(metadata=mine, limit=3, offset=3)) == 1

    async def count(**query: Any) -> int:
        return len(await desk.inbox(metadata=mine, limit=100, **query))

    assert await count(assistant_id=found[0]["assistant_id"]) == 3
    assert (await count(assistant_id="gate"), await count(assistant_id="picky")) == (3, 1), "by the graph's name"
    refused = await desk.client.get("/interrupts", params={"assistant_id": "nonesuch"})
    assert refused.status_code == 422
    assert "'nonesuch' is neither a UUID nor a graph" in refused.json()["detail"]
    assert await count(graph_id="picky") == 1
    assert await count(older_than=3600) == 0
    assert await count(newer_than=3600) == 4
    assert await count(escalated="true") == 0
    assert await count(escalated="false") == 4
    assert await count(run_id=asked[1].run_id) == 1
    run = await desk.answer(asked[0].thread_id, "yes")
    await desk.join(asked[0].thread_id, run["run_id"])
    assert (await count(), await count(state="answered"), await count(state="all")) == (3, 1, 4)


@pytest.mark.parametrize(
    "query",
    [{"metadata": "x"}, {"metadata": "[]"}, {"older_than": "-1"}, {"limit": "0"}, {"state": "x"}, {"thread_id": "x"}],
    ids=["no json", "no object", "negative", "none", "no state", "no uuid"],
)
async def test_odd_filters(desk: Desk, query: dict[str, str]) -> None:
    assert (await desk.client.get("/interrupts", params=query)).status_code == 422


async def test_a_paused_run_holds_no_slot(desk: Desk) -> None:
    """The worker has one; more than one run waits for its answer, and another runs to its end."""
    assert desk.settings.jobs == 1
    waiting = [await desk.ask() for _ in range(2)]
    done = await desk.ask()
    run = await desk.answer(done.thread_id, "yes")
    assert (await desk.join(done.thread_id, run["run_id"]))["done"] == ["review", "work"]
    for asked in waiting:
        assert await desk.states(asked.thread_id) == {asked.ids[0]: "waiting"}


async def test_question_whose_answer_came_too_late_is_closed(idle: Desk) -> None:
    async with idle.worker():
        asked = await idle.ask()
    ahead = await idle.post(f"/threads/{asked.thread_id}/runs", assistant_id="quiet", input={})
    late = await idle.answer(asked.thread_id, "yes")
    assert await idle.states(asked.thread_id) == {asked.ids[0]: "answered"}
    async with idle.worker():
        for run in (ahead, late):
            await idle.join(asked.thread_id, run["run_id"])
    assert await idle.inbox(thread_id=asked.thread_id, state="answered") == []
    [closed] = await idle.inbox(thread_id=asked.thread_id, state="closed")
    assert (closed["state"], closed["answered_by"], closed["answered_at"]) == ("closed", None, None)
    refused = await idle.answer(asked.thread_id, {asked.ids[0]: "yes"}, 409)
    assert (refused["run_id"], "does not wait" in refused["detail"]) == (ahead["run_id"], True)

"""Answers that a worker of an earlier version left behind when its run failed do not win over the next answer."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from tests.interrupts.asking import Asked, Desk

pytestmark = pytest.mark.asyncio(loop_scope="module")

# As those versions wrote them: with the error of the task that had used them, and under the null task when no task had.
LEAVE_WITH_TASK = """
INSERT INTO checkpoint_writes (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
SELECT thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, -4, '__resume__', %(type)s, %(blob)s
FROM checkpoint_writes failed WHERE thread_id = %(thread_id)s AND idx = -1
  AND NOT EXISTS (SELECT 1 FROM checkpoint_writes inner_task
                  WHERE inner_task.thread_id = failed.thread_id AND inner_task.idx = -1
                    AND length(inner_task.checkpoint_ns) > length(failed.checkpoint_ns))
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id, task_id, idx)
DO UPDATE SET type = excluded.type, blob = excluded.blob
RETURNING task_id
"""
LEAVE_ALONE = """
INSERT INTO checkpoint_writes (thread_id, checkpoint_ns, checkpoint_id, task_id, idx, channel, type, blob)
SELECT thread_id, '', max(checkpoint_id), '00000000-0000-0000-0000-000000000000', -4, '__resume__', %(type)s, %(blob)s
FROM checkpoints WHERE thread_id = %(thread_id)s AND checkpoint_ns = '' GROUP BY thread_id
RETURNING task_id
"""


async def leave(desk: Desk, statement: Any, thread_id: str, answer: Any) -> None:
    kind, blob = JsonPlusSerializer().dumps_typed(answer)
    assert await desk.rows(statement, thread_id=thread_id, type=kind, blob=blob)


def resume(asked: Asked, answer: Any, by: str) -> Any:
    return {asked.ids[0]: answer} if by == "id" else answer


async def finish(desk: Desk, thread_id: str, graph: str, answer: Any) -> Any:
    run = await desk.answer(thread_id, answer, assistant_id=graph)
    return await desk.join(thread_id, run["run_id"])


@pytest.mark.parametrize("by", ["value", "id"])
@pytest.mark.parametrize("left", [["raise"], ["raise", "raise"]], ids=["one failed answer", "two failed answers"])
@pytest.mark.parametrize("graph", ["decision", "nested_decision"])
async def test_answer_counts_although_a_failed_one_is_stored(desk: Desk, graph: str, left: list[str], by: str) -> None:
    asked = await desk.ask(graph)
    await finish(desk, asked.thread_id, graph, resume(asked, "raise", by))
    await leave(desk, LEAVE_WITH_TASK, asked.thread_id, left)
    done = await finish(desk, asked.thread_id, graph, resume(asked, "no", by))
    assert done.get("decisions") == ["no"], done
    assert await desk.states(asked.thread_id) == {asked.ids[0]: "answered"}


@pytest.mark.parametrize("by", ["value", "id"])
async def test_earlier_answers_of_the_node_stay(desk: Desk, by: str) -> None:
    first = await desk.ask("decisions")
    await finish(desk, first.thread_id, "decisions", resume(first, "one", by))
    [question] = await desk.inbox(thread_id=first.thread_id)
    second = Asked(first.thread_id, first.run_id, [question["interrupt_id"]])
    await finish(desk, first.thread_id, "decisions", resume(second, "raise", by))
    await leave(desk, LEAVE_WITH_TASK, first.thread_id, ["one", "raise"])
    done = await finish(desk, first.thread_id, "decisions", resume(second, "two", by))
    assert done.get("decisions") == ["one", "two"], done


async def test_answer_that_no_task_has_used_answers_no_later_question(desk: Desk) -> None:
    asked = await desk.ask("decisions")
    await leave(desk, LEAVE_ALONE, asked.thread_id, "stale")
    await finish(desk, asked.thread_id, "decisions", {asked.ids[0]: "one"})
    [question] = await desk.inbox(thread_id=asked.thread_id)
    assert question["value"] == "second?"
    done = await finish(desk, asked.thread_id, "decisions", {question["interrupt_id"]: "two"})
    assert done.get("decisions") == ["one", "two"], done


async def test_run_that_answers_nothing_does_not_use_it(desk: Desk) -> None:
    asked = await desk.ask("decision")
    await finish(desk, asked.thread_id, "decision", "raise")
    await leave(desk, LEAVE_WITH_TASK, asked.thread_id, ["yes"])
    await leave(desk, LEAVE_ALONE, asked.thread_id, "yes")
    await desk.post(f"/threads/{asked.thread_id}/runs/wait", assistant_id="decision", input=None)
    [question] = await desk.inbox(thread_id=asked.thread_id)
    assert question["value"] == "approve?"

"""A run answers a question, is asked the next one, and is stopped before it ends."""

from __future__ import annotations

from uuid import uuid4

import pytest
from langgraph.graph import START, StateGraph

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.states import CancelAction
from tests.gates.decisions import Decisions, ask_once, ask_twice
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.records import post_run, query, run_ended
from tests.support.waiting import until

WAITING = """
SELECT value #>> '{}' AS question, interrupt_id FROM interrupt WHERE settled_at IS NULL AND answered_by IS NULL
"""
STORED_WITH_A_TASK = """
SELECT 1 FROM checkpoint_writes WHERE idx = -4 AND task_id <> '00000000-0000-0000-0000-000000000000'
"""


async def waiting(database: Database) -> dict[str, str]:
    return {row["question"]: row["interrupt_id"] for row in await query(database, WAITING)}


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

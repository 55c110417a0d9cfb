"""Runs that end without a worker, and what their thread asks then."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from langgraph.graph import START, StateGraph
from langgraph.pregel import Pregel

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.dead_letters.graph_gone import end_graphless_runs
from holdfast.engine.reap import release_orphans
from tests.interrupts.decisions import Decisions
from tests.support.records import query

ENDS = ["poison", "cancelled", "graph gone"]
WAITING = """
SELECT value #>> '{}' AS question, interrupt_id FROM interrupt WHERE settled_at IS NULL AND answered_by IS NULL
"""
SHOWN = """
SELECT resting_status, array(SELECT jsonb_path_query(interrupts, '$.*[*].value') #>> '{}') AS questions FROM thread
"""
DUE_LONG_AGO = """
UPDATE run SET ready_at = now() - interval '1 day' WHERE status = 'pending' AND ready_at IS NOT NULL RETURNING 1
"""


def side_by_side(*nodes: Any) -> Pregel[Any, Any, Any, Any]:
    builder = StateGraph(Decisions)
    for node in nodes:
        builder.add_node(node)
        builder.add_edge(START, node.__name__)
    return builder.compile()


async def waiting(database: Database) -> dict[str, str]:
    """The ids of the questions that wait, by what they ask."""
    return {row["question"]: row["interrupt_id"] for row in await query(database, WAITING)}


async def end(database: Database, thread_id: UUID, how: str) -> None:
    """End the thread's run, whose worker is lost or has released it."""
    await release_orphans(database, max_crashes=1 if how == "poison" else 9)
    if how == "cancelled":
        await cancel_runs(database, thread_id, None, "interrupt")
    elif how == "graph gone":
        await query(database, DUE_LONG_AGO)
        assert len(await end_graphless_runs(database, ["graph"], after=1.0, batch=10)) == 1

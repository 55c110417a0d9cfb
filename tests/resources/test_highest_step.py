"""How far the branches of a thread have come."""

from __future__ import annotations

from uuid import UUID, uuid4

from holdfast.db.connect import Database
from holdfast.resources.checkpoints import HIGHEST_STEP, highest_step
from tests.support.records import query

CHECKPOINTS = """
INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint, metadata)
SELECT %s, %s, to_char(number, 'FM0000000'), '{}', jsonb_build_object('step', number %% %s)
FROM generate_series(1, %s) AS number RETURNING 1
"""


async def checkpoints(database: Database, thread_id: UUID, count: int, *, period: int, namespace: str = "") -> None:
    """Branch after branch, each as many steps long as the period."""
    await query(database, CHECKPOINTS, str(thread_id), namespace, period, count)


async def test_highest_step_is_that_of_the_longest_branch(database: Database) -> None:
    thread_id = uuid4()
    assert await highest_step(database, thread_id) is None
    await checkpoints(database, thread_id, 12, period=9)
    await checkpoints(database, thread_id, 50, period=50, namespace="child:1")
    await checkpoints(database, uuid4(), 50, period=50)
    assert await highest_step(database, thread_id) == 8


async def test_highest_step_ignores_a_step_that_is_no_number(database: Database) -> None:
    thread_id = uuid4()
    await checkpoints(database, thread_id, 3, period=9)
    await query(
        database,
        """UPDATE checkpoints SET metadata = '{"step": "last"}' WHERE checkpoint_id = '0000003' RETURNING 1""",
    )
    assert await highest_step(database, thread_id) == 2


async def test_a_long_thread_costs_no_more_than_a_short_one(database: Database) -> None:
    thread_id = uuid4()
    await checkpoints(database, thread_id, 5000, period=5000)
    async with database.connection() as connection:
        await connection.execute("ANALYZE checkpoints")
    statement = HIGHEST_STEP % {"thread_id": f"'{thread_id}'"}
    plan = "\n".join(
        line["QUERY PLAN"] for line in await query(database, f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {statement}")
    )
    assert "Index Scan Backward" in plan, plan
    assert "rows=1000" in plan, plan
    assert "Sort" not in plan, plan

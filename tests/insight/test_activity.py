"""What the fleet has done within the last minute."""

from __future__ import annotations

from holdfast.db.connect import Database
from holdfast.insight.activity import CREATED, FINISHED, WINDOW_SECONDS, recent_activity
from tests.support.records import post_run, query


async def test_runs_that_ended_within_the_minute_are_counted_however_they_ended(database: Database) -> None:
    for _ in range(5):
        await post_run(database, "graph")
    runs = [row["run_id"] for row in await query(database, "SELECT run_id FROM run ORDER BY run_id")]
    end = "UPDATE run SET status = %s, ready_at = NULL, finished_at = now() - %s * interval '1 second', "
    ends = (
        ("first_seq = 1", "success", 1),
        ("first_seq = NULL", "interrupted", 2),  # Cancelled before it began.
        ("dead_letter = 'graph_gone'", "error", 3),
        ("first_seq = 1", "success", 2 * WINDOW_SECONDS),
    )
    for run_id, (how, status, ago) in zip(runs, ends, strict=False):
        await query(database, end + how + " WHERE run_id = %s RETURNING 1", status, ago, run_id)
    async with database.connection() as connection:
        figures = await recent_activity(connection)
    assert figures["finished"] == {"success": 1, "interrupted": 1, "error": 1}
    assert figures["created"] == 5


async def test_activity_statements_use_indexes(database: Database) -> None:
    async with database.transaction() as connection:
        await connection.execute("SET LOCAL enable_seqscan = off")
        plans = []
        for statement in (FINISHED, CREATED):
            cursor = await connection.execute(f"EXPLAIN {statement}".encode(), {"window": WINDOW_SECONDS})
            plans.append("\n".join(row["QUERY PLAN"] for row in await cursor.fetchall()))
    assert all(index in plans[0] for index in ("run_replayable", "run_forgettable", "run_dead_letter"))
    assert "run_recent" in plans[1]
    assert "Seq Scan" not in "".join(plans)

"""What the fleet has done within the last minute, and what it is doing now."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import DictRow

WINDOW_SECONDS = 60
RUNNING_RUNS_SHOWN = 50

# The runs that finished within the window. Each part uses a partial index (`run_replayable`, `run_forgettable` and that
# of the dead letters), so that the cost does not grow with the table.
FINISHED = """
SELECT status, count(*) AS runs,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM finished_at - started_at))::float8 AS median
FROM (
    SELECT status, started_at, finished_at FROM run
    WHERE finished_at > now() - make_interval(secs => %(window)s) AND first_seq IS NOT NULL
    UNION ALL
    SELECT status, started_at, finished_at FROM run
    WHERE finished_at > now() - make_interval(secs => %(window)s) AND first_seq IS NULL AND dead_letter IS NULL
    UNION ALL
    SELECT status, started_at, finished_at FROM run
    WHERE finished_at > now() - make_interval(secs => %(window)s) AND first_seq IS NULL AND dead_letter IS NOT NULL
) AS ended GROUP BY status
"""

# Uses the index `run_recent`. The `created_at` of a scheduled run is when it is due, so it may lie in the future.
CREATED = """
SELECT count(*) AS runs FROM run WHERE created_at > now() - make_interval(secs => %(window)s) AND created_at <= now()
"""

# Uses the index `run_owned`, which holds only running runs.
RUNNING = """
SELECT run_id, thread_id, graph_id, attempt, worker_id,
       extract(epoch FROM now() - started_at)::float8 AS seconds
FROM run WHERE status = 'running' AND worker_id IS NOT NULL ORDER BY started_at, run_id LIMIT %(limit)s
"""


async def recent_activity(connection: AsyncConnection[DictRow]) -> dict[str, Any]:
    """Rates over the last minute, and the runs that started longest ago."""
    ended = await (await connection.execute(FINISHED, {"window": WINDOW_SECONDS})).fetchall()
    created = await (await connection.execute(CREATED, {"window": WINDOW_SECONDS})).fetchone()
    running = await (await connection.execute(RUNNING, {"limit": RUNNING_RUNS_SHOWN})).fetchall()
    assert created is not None
    finished = {row["status"]: row["runs"] for row in ended}
    return {
        "window_seconds": WINDOW_SECONDS,
        "created": created["runs"],
        "finished": finished,
        "created_per_second": created["runs"] / WINDOW_SECONDS,
        "finished_per_second": sum(finished.values()) / WINDOW_SECONDS,
        "median_seconds": {row["status"]: row["median"] for row in ended if row["median"] is not None},
        "running": running,
    }

"""A database with a past: many finished runs, each with everything that a real one leaves behind.

A few runs are executed by a real worker; then their rows are copied, with ids of their own, as often as it takes. So
whatever a finished run leaves is there, however the tables change, and a million of them are there within minutes.
"""

from __future__ import annotations

from typing import Any

from psycopg import Connection
from psycopg.rows import DictRow

# What belongs to a run's thread, and the columns by which it does.
TABLES = ("thread", "run", "event", "checkpoints", "checkpoint_blobs", "checkpoint_writes")
DAYS = 6
"""How far back the copies reach: events are kept for longer, so that nothing of it is swept while it is measured."""
COPIES_AT_A_TIME = 100_000

COLUMNS = """
SELECT column_name, data_type FROM information_schema.columns
WHERE table_schema = current_schema() AND table_name = %s AND is_generated = 'NEVER' ORDER BY ordinal_position
"""
# The first real runs, numbered from 0.
SAMPLE = """
CREATE TEMPORARY TABLE sample AS
SELECT row_number() OVER (ORDER BY created_at, run_id) - 1 AS number, thread_id, run_id, created_at
FROM run WHERE status = 'success'
"""
# One copy for each number, of the samples in turn. Ids are random, as clients' are.
COPIES = """
CREATE TEMPORARY TABLE copy AS
SELECT sample.thread_id, sample.run_id, gen_random_uuid() AS new_thread_id, gen_random_uuid() AS new_run_id,
       now() - interval '10 minutes' - (%(days)s * interval '1 day') * (1 - place::float8 / %(all)s)
           - sample.created_at AS later
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS place
JOIN sample ON sample.number = place %% (SELECT count(*) FROM sample)
"""


def fill(connection: Connection[DictRow], runs: int) -> None:
    """Make the finished runs in the database as many as `runs`; there must be some already, and no unfinished one."""
    connection.execute(SAMPLE)
    connection.execute("ANALYZE sample")
    row = connection.execute("SELECT count(*) AS there FROM sample").fetchone()
    assert row is not None
    there = int(row["there"])
    if there == 0:
        raise RuntimeError("there is no finished run to copy")
    copying = [_copy(connection, table) for table in TABLES]
    for first in range(there, runs, COPIES_AT_A_TIME):
        last = min(first + COPIES_AT_A_TIME, runs) - 1
        with connection.transaction():
            # Checking each row's thread takes most of the time, and it has just been inserted.
            connection.execute("SET LOCAL session_replication_role = replica")
            connection.execute(COPIES, {"first": first, "last": last, "all": runs, "days": DAYS})
            connection.execute("ANALYZE copy")
            for statement in copying:
                connection.execute(statement.encode())
            connection.execute("DROP TABLE copy")
    connection.execute("DROP TABLE sample")
    connection.execute("VACUUM ANALYZE")
    connection.execute("CHECKPOINT")


def _copy(connection: Connection[DictRow], table: str) -> str:
    """The statement that copies a table's rows. Ids are replaced, and moments moved as far as the run's creation."""
    columns: list[dict[str, Any]] = connection.execute(COLUMNS, (table,)).fetchall()
    named = {column["column_name"]: column["data_type"] for column in columns}
    selected = [_value(name, kind) for name, kind in named.items()]
    names = ", ".join(f'"{name}"' for name in named)
    matched = "=" if named["thread_id"] == "uuid" else "::text ="
    return (
        f"INSERT INTO {table} ({names}) SELECT {', '.join(selected)} "
        f"FROM copy JOIN {table} AS old ON copy.thread_id{matched} old.thread_id"
    )


def _value(name: str, kind: str) -> str:
    if name in ("thread_id", "run_id"):
        return f"copy.new_{name}" + ("::text" if kind == "text" else "")
    if kind.startswith("timestamp"):
        return f'old."{name}" + copy.later'
    return f'old."{name}"'

"""Locking the parents of runs that end, and finding those that become ready by it.

A trigger (`0008_children.sql`) makes a waiting parent ready when the last of its children ends, because a run can end
in many ways. Code that ends a run must still keep the order of locks, and announce the parent as ready.

The order of locks is: threads, then runs by id. A parent is locked together with the other runs, not after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

# The `ready_at` of a run that waits for its children. Migration 0008 says why it is not 'infinity'.
NEVER = "'9999-01-01 00:00:00+00'::timestamptz"

LOCK_RUNS = "SELECT run_id FROM run WHERE run_id = ANY(%(run_ids)b::uuid[]) ORDER BY run_id FOR NO KEY UPDATE"

# The unfinished runs of a child's thread, and the parent.
LOCK_FAMILY = """
SELECT run_id FROM run
WHERE run_id IN (SELECT run_id FROM run WHERE thread_id = %(thread_id)s AND status IN ('pending', 'running')
                 UNION ALL SELECT %(parent_run_id)s::uuid)
ORDER BY run_id FOR NO KEY UPDATE
"""

# The parents that may be claimed now. Most were made ready by this transaction.
READY_PARENTS = """
SELECT run_id, graph_id FROM run WHERE run_id = ANY(%(run_ids)s) AND status = 'pending' AND ready_at <= now()
"""


async def lock_with_parents(
    connection: AsyncConnection[DictRow], run_ids: Iterable[UUID], parents: Iterable[UUID | None]
) -> None:
    """Lock runs that may end together with their parents. Does nothing if none has a parent. The caller holds the locks
    of the threads."""
    above = {parent for parent in parents if parent is not None}
    if above:
        await connection.execute(LOCK_RUNS, {"run_ids": sorted({*run_ids, *above})})


async def ready_parents(connection: AsyncConnection[DictRow], parents: Sequence[UUID]) -> list[DictRow]:
    """Those of these parents that no longer wait, after this transaction has ended children of theirs."""
    return await (await connection.execute(READY_PARENTS, {"run_ids": list(parents)})).fetchall()

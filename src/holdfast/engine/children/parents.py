"""The parent of a run that ends, if it has one: it may have waited for just that.

The end of a child, and what it means for its parent, is the database's to notice (`0008_children.sql`): there are many
ways for a run to end. What whoever ends one has to do is keep to the order of locks, and tell the workers.

The order is: threads, then runs by their ids. A parent is one of those runs: it is locked with them, not after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

# The `ready_at` of a run that waits for its children. The migration says why it is no 'infinity'.
NEVER = "'9999-01-01 00:00:00+00'::timestamptz"

LOCK_RUNS = "SELECT run_id FROM run WHERE run_id = ANY(%(run_ids)b::uuid[]) ORDER BY run_id FOR NO KEY UPDATE"

# The unfinished runs of a child's thread and the parent, for whoever knows the thread.
LOCK_FAMILY = """
SELECT run_id FROM run
WHERE run_id IN (SELECT run_id FROM run WHERE thread_id = %(thread_id)s AND status IN ('pending', 'running')
                 UNION ALL SELECT %(parent_run_id)s::uuid)
ORDER BY run_id FOR NO KEY UPDATE
"""

# Those of these parents that may be claimed: woken by this transaction, as a rule.
WOKEN = """
SELECT run_id, graph_id FROM run WHERE run_id = ANY(%(run_ids)s) AND status = 'pending' AND ready_at <= now()
"""


async def lock_with_parents(
    connection: AsyncConnection[DictRow], run_ids: Iterable[UUID], parents: Iterable[UUID | None]
) -> None:
    """Lock runs that may end, with the parents of those that have one, if any has. The threads are locked already."""
    above = {parent for parent in parents if parent is not None}
    if above:
        await connection.execute(LOCK_RUNS, {"run_ids": sorted({*run_ids, *above})})


async def woken(connection: AsyncConnection[DictRow], parents: Sequence[UUID]) -> list[DictRow]:
    """Those of the parents, of children that this transaction has ended, that need not wait any longer."""
    return await (await connection.execute(WOKEN, {"run_ids": list(parents)})).fetchall()

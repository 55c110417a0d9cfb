"""Runs that a worker owns although it does not execute them.

A claim whose answer was lost may have been committed. Its worker lives and renews its lease, so no other process looks
for such a run. The same holds for a run whose end the database refuses.

Locked rows are left out: these statements are executed between two claims, which must not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

FIND_UNEXECUTED = """
SELECT run_id, thread_id FROM run
WHERE worker_id = %(worker_id)s AND status = 'running' AND run_id <> ALL(%(held)s::uuid[]) ORDER BY run_id
"""

_OWNED = """
    SELECT run_id FROM run
    WHERE run_id = ANY(%(run_ids)s) AND worker_id = %(worker_id)s AND status = 'running'
    ORDER BY run_id FOR NO KEY UPDATE SKIP LOCKED
"""

# Nothing has been executed: that costs the run neither its place nor a crash. The fence rises, as whenever a run
# changes hands.
RETURN_UNEXECUTED = f"""
WITH owned AS ({_OWNED})
UPDATE run SET status = 'pending', worker_id = NULL, fence = run.fence + 1, updated_at = now()
FROM owned WHERE run.run_id = owned.run_id
RETURNING run.run_id
"""

# To the reaper these are runs whose worker is gone: it counts a crash, and ends them when they have had MAX_CRASHES. A
# running run has an owner. Each gets another one, or they would count as company in the death of one worker.
DISOWN = f"""
WITH owned AS ({_OWNED})
UPDATE run SET worker_id = gen_random_uuid() FROM owned WHERE run.run_id = owned.run_id
RETURNING run.run_id
"""


async def find_unexecuted(connection: AsyncConnection[DictRow], worker_id: UUID, held: Sequence[UUID]) -> list[DictRow]:
    """The runs this worker owns without knowing it: all but those it holds. Not while it is claiming."""
    return await (await connection.execute(FIND_UNEXECUTED, {"worker_id": worker_id, "held": list(held)})).fetchall()


async def return_unexecuted(
    connection: AsyncConnection[DictRow], worker_id: UUID, run_ids: Sequence[UUID]
) -> list[UUID]:
    """Put runs that this worker has not executed back into the queue. Returns those that were not locked."""
    asked = {"worker_id": worker_id, "run_ids": list(run_ids)}
    return [row["run_id"] for row in await (await connection.execute(RETURN_UNEXECUTED, asked)).fetchall()]


async def disown(connection: AsyncConnection[DictRow], worker_id: UUID, run_ids: Sequence[UUID]) -> list[UUID]:
    """Leave runs that this worker has executed, and cannot end, to the reaper. Returns them without those that somebody
    has locked."""
    asked = {"worker_id": worker_id, "run_ids": list(run_ids)}
    return [row["run_id"] for row in await (await connection.execute(DISOWN, asked)).fetchall()]

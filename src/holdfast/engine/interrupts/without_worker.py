"""Interrupts of runs that end without a worker: poison runs, runs that are cancelled between two attempts, and runs
whose graph is gone.

LangGraph stores an interrupt with its checkpoint at once. It becomes a row when the run ends, because the worker then
asks LangGraph which interrupts wait. These runs have no worker, so the writes of the thread's last checkpoint are read
instead, unless they are encrypted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any
from uuid import UUID

import orjson
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.stored_json import object_fields
from holdfast.engine.interrupts.failed_resumes import reopen_interrupts
from holdfast.engine.interrupts.rows import RunEnd, store_interrupts
from holdfast.streams.serialize import to_json, to_jsonb

# Larger writes are left out, because one duty of the upkeep reads them for all threads.
MAX_WRITE_BYTES = 1024 * 1024

# The write with index -3 has the last interrupts of a task. A task with output (an index of 0 or more) has finished. A
# subgraph stores its interrupts first, and the node around it may never store them. The namespace of a subgraph has the
# ids of the tasks around it, the outermost first, and its checkpoint names the outermost checkpoint under the key "".
# `known`: the interrupts that have a row, and whether they are settled.
FIND_STORED = f"""
SELECT run.thread_id, run.run_id, asked.blob,
       CASE WHEN asked.checkpoint_ns = '' THEN asked.task_id
            ELSE split_part(split_part(asked.checkpoint_ns, '|', 1), ':', 2) END AS task_id, (
           SELECT coalesce(jsonb_object_agg(i.interrupt_id, i.settled_at IS NOT NULL), '{{}}') FROM interrupt i
           WHERE i.thread_id = run.thread_id AND i.asked_at IS NOT NULL
       ) AS known
FROM run
JOIN (checkpoint_writes asked JOIN checkpoints at USING (thread_id, checkpoint_ns, checkpoint_id))
    ON asked.thread_id = run.thread_id::text
WHERE run.run_id = ANY(%(run_ids)s) AND run.fence > 0
  AND asked.idx = -3 AND asked.type = 'msgpack' AND length(asked.blob) <= {MAX_WRITE_BYTES}
  AND asked.checkpoint_id = (SELECT max(checkpoint_id) FROM checkpoints c
                             WHERE c.thread_id = asked.thread_id AND c.checkpoint_ns = asked.checkpoint_ns)
  AND coalesce(at.metadata #>> '{{parents,""}}', at.checkpoint_id) = (
      SELECT max(checkpoint_id) FROM checkpoints c WHERE c.thread_id = asked.thread_id AND c.checkpoint_ns = '')
  AND NOT EXISTS (SELECT 1 FROM checkpoint_writes done
                  WHERE done.thread_id = asked.thread_id AND done.idx >= 0
                    AND (done.checkpoint_ns = asked.checkpoint_ns AND done.checkpoint_id = asked.checkpoint_id
                         AND done.task_id = asked.task_id OR strpos(asked.checkpoint_ns, ':' || done.task_id) > 0))
ORDER BY run.thread_id, run.run_id, 4, asked.checkpoint_ns, asked.task_id
"""

# After a cancelled run the thread waits; after a poison run it has failed, as when a worker ends the run.
SHOW = f"""
UPDATE thread SET interrupts = {object_fields("thread.interrupts")} || %(asked)s::jsonb,
                  resting_status = CASE WHEN run.status = 'interrupted' THEN 'interrupted' ELSE resting_status END
FROM run WHERE run.run_id = %(run_id)s AND thread.thread_id = run.thread_id
"""

_serializer = JsonPlusSerializer(allowed_msgpack_modules=[])


async def update_interrupts_without_worker(
    connection: AsyncConnection[DictRow], thread_ids: Sequence[UUID], run_ids: Sequence[UUID]
) -> None:
    """Change the interrupts of these threads to match the ends of these runs, which this transaction has ended.

    No worker has asked LangGraph what waits. The caller holds the threads' locks.
    """
    await reopen_interrupts(connection, list(thread_ids), list(run_ids))
    await _store_from_checkpoints(connection, run_ids)


async def _store_from_checkpoints(connection: AsyncConnection[DictRow], run_ids: Sequence[UUID]) -> None:
    """Store and show the interrupts of these runs that have not been resumed."""
    found = await (await connection.execute(FIND_STORED, {"run_ids": list(run_ids)})).fetchall()
    for (thread_id, run_id, task_id), rows in groupby(found, key=itemgetter("thread_id", "run_id", "task_id")):
        of_task = list(rows)
        known = of_task[0]["known"]
        asked = {one["id"]: one for row in of_task for one in _interrupts_in(row["blob"])}
        waiting = [one for one in asked.values() if known.get(one["id"]) is not True]
        new = [one for one in waiting if one["id"] not in known]
        if not new:
            continue
        await store_interrupts(connection, RunEnd(thread_id, run_id, False, {task_id: new}))
        shown = to_jsonb(to_json({task_id: waiting}))
        await connection.execute(SHOW, {"run_id": run_id, "asked": shown})


def _interrupts_in(blob: bytes) -> Iterator[dict[str, Any]]:
    """The interrupts in a stored write, as clients see them. Yields nothing if the write cannot be read, so that no
    cancel and no take-over fails because of it."""
    try:
        stored = _serializer.loads_typed(("msgpack", blob))
        interrupts = orjson.loads(to_json(list(stored)))
    except Exception:
        return
    for one in interrupts:
        if isinstance(one, dict) and isinstance(one.get("id"), str):
            yield one

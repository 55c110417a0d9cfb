"""Questions of runs that end without a worker: poison runs, runs that are cancelled between two attempts, and those
whose graph is gone.

A question is stored with its checkpoint as soon as it is asked, and becomes a row when the run ends, by its worker, who
asks LangGraph what waits. These runs have none. What is stored with the thread's last checkpoint tells as much, unless
it is encrypted.
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
from holdfast.engine.interrupts.answering import Gated, ask
from holdfast.engine.interrupts.failed_resumes import give_back
from holdfast.streams.serialize import to_json, to_jsonb

# Larger ones are left out: they are read in a loop that others wait for.
LARGEST_BYTES = 1024 * 1024

# Index -3 has the questions that a task has asked last. One with output, which has an index from 0 on, has finished.
# A graph inside a node stores its questions first, and the node may never come to it. The namespace of such a graph has
# the ids of the tasks that it is inside of, the outermost first, and its checkpoint names the outermost graph's under
# the key "". `known`: the questions that have a row, and whether they are over.
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
  AND asked.idx = -3 AND asked.type = 'msgpack' AND length(asked.blob) <= {LARGEST_BYTES}
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

# A thread whose run was cancelled waits, and that of a poison run failed, as when a worker ends the run.
SHOW = f"""
UPDATE thread SET interrupts = {object_fields("thread.interrupts")} || %(asked)s::jsonb,
                  resting_status = CASE WHEN run.status = 'interrupted' THEN 'interrupted' ELSE resting_status END
FROM run WHERE run.run_id = %(run_id)s AND thread.thread_id = run.thread_id
"""

_serializer = JsonPlusSerializer(allowed_msgpack_modules=[])


async def end_without_worker(
    connection: AsyncConnection[DictRow], thread_ids: Sequence[UUID], run_ids: Sequence[UUID]
) -> None:
    """Bring the questions of these threads up to date with the ends of these runs. They have ended, in this
    transaction, and no worker has said what waits. The caller holds the threads' locks."""
    await give_back(connection, list(thread_ids), list(run_ids))
    await _ask_stored(connection, run_ids)


async def _ask_stored(connection: AsyncConnection[DictRow], run_ids: Sequence[UUID]) -> None:
    """Let the thread ask what these runs have asked and nobody has answered."""
    found = await (await connection.execute(FIND_STORED, {"run_ids": list(run_ids)})).fetchall()
    for (thread_id, run_id, task_id), rows in groupby(found, key=itemgetter("thread_id", "run_id", "task_id")):
        of_task = list(rows)
        known = of_task[0]["known"]
        asked = {one["id"]: one for row in of_task for one in _questions(row["blob"])}
        waiting = [one for one in asked.values() if known.get(one["id"]) is not True]
        new = [one for one in waiting if one["id"] not in known]
        if not new:
            continue
        await ask(connection, Gated(thread_id, run_id, False, {task_id: new}))
        shown = to_jsonb(to_json({task_id: waiting}))
        await connection.execute(SHOW, {"run_id": run_id, "asked": shown})


def _questions(blob: bytes) -> Iterator[dict[str, Any]]:
    """The questions in a stored write, as clients see them. None, if it cannot be read: no cancel and no take-over
    may fail because of it."""
    try:
        stored = _serializer.loads_typed(("msgpack", blob))
        questions = orjson.loads(to_json(list(stored)))
    except Exception:
        return
    for one in questions:
        if isinstance(one, dict) and isinstance(one.get("id"), str):
            yield one

"""Deleting a run together with everything it wrote into the thread's history."""

from __future__ import annotations

from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.engine.interrupts.rows import undo_runs

ERASE_CHECKPOINTS = """
WITH erased AS (
    DELETE FROM checkpoints
    WHERE thread_id = %(thread_id)s::uuid::text AND metadata ->> 'run_id' = ANY(%(run_ids)s::uuid[]::text[])
    RETURNING checkpoint_ns, checkpoint_id
)
DELETE FROM checkpoint_writes w USING erased
WHERE w.thread_id = %(thread_id)s::uuid::text
  AND w.checkpoint_ns = erased.checkpoint_ns AND w.checkpoint_id = erased.checkpoint_id
"""

# A Command writes onto the checkpoint where it is applied: its update, its resume, and the results of the nodes that it
# continued. Those nodes are the ones with an interrupt on that checkpoint (idx -3), unless other runs have resumed all
# of their interrupts. Resumes of a node from before its last interrupt (idx -4) are from earlier runs and stay, unless
# this run has raised an interrupt itself. The interrupt of a run that has not ended is stored there and in no row of
# `interrupt`. A row of `interrupt` names the outermost task. In a subgraph the last interrupt of the task itself
# decides: its writes stay if other runs have resumed it.
# A run that never started wrote nothing; stored writes then belong to the run before it, which may still be running.
# Postgres cannot read JSON that contains a NUL character or a lone surrogate, which an input may contain.
ERASE_COMMAND_WRITES = """
DELETE FROM checkpoint_writes w
WHERE w.thread_id = %(thread_id)s::uuid::text
  AND EXISTS (SELECT 1 FROM run
              CROSS JOIN LATERAL (
                  SELECT regexp_replace(kwargs::text, '\\\\u(0000|d[89a-f][0-9a-f][0-9a-f])', '\\\\u0020', 'gi')::json
                         -> 'command' AS command
              ) AS given
              WHERE run_id = ANY(%(run_ids)s) AND fence > 0
                AND (command ->> 'resume' IS NOT NULL OR command #>> '{}' IS NOT NULL AND progress > 0))
  AND w.checkpoint_id = (SELECT max(checkpoint_id) FROM checkpoints c
                         WHERE c.thread_id = w.thread_id AND c.checkpoint_ns = w.checkpoint_ns)
  AND w.idx <> -3
  AND (w.idx <> -4 OR w.task_id = '00000000-0000-0000-0000-000000000000'
       OR EXISTS (SELECT 1 FROM interrupt i WHERE i.thread_id = %(thread_id)s AND i.run_id = ANY(%(run_ids)s))
       OR NOT EXISTS (SELECT 1 FROM checkpoint_writes last JOIN interrupt i
                          ON position(convert_to(i.interrupt_id, 'UTF8') IN last.blob) > 0
                      WHERE i.thread_id = %(thread_id)s
                        AND last.thread_id = w.thread_id AND last.checkpoint_ns = w.checkpoint_ns
                        AND last.checkpoint_id = w.checkpoint_id AND last.task_id = w.task_id AND last.idx = -3))
  AND NOT (EXISTS (SELECT 1 FROM interrupt i WHERE i.thread_id = %(thread_id)s AND i.task_id = w.task_id)
           AND NOT EXISTS (SELECT 1 FROM interrupt i WHERE i.thread_id = %(thread_id)s AND i.task_id = w.task_id
                             AND (i.settled_at IS NULL OR i.answered_by = ANY(%(run_ids)s)
                                  OR i.closed_by = ANY(%(run_ids)s) OR i.run_id = ANY(%(run_ids)s))))
  AND NOT (w.checkpoint_ns <> '' AND coalesce((
      SELECT bool_and(i.settled_at IS NOT NULL AND i.closed_by IS NULL AND i.answered_by <> ALL(%(run_ids)s)
                      AND i.run_id <> ALL(%(run_ids)s))
      FROM checkpoint_writes asked JOIN interrupt i ON position(convert_to(i.interrupt_id, 'UTF8') IN asked.blob) > 0
      WHERE i.thread_id = %(thread_id)s AND i.asked_at IS NOT NULL
        AND asked.thread_id = w.thread_id AND asked.checkpoint_ns = w.checkpoint_ns
        AND asked.checkpoint_id = w.checkpoint_id AND asked.task_id = w.task_id AND asked.idx = -3), false))
  AND (w.task_id = '00000000-0000-0000-0000-000000000000'
       OR EXISTS (SELECT 1 FROM checkpoint_writes asked
                  WHERE asked.thread_id = w.thread_id AND asked.checkpoint_ns = w.checkpoint_ns
                    AND asked.checkpoint_id = w.checkpoint_id AND asked.task_id = w.task_id AND asked.idx = -3))
"""

ERASE_UNUSED_BLOBS = """
DELETE FROM checkpoint_blobs b
WHERE b.thread_id = %(thread_id)s::uuid::text
  AND NOT EXISTS (SELECT 1 FROM checkpoints c
                  WHERE c.thread_id = b.thread_id AND c.checkpoint_ns = b.checkpoint_ns
                    AND c.checkpoint -> 'channel_versions' ->> b.channel = b.version)
"""

# The events of a deleted run stay for the thread's watchers, and `seq` never goes back.
KEEP_EVENT_NUMBERS = """
UPDATE thread SET last_seq = greatest(last_seq, (SELECT seq FROM event WHERE event.thread_id = %(thread_id)s
                                                 ORDER BY seq DESC LIMIT 1)),
                  undone_at = coalesce(undone_at, now())
WHERE thread_id = %(thread_id)s
"""

ERASE_RUNS = "DELETE FROM run WHERE run_id = ANY(%(run_ids)s)"


async def erase_runs(connection: AsyncConnection[DictRow], thread_id: UUID, run_ids: list[UUID]) -> None:
    """Delete runs and everything they wrote.

    The caller holds the locks of the thread and of the runs. No other process can write for these runs: they are
    pending, or the caller is their worker.
    """
    parameters = {"thread_id": thread_id, "run_ids": run_ids}
    for statement in (ERASE_CHECKPOINTS, ERASE_COMMAND_WRITES, ERASE_UNUSED_BLOBS, KEEP_EVENT_NUMBERS):
        await connection.execute(statement, parameters)
    # After the checkpoint writes: the interrupts decide which of those belong to these runs.
    await undo_runs(connection, thread_id, run_ids)
    await connection.execute(ERASE_RUNS, parameters)

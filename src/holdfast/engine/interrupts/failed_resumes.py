"""Resumes whose runs did not succeed.

A resume that no task has used is deleted, and its interrupt waits again. A used one is kept: another resume would be
accepted and have no effect. The checkpoint tables show which were used. Each statement belongs to the transaction that
ends the runs.
"""

from __future__ import annotations

from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.stored_json import object_fields

# A run, and the dead letters that it retries. The retry has the same Command and meets the same interrupts, but does
# not resume those whose resume the dead letter has already used.
RUN_AND_RETRIED_RUNS = """(
    WITH RECURSIVE tried AS (
        SELECT {run} AS run_id
        UNION SELECT again.retry_of FROM tried JOIN run again USING (run_id) WHERE again.retry_of IS NOT NULL
    ) SELECT run_id FROM tried)
"""

# Delete the resume that LangGraph has stored for a run that did not succeed. LangGraph would prefer it to the next
# resume of the same interrupt, which would be accepted and ignored. A resume is a write of the null task with index -4.
# The other writes of the Command are deleted too, unless a task has finished with them: they would be applied again
# with the next resume. A run that never started wrote nothing; stored writes then belong to the run before it, which
# may still be running.
DELETE_STORED_RESUMES = f"""
DELETE FROM checkpoint_writes w USING run
WHERE run.run_id = ANY(%(run_ids)s) AND run.fence > 0 AND w.thread_id = run.thread_id::text AND w.checkpoint_ns = ''
  AND w.task_id = '00000000-0000-0000-0000-000000000000'
  AND EXISTS (SELECT 1 FROM interrupt i
              WHERE i.thread_id = run.thread_id AND i.answered_by IN {RUN_AND_RETRIED_RUNS.format(run="run.run_id")})
  AND (w.idx = -4 OR run.progress < 2
       AND w.checkpoint_id = (SELECT max(checkpoint_id) FROM checkpoints c
                              WHERE c.thread_id = w.thread_id AND c.checkpoint_ns = '')
       AND NOT EXISTS (SELECT 1 FROM checkpoint_writes asked JOIN checkpoint_writes done
                           USING (thread_id, checkpoint_ns, checkpoint_id, task_id)
                       WHERE asked.thread_id = w.thread_id AND asked.checkpoint_ns = ''
                         AND asked.checkpoint_id = w.checkpoint_id AND asked.idx = -3 AND done.idx >= 0))
"""

# A resume has been used when the interrupted task has finished (its output has an index of 0 or more), or when its
# graph has a later checkpoint. `asked` is the row with the last interrupts of a task (index -3). `found.this`: whether
# the interrupt `i` is among them, found by its id in the stored bytes, which works unless checkpoints are encrypted.
_INTERRUPTS_OF_TASKS = """
    checkpoint_writes asked
    CROSS JOIN LATERAL (SELECT position(convert_to(i.interrupt_id, 'UTF8') IN asked.blob) > 0 AS this) AS found
    WHERE asked.thread_id = i.thread_id::text AND asked.idx = -3
"""
_RESUME_WAS_USED = """
    found.this AND EXISTS (
        SELECT 1 FROM checkpoint_writes done
        WHERE done.thread_id = asked.thread_id AND done.checkpoint_ns = asked.checkpoint_ns
          AND done.checkpoint_id = asked.checkpoint_id AND done.task_id = asked.task_id AND done.idx >= 0)
    OR found.this AND EXISTS (
        SELECT 1 FROM checkpoints later
        WHERE later.thread_id = asked.thread_id AND later.checkpoint_ns = asked.checkpoint_ns
          AND later.checkpoint_id > asked.checkpoint_id)
"""

# Whether a task still has the interrupt. A node with a subgraph stores the subgraph's interrupts when all nodes of the
# subgraph have stopped. If one of them fails, the node's row is outdated or missing, so only the innermost rows count.
# The namespace of a task contains the ids of all tasks around it.
_STILL_WAITS = """
    EXISTS (SELECT 1 FROM checkpoint_writes innermost
            WHERE innermost.thread_id = i.thread_id::text AND innermost.idx = -3
              AND position(convert_to(i.interrupt_id, 'UTF8') IN innermost.blob) > 0
              AND NOT EXISTS (
                  SELECT 1 FROM checkpoint_writes inside
                  WHERE inside.thread_id = innermost.thread_id AND inside.idx = -3
                    AND strpos(inside.checkpoint_ns, ':' || innermost.task_id) > 0
                    AND NOT EXISTS (SELECT 1 FROM checkpoint_writes done
                                    WHERE done.thread_id = inside.thread_id
                                      AND done.checkpoint_ns = inside.checkpoint_ns
                                      AND done.checkpoint_id = inside.checkpoint_id
                                      AND done.task_id = inside.task_id AND done.idx >= 0)
                    AND NOT EXISTS (SELECT 1 FROM checkpoints later
                                    WHERE later.thread_id = inside.thread_id
                                      AND later.checkpoint_ns = inside.checkpoint_ns
                                      AND later.checkpoint_id > inside.checkpoint_id)))
"""

# Free the interrupts of runs that failed and whose state LangGraph was not asked for. By what LangGraph has stored, an
# interrupt is settled when its resume was used, when the outermost graph has continued (the run's progress is 2), or
# when the task has another interrupt since.
REOPEN_INTERRUPTS = f"""
WITH unused AS (
    DELETE FROM interrupt
    WHERE thread_id = ANY(%(thread_ids)s) AND asked_at IS NULL AND answered_by = ANY(%(run_ids)s)
), taken AS (
    SELECT i.thread_id, i.interrupt_id, i.run_id, run.progress = 2 OR EXISTS (
        SELECT 1 FROM {_INTERRUPTS_OF_TASKS} AND (
            {_RESUME_WAS_USED}
            OR asked.type = 'msgpack' AND (found.this OR asked.task_id = i.task_id AND asked.checkpoint_ns = '')
               AND NOT {_STILL_WAITS})
        ) AS over
    FROM interrupt i JOIN run ON run.run_id = i.answered_by
    WHERE i.thread_id = ANY(%(thread_ids)s) AND i.answered_by = ANY(%(run_ids)s)
      AND i.settled_at IS NULL AND i.asked_at IS NOT NULL
)
UPDATE interrupt SET answered_by = CASE WHEN taken.over THEN answered_by END,
                     answered_at = CASE WHEN taken.over THEN answered_at END,
                     settled_at = CASE WHEN taken.over THEN now() END
FROM taken
WHERE interrupt.thread_id = taken.thread_id AND interrupt.interrupt_id = taken.interrupt_id
  AND interrupt.run_id = taken.run_id
"""

# Close the interrupts that such a run has passed, even those that a queued run was going to resume: the outermost graph
# has continued (progress 2), and the interrupt is not in the thread's last checkpoint. Progress alone is not enough,
# because a retried dead letter has progress 2 from the start. The checkpoint of a subgraph names the outermost
# checkpoint under the key "".
CLOSE_PASSED = """
UPDATE interrupt i SET settled_at = now(), closed_by = run.run_id
FROM run
WHERE run.run_id = ANY(%(run_ids)s) AND run.fence > 0 AND run.progress = 2
  AND i.thread_id = run.thread_id AND i.thread_id = ANY(%(thread_ids)s)
  AND i.settled_at IS NULL AND i.answered_by IS DISTINCT FROM run.run_id AND i.asked_at IS NOT NULL
  AND NOT EXISTS (
      SELECT 1 FROM checkpoint_writes asked JOIN checkpoints at USING (thread_id, checkpoint_ns, checkpoint_id)
      WHERE asked.thread_id = i.thread_id::text AND asked.idx = -3
        AND (asked.task_id = i.task_id OR strpos(asked.checkpoint_ns, ':' || i.task_id) > 0)
        AND coalesce(at.metadata #>> '{parents,""}', at.checkpoint_id) = (
            SELECT max(checkpoint_id) FROM checkpoints c
            WHERE c.thread_id = i.thread_id::text AND c.checkpoint_ns = ''))
"""

# A failed run may have used its resume although LangGraph reports that the interrupt waits: LangGraph does not look
# into tasks that a node calls, nor into graphs that a node chooses at run time. Their results are stored, so another
# resume would be accepted and have no effect.
SETTLE_USED = f"""
UPDATE interrupt i SET settled_at = now()
WHERE i.thread_id = ANY(%(thread_ids)s) AND i.answered_by = ANY(%(run_ids)s)
  AND i.settled_at IS NULL AND i.asked_at IS NOT NULL
  AND EXISTS (SELECT 1 FROM {_INTERRUPTS_OF_TASKS} AND ({_RESUME_WAS_USED}))
"""

# Remove settled interrupts from the thread, unless a new interrupt has the same id.
REMOVE_SETTLED = f"""
UPDATE thread SET interrupts = kept.by_task
FROM (
    SELECT asking.thread_id,
           coalesce(jsonb_object_agg(of_task.key, waiting.asked) FILTER (WHERE waiting.asked IS NOT NULL), '{{}}')
               AS by_task
    FROM thread asking
    CROSS JOIN LATERAL jsonb_each({object_fields("asking.interrupts")}) AS of_task
    CROSS JOIN LATERAL (
        SELECT jsonb_agg(one) AS asked
        FROM jsonb_array_elements(CASE jsonb_typeof(of_task.value) WHEN 'array' THEN of_task.value ELSE '[]' END) AS one
        WHERE NOT EXISTS (SELECT 1 FROM interrupt i
                          WHERE i.thread_id = asking.thread_id AND i.interrupt_id = one ->> 'id'
                            AND i.settled_at IS NOT NULL
                            AND (i.closed_by = ANY(%(run_ids)s)
                                 OR i.answered_by IN {RUN_AND_RETRIED_RUNS.format(run="unnest(%(run_ids)s::uuid[])")}))
           OR EXISTS (SELECT 1 FROM interrupt again
                      WHERE again.thread_id = asking.thread_id AND again.interrupt_id = one ->> 'id'
                        AND again.settled_at IS NULL AND again.asked_at IS NOT NULL)
    ) AS waiting
    WHERE asking.thread_id = ANY(%(thread_ids)s) GROUP BY asking.thread_id
) AS kept
WHERE thread.thread_id = kept.thread_id AND thread.interrupts <> kept.by_task
"""

# Delete interrupts that LangGraph still reports at the end of a retry although the dead letter has used their resume.
# Not a condition of the statement that inserts them: that would spoil its plan.
DELETE_REPEATED_INTERRUPTS = f"""
DELETE FROM interrupt i USING run
WHERE run.run_id = ANY(%(run_ids)s) AND run.retry_of IS NOT NULL
  AND i.thread_id = run.thread_id AND i.thread_id = ANY(%(thread_ids)s) AND i.run_id = run.run_id
  AND EXISTS (SELECT 1 FROM interrupt used
              WHERE used.thread_id = i.thread_id AND used.interrupt_id = i.interrupt_id AND used.value = i.value
                AND used.settled_at IS NOT NULL AND used.answered_by IN {RUN_AND_RETRIED_RUNS.format(run="run.run_id")})
"""


async def delete_stored_resumes(connection: AsyncConnection[DictRow], run_ids: list[UUID]) -> None:
    """Delete the resumes of these runs that LangGraph has stored and no task has used."""
    await connection.execute(DELETE_STORED_RESUMES, {"run_ids": run_ids})


async def settle_used_interrupts(
    connection: AsyncConnection[DictRow], thread_ids: list[UUID], run_ids: list[UUID]
) -> None:
    """Settle the interrupts whose resumes these failed runs have used, and remove them from their threads.

    To be called after the ends of the runs were written to the threads.
    """
    parameters = {"thread_ids": thread_ids, "run_ids": run_ids}
    for statement in (SETTLE_USED, REMOVE_SETTLED):
        await connection.execute(statement, parameters)


async def delete_repeated_interrupts(
    connection: AsyncConnection[DictRow], thread_ids: list[UUID], run_ids: list[UUID]
) -> None:
    """Delete the interrupts of these failed runs whose resumes the retried dead letters have used."""
    await connection.execute(DELETE_REPEATED_INTERRUPTS, {"thread_ids": thread_ids, "run_ids": run_ids})


async def reopen_interrupts(connection: AsyncConnection[DictRow], thread_ids: list[UUID], run_ids: list[UUID]) -> None:
    """Let the interrupts that these runs had taken wait again, and delete the stored resumes.

    An interrupt whose resume was used stays resumed, and one that the thread has passed is closed. For every run that
    ends without LangGraph being asked what waits, whether it resumes anything or not.
    """
    parameters = {"thread_ids": thread_ids, "run_ids": run_ids}
    for statement in (DELETE_STORED_RESUMES, REOPEN_INTERRUPTS, CLOSE_PASSED, REMOVE_SETTLED):
        await connection.execute(statement, parameters)

"""Answers of runs that did not succeed. An answer that nothing has used is forgotten, and its question waits again. An
answer that has been used is kept: another one would be accepted and have no effect.

What was used is read from the checkpoint tables. Each statement is part of the transaction that ends the runs.
"""

from __future__ import annotations

from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.stored_json import object_fields

# A run, and the dead letters that it is a retry of. What a letter has used an answer to is not answered by the retry,
# which was given the same Command and finds the same questions.
AND_ITS_LETTERS = """(
    WITH RECURSIVE tried AS (
        SELECT {run} AS run_id
        UNION SELECT again.retry_of FROM tried JOIN run again USING (run_id) WHERE again.retry_of IS NOT NULL
    ) SELECT run_id FROM tried)
"""

# An answer that LangGraph has stored, of a run that ended otherwise than in success. It would win over the next answer
# to the same question, which is accepted and then ignored. The answer is a write of the null task with index -4. What
# else the Command wrote goes too, unless a task has finished with it: it would be applied again with the next answer.
# A run that never started wrote nothing. What is stored is of the run before it, which may be running.
FORGET_ANSWERS = f"""
DELETE FROM checkpoint_writes w USING run
WHERE run.run_id = ANY(%(run_ids)s) AND run.fence > 0 AND w.thread_id = run.thread_id::text AND w.checkpoint_ns = ''
  AND w.task_id = '00000000-0000-0000-0000-000000000000'
  AND EXISTS (SELECT 1 FROM interrupt i
              WHERE i.thread_id = run.thread_id AND i.answered_by IN {AND_ITS_LETTERS.format(run="run.run_id")})
  AND (w.idx = -4 OR run.progress < 2
       AND w.checkpoint_id = (SELECT max(checkpoint_id) FROM checkpoints c
                              WHERE c.thread_id = w.thread_id AND c.checkpoint_ns = '')
       AND NOT EXISTS (SELECT 1 FROM checkpoint_writes asked JOIN checkpoint_writes done
                           USING (thread_id, checkpoint_ns, checkpoint_id, task_id)
                       WHERE asked.thread_id = w.thread_id AND asked.checkpoint_ns = ''
                         AND asked.checkpoint_id = w.checkpoint_id AND asked.idx = -3 AND done.idx >= 0))
"""

# An answer has been used when the task that asked has finished (output has an index from 0 on), or when its graph has
# gone on to another checkpoint. `asked` is a row with the last question of a task (index -3), and `found.this` says
# whether that is the question `i`. A question's id stands in what is stored as it is, unless that is encrypted.
_QUESTIONS_OF_TASKS = """
    checkpoint_writes asked
    CROSS JOIN LATERAL (SELECT position(convert_to(i.interrupt_id, 'UTF8') IN asked.blob) > 0 AS this) AS found
    WHERE asked.thread_id = i.thread_id::text AND asked.idx = -3
"""
_ANSWER_WAS_USED = """
    found.this AND EXISTS (
        SELECT 1 FROM checkpoint_writes done
        WHERE done.thread_id = asked.thread_id AND done.checkpoint_ns = asked.checkpoint_ns
          AND done.checkpoint_id = asked.checkpoint_id AND done.task_id = asked.task_id AND done.idx >= 0)
    OR found.this AND EXISTS (
        SELECT 1 FROM checkpoints later
        WHERE later.thread_id = asked.thread_id AND later.checkpoint_ns = asked.checkpoint_ns
          AND later.checkpoint_id > asked.checkpoint_id)
"""

# Whether a task still asks the question. A node with a graph inside stores the questions of that graph when all its
# nodes have stopped. If one of them fails, the node still has the questions from before, or none. So the innermost rows
# tell. The namespace of a task has the ids of all tasks that it is inside of.
_IS_ASKED = """
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

# The runs that took them came to nothing, and nobody can ask LangGraph what still waits. What it has stored tells: a
# question is over when its answer was used, when the outermost graph has gone on (a run's progress 2), or when the task
# has asked something else since.
GIVE_BACK = f"""
WITH unused AS (
    DELETE FROM interrupt
    WHERE thread_id = ANY(%(thread_ids)s) AND asked_at IS NULL AND answered_by = ANY(%(run_ids)s)
), taken AS (
    SELECT i.thread_id, i.interrupt_id, i.run_id, run.progress = 2 OR EXISTS (
        SELECT 1 FROM {_QUESTIONS_OF_TASKS} AND (
            {_ANSWER_WAS_USED}
            OR asked.type = 'msgpack' AND (found.this OR asked.task_id = i.task_id AND asked.checkpoint_ns = '')
               AND NOT {_IS_ASKED})
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

# What such a run has passed by, also if a run that is queued behind it was to answer that: its outermost graph has gone
# on (progress 2), and the question is not one of the thread's last checkpoint. A retried dead letter has progress 2
# from the beginning, so that alone does not tell. The checkpoint of a graph inside names the outermost one under the
# key "".
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

# A run that did not succeed may have used its answer, although LangGraph says that the question waits: LangGraph looks
# neither into the tasks that a node calls nor into graphs that a node finds at run time. Their results are stored, so
# another answer would be accepted and have no effect.
SETTLE_USED = f"""
UPDATE interrupt i SET settled_at = now()
WHERE i.thread_id = ANY(%(thread_ids)s) AND i.answered_by = ANY(%(run_ids)s)
  AND i.settled_at IS NULL AND i.asked_at IS NOT NULL
  AND EXISTS (SELECT 1 FROM {_QUESTIONS_OF_TASKS} AND ({_ANSWER_WAS_USED}))
"""

# Then the thread does not ask any more what is over, unless that was asked again under the same id.
DROP_ANSWERED = f"""
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
                                 OR i.answered_by IN {AND_ITS_LETTERS.format(run="unnest(%(run_ids)s::uuid[])")}))
           OR EXISTS (SELECT 1 FROM interrupt again
                      WHERE again.thread_id = asking.thread_id AND again.interrupt_id = one ->> 'id'
                        AND again.settled_at IS NULL AND again.asked_at IS NOT NULL)
    ) AS waiting
    WHERE asking.thread_id = ANY(%(thread_ids)s) GROUP BY asking.thread_id
) AS kept
WHERE thread.thread_id = kept.thread_id AND thread.interrupts <> kept.by_task
"""

# What LangGraph still shows at the end of a retry was not asked again if its letter has used an answer to it. As a
# condition of the statement that asks, this would spoil its plan.
UNASK_USED = f"""
DELETE FROM interrupt i USING run
WHERE run.run_id = ANY(%(run_ids)s) AND run.retry_of IS NOT NULL
  AND i.thread_id = run.thread_id AND i.thread_id = ANY(%(thread_ids)s) AND i.run_id = run.run_id
  AND EXISTS (SELECT 1 FROM interrupt used
              WHERE used.thread_id = i.thread_id AND used.interrupt_id = i.interrupt_id AND used.value = i.value
                AND used.settled_at IS NOT NULL AND used.answered_by IN {AND_ITS_LETTERS.format(run="run.run_id")})
"""


async def forget_answers(connection: AsyncConnection[DictRow], run_ids: list[UUID]) -> None:
    """Delete the answers of these runs that LangGraph has stored and no task has taken."""
    await connection.execute(FORGET_ANSWERS, {"run_ids": run_ids})


async def settle_used(connection: AsyncConnection[DictRow], thread_ids: list[UUID], run_ids: list[UUID]) -> None:
    """Close the questions whose answers these runs have used, and take them off their threads. For runs that did not
    succeed, after their end has been written to the threads."""
    parameters = {"thread_ids": thread_ids, "run_ids": run_ids}
    for statement in (SETTLE_USED, DROP_ANSWERED):
        await connection.execute(statement, parameters)


async def unask_used(connection: AsyncConnection[DictRow], thread_ids: list[UUID], run_ids: list[UUID]) -> None:
    """After these runs, which did not succeed, have asked: forget what the letters that they retried have used."""
    await connection.execute(UNASK_USED, {"thread_ids": thread_ids, "run_ids": run_ids})


async def give_back(connection: AsyncConnection[DictRow], thread_ids: list[UUID], run_ids: list[UUID]) -> None:
    """Let the questions wait again that these runs had taken, and forget the answers: the runs came to nothing. A
    question whose answer was used stays answered, and one that the thread has passed by is closed. For all runs that
    end without LangGraph's word, whether they answer anything or not."""
    parameters = {"thread_ids": thread_ids, "run_ids": run_ids}
    for statement in (FORGET_ANSWERS, GIVE_BACK, CLOSE_PASSED, DROP_ANSWERED):
        await connection.execute(statement, parameters)

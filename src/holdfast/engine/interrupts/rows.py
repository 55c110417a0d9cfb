"""The rows of interrupts, kept in step with the ends of runs.

An interrupt is stored as a row by the transaction that ends its run. At the end of a run LangGraph says which
interrupts still wait, and the rows are changed to match: a resumed interrupt is settled, one that the run did not reach
goes on waiting, and one whose resume failed waits again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.engine.interrupts.failed_resumes import (
    delete_repeated_interrupts,
    delete_stored_resumes,
    reopen_interrupts,
    settle_used_interrupts,
)
from holdfast.engine.interrupts.terms import terms_of
from holdfast.streams.serialize import to_json, to_jsonb

# LEAVE, SETTLE and STORE are executed in this order at the end of runs that found, resumed or left interrupts.
#
# First: the interrupts of earlier runs that still wait. A run that ended by itself has used its resume, so an interrupt
# that it leaves under the same id is a new one. A run that failed or was cancelled has not used it.
LEAVE = """
UPDATE interrupt SET left_by = o.run_id,
                     answered_by = CASE WHEN answered_by IS DISTINCT FROM o.run_id THEN answered_by END,
                     answered_at = CASE WHEN answered_by IS DISTINCT FROM o.run_id THEN answered_at END
FROM unnest(%(thread_ids)s::uuid[], %(run_ids)s::uuid[], %(interrupt_ids)s::text[], %(values)s::text[],
            %(successes)s::boolean[]) AS o(thread_id, run_id, interrupt_id, value, success)
WHERE interrupt.thread_id = o.thread_id AND interrupt.interrupt_id = o.interrupt_id
  AND interrupt.settled_at IS NULL AND interrupt.asked_at IS NOT NULL AND interrupt.value = o.value::jsonb
  AND (interrupt.answered_by IS DISTINCT FROM o.run_id OR NOT o.success)
"""

# Second: settle every other open interrupt, and delete the placeholders of the run's resume. An interrupt that the run
# has not resumed itself is closed by it, even if a queued run was going to resume it.
SETTLE = """
WITH ended AS (
    SELECT * FROM unnest(%(thread_ids)s::uuid[], %(run_ids)s::uuid[]) AS o(thread_id, run_id)
), unused AS (
    DELETE FROM interrupt USING ended
    WHERE interrupt.thread_id = ended.thread_id AND asked_at IS NULL AND answered_by = ended.run_id
)
UPDATE interrupt SET settled_at = now(),
                     closed_by = CASE WHEN answered_by IS DISTINCT FROM ended.run_id THEN ended.run_id END
FROM ended
WHERE interrupt.thread_id = ended.thread_id AND settled_at IS NULL AND asked_at IS NOT NULL
  AND left_by IS DISTINCT FROM ended.run_id
"""

# Third: insert the new interrupts, with the resume of a placeholder if there is one. An interrupt that a failed run has
# resumed, and that LangGraph still shows, is not new. A placeholder for the next interrupt takes the interrupts of one
# end of a run, and none of a later end.
STORE = """
INSERT INTO interrupt (thread_id, interrupt_id, run_id, assistant_id, graph_id, task_id, value, form, asked_at,
                       deadline_at, due_at, default_answer, escalation, answered_by, answered_at)
SELECT o.thread_id, o.interrupt_id, o.run_id, run.assistant_id, run.graph_id, o.task_id, o.value::jsonb, o.form::jsonb,
       now(), due.at, CASE WHEN o.default_answer IS NOT NULL OR o.escalation IS NOT NULL THEN due.at END,
       o.default_answer::jsonb, o.escalation::jsonb, early.answered_by, early.answered_at
FROM unnest(%(thread_ids)s::uuid[], %(run_ids)s::uuid[], %(interrupt_ids)s::text[], %(values)s::text[],
            %(task_ids)s::text[], %(forms)s::text[], %(seconds)s::float8[], %(moments)s::timestamptz[],
            %(defaults)s::text[], %(escalations)s::text[], %(successes)s::boolean[])
     AS o(thread_id, run_id, interrupt_id, value, task_id, form, seconds, moment, default_answer, escalation, success)
JOIN run USING (run_id)
CROSS JOIN LATERAL (SELECT coalesce(o.moment, now() + make_interval(secs => o.seconds)) AS at) AS due
LEFT JOIN LATERAL (
    SELECT place.answered_by, place.answered_at FROM interrupt place
    JOIN run answering ON answering.run_id = place.answered_by AND answering.status = 'pending'
    WHERE place.thread_id = o.thread_id AND place.asked_at IS NULL
      AND place.interrupt_id IN ('', o.interrupt_id) AND place.run_id = place.answered_by
      AND NOT (place.interrupt_id = '' AND EXISTS (
          SELECT 1 FROM interrupt given
          WHERE given.thread_id = o.thread_id AND given.answered_by = place.answered_by AND given.asked_at IS NOT NULL))
    ORDER BY place.interrupt_id DESC LIMIT 1
) AS early ON true
WHERE NOT EXISTS (SELECT 1 FROM interrupt known
                  WHERE known.thread_id = o.thread_id AND known.interrupt_id = o.interrupt_id
                    AND (known.settled_at IS NULL AND known.left_by = o.run_id
                         OR known.settled_at IS NOT NULL AND known.answered_by = o.run_id AND NOT o.success
                       AND known.value = o.value::jsonb))
ON CONFLICT (thread_id, interrupt_id, run_id) DO NOTHING
"""

FORGET = "DELETE FROM interrupt WHERE thread_id = %(thread_id)s AND run_id = ANY(%(run_ids)s)"

# Let interrupts wait again whose resume, or whose closing run, is undone; but not if the thread has continued since. An
# interrupt that another run has closed stays closed when its late resume is undone. When the closing run is undone, a
# queued resume keeps its interrupt. An interrupt from before an edit of the state stays settled.
REOPEN = """
UPDATE interrupt i SET closed_by = NULL, settled_at = NULL, (answered_by, answered_at) = (
    SELECT run.run_id, i.answered_at FROM run
    WHERE run.run_id = i.answered_by AND run.run_id <> ALL(%(run_ids)s) AND run.status IN ('pending', 'running'))
WHERE thread_id = %(thread_id)s
  AND (answered_by = ANY(%(run_ids)s) AND closed_by IS NULL OR closed_by = ANY(%(run_ids)s))
  AND (settled_at IS NULL OR NOT EXISTS (
      SELECT 1 FROM run undone JOIN run later USING (thread_id)
      WHERE undone.run_id = ANY(%(run_ids)s) AND later.run_id <> ALL(%(run_ids)s) AND later.fence > 0
        AND later.created_at > undone.created_at)
    AND NOT EXISTS (
      SELECT 1 FROM checkpoints head
      WHERE head.thread_id = i.thread_id::text AND head.checkpoint_ns = '' AND head.metadata ->> 'source' = 'update'
        AND head.checkpoint_id = (SELECT max(checkpoint_id) FROM checkpoints
                                  WHERE checkpoints.thread_id = i.thread_id::text AND checkpoint_ns = '')
        AND NOT EXISTS (SELECT 1 FROM checkpoint_writes asked
                        WHERE asked.thread_id = head.thread_id AND asked.checkpoint_ns = ''
                          AND asked.checkpoint_id = head.checkpoint_id AND asked.task_id = i.task_id
                          AND asked.idx = -3)))
"""

# Show the open interrupts on the thread again after the run that had resumed them was deleted.
RESTORE_THREAD = """
UPDATE thread SET interrupts = waiting.by_task, resting_status = 'interrupted',
                  status = CASE WHEN thread.status = 'busy' THEN 'busy' ELSE 'interrupted' END
FROM (SELECT jsonb_object_agg(coalesce(task_id, ''), asked) AS by_task FROM (
          SELECT task_id, jsonb_agg(jsonb_build_object('id', interrupt_id, 'value', value) ORDER BY asked_at) AS asked
          FROM interrupt WHERE thread_id = %(thread_id)s AND answered_by IS NULL AND settled_at IS NULL
          GROUP BY task_id) AS by_tasks) AS waiting
WHERE thread.thread_id = %(thread_id)s AND waiting.by_task IS NOT NULL
  AND EXISTS (SELECT 1 FROM interrupt i
              WHERE i.thread_id = thread.thread_id AND i.answered_by IS NULL AND i.settled_at IS NULL
                AND NOT jsonb_path_exists(thread.interrupts, '$.*[*] ? (@.id == $id)',
                                          jsonb_build_object('id', i.interrupt_id)))
"""

# Settle the interrupts that an edit of the state has removed from the thread.
CLOSE_MISSING = """
UPDATE interrupt SET settled_at = now() FROM thread
WHERE interrupt.thread_id = %(thread_id)s AND thread.thread_id = interrupt.thread_id
  AND settled_at IS NULL AND answered_by IS NULL
  AND NOT jsonb_path_exists(thread.interrupts, '$.*[*] ? (@.id == $id)', jsonb_build_object('id', interrupt_id))
"""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run that may change interrupts.

    `waiting`: the interrupts that wait now, by task. None: LangGraph could not be asked, and the stored checkpoint
    decides. `branches`: the run resumed at a checkpoint that it named, where its resume stays stored.
    """

    thread_id: UUID
    run_id: UUID
    success: bool
    waiting: Mapping[str, Any] | None
    branches: bool = False


async def update_interrupts(connection: AsyncConnection[DictRow], ends: Sequence[RunEnd]) -> None:
    """Change the rows of interrupts to match the ends of runs, in the transaction that writes those ends.

    Reads nothing, so it can be pipelined.
    """
    undone = [end for end in ends if end.waiting is None]
    settled = [end for end in ends if end.waiting is not None]
    if undone:
        await reopen_interrupts(connection, [end.thread_id for end in undone], [end.run_id for end in undone])
    if leaving := [end.run_id for end in settled if not end.success or end.branches]:
        await delete_stored_resumes(connection, leaving)
    if failed := [end for end in settled if not end.success and end.waiting]:
        await settle_used_interrupts(connection, [end.thread_id for end in failed], [end.run_id for end in failed])
    columns = _interrupt_columns(settled)
    if columns:
        await connection.execute(LEAVE, columns)
    if settled:
        parameters = {"thread_ids": [end.thread_id for end in settled], "run_ids": [end.run_id for end in settled]}
        await connection.execute(SETTLE, parameters)
    if columns:
        await connection.execute(STORE, columns)
    if failed:
        await delete_repeated_interrupts(connection, [end.thread_id for end in failed], [end.run_id for end in failed])


async def store_interrupts(connection: AsyncConnection[DictRow], end: RunEnd) -> None:
    """Insert the interrupts of a run that has ended. Changes no other interrupt of the thread."""
    if columns := _interrupt_columns([end]):
        await connection.execute(STORE, columns)


def _interrupt_columns(ends: Sequence[RunEnd]) -> dict[str, list[Any]]:
    """The waiting interrupts of these ends, as columns. Empty if there are none."""
    rows = [_columns(end, task_id, asked) for end in ends for task_id, asked in _asked(end.waiting or {})]
    names = list(rows[0]) if rows else []
    return {name: [row[name] for row in rows] for name in names}


def _asked(waiting: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for task_id, asked in waiting.items():
        for one in asked:
            if isinstance(one, dict) and isinstance(one.get("id"), str):
                seen.setdefault(one["id"], (task_id, one))
    return list(seen.values())


def _columns(end: RunEnd, task_id: str, asked: dict[str, Any]) -> dict[str, Any]:
    terms = terms_of(asked.get("value"), asked.get("response_schema"))
    return {
        "thread_ids": end.thread_id,
        "run_ids": end.run_id,
        "successes": end.success,
        "interrupt_ids": asked["id"],
        "task_ids": task_id,
        "values": _jsonb(asked.get("value")),
        "forms": None if terms.form is None else _jsonb(terms.form),
        "seconds": terms.deadline if isinstance(terms.deadline, float) else None,
        "moments": None if isinstance(terms.deadline, float) else terms.deadline,
        "defaults": _jsonb(terms.default[0]) if terms.default else None,
        "escalations": None if terms.escalation is None else _jsonb(terms.escalation),
    }


def _jsonb(value: Any) -> str:
    return to_jsonb(to_json(value))


async def undo_runs(connection: AsyncConnection[DictRow], thread_id: UUID, run_ids: list[UUID]) -> None:
    """Delete the interrupts of runs that will be erased, and let the interrupts that they resumed wait again."""
    parameters = {"thread_id": thread_id, "run_ids": run_ids}
    await connection.execute(FORGET, parameters)
    await connection.execute(REOPEN, parameters)


async def restore_thread(connection: AsyncConnection[DictRow], thread_id: UUID) -> None:
    """Show the open interrupts on the thread again, after a run that had ended was deleted."""
    await connection.execute(RESTORE_THREAD, {"thread_id": thread_id})


async def close_missing(connection: AsyncConnection[DictRow], thread_id: UUID) -> None:
    """Settle the interrupts that an update of the state has removed."""
    await connection.execute(CLOSE_MISSING, {"thread_id": thread_id})

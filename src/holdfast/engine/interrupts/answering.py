"""The rows of interrupts, and the one resume that each of them accepts.

An interrupt is stored as a row by the transaction that ends its run. A resume is a run. The transaction that creates it
takes the interrupts it answers, under the thread's lock, so the second of two resumes finds them taken. At the end of a
run LangGraph says which interrupts still wait, and the rows are changed to match: a resumed interrupt is settled, one
that the run did not reach goes on waiting, and one whose resume failed waits again.

A resume may arrive before the interrupt has a row, between the event that shows the interrupt and the end of the run.
It then stores a placeholder (a row without `asked_at`), so that of two such resumes only one is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from uuid import UUID

from langgraph.errors import UnknownInterruptError
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.interrupts.failed_resumes import (
    delete_repeated_interrupts,
    delete_stored_resumes,
    reopen_interrupts,
    settle_used_interrupts,
)
from holdfast.engine.interrupts.resume import Resume, resume_of
from holdfast.engine.interrupts.terms import check_resume, terms_of
from holdfast.errors import AlreadyAnswered, AnswerTooLate, InvalidRequest
from holdfast.streams.serialize import to_json, to_jsonb

# The interrupt id of a placeholder for the next interrupt, whatever its id will be.
NEXT_INTERRUPT = ""
MAX_INTERRUPT_IDS = 10_000

# The rows that decide whether a resume is accepted: all that are not settled, the settled ones with an id that it
# names, and the last settled ones. The thread's own list of interrupts decides where rows are missing, because a
# process of an earlier version, which writes none, ended the run.
FIND = """
SELECT i.interrupt_id, i.run_id, i.left_by, i.form, i.answered_by, i.closed_by, i.asked_at IS NOT NULL AS asked,
       i.settled_at IS NOT NULL AS settled,
       jsonb_path_exists(thread.interrupts, '$.*[*] ? (@.id == $id)', jsonb_build_object('id', i.interrupt_id))
           AS waits_in_thread,
       i.answered_by IS NOT NULL AND EXISTS (
           SELECT 1 FROM run WHERE run.run_id = i.answered_by AND run.status IN ('pending', 'running')) AS in_hand
FROM interrupt i JOIN thread USING (thread_id)
WHERE i.thread_id = %(thread_id)s
  AND (i.settled_at IS NULL OR i.interrupt_id = ANY(%(ids)s) OR i.run_id = %(asker)s
       OR i.settled_at = (SELECT max(settled_at) FROM interrupt last
                          WHERE last.thread_id = i.thread_id
                            AND (last.answered_by IS NOT NULL OR last.closed_by IS NOT NULL)))
ORDER BY i.settled_at NULLS LAST, i.asked_at NULLS LAST
"""

# A thread at a breakpoint may be resumed with a value although it has no interrupt. A thread whose last run was stopped
# after it had used its resume, or had continued without one, is not at a breakpoint: another resume would have no
# effect, or answer the next interrupt. `last_runs`: the runs that resumed and that closed the last settled interrupt.
FIND_THREAD = """
SELECT interrupts <> '{}'::jsonb
    OR EXISTS (SELECT 1 FROM run WHERE run.thread_id = thread.thread_id AND run.status IN ('pending', 'running'))
    OR resting_status = 'interrupted' AND NOT EXISTS (
           SELECT 1 FROM run answering
           WHERE answering.run_id = ANY(%(last_runs)s::uuid[]) AND answering.status <> 'success' AND NOT EXISTS (
               SELECT 1 FROM run later
               WHERE later.thread_id = thread.thread_id AND later.finished_at > answering.finished_at)) AS may_interrupt
FROM thread WHERE thread_id = %(thread_id)s
"""

IS_HEAD = """
SELECT max(checkpoint_id) = %(checkpoint_id)s AS is_head FROM checkpoints
WHERE thread_id = %(thread_id)s::uuid::text AND checkpoint_ns = ''
"""

TAKE = """
UPDATE interrupt SET answered_by = %(run_id)s, answered_at = clock_timestamp(), defaulted = %(defaulted)s,
                     due_at = CASE WHEN %(defaulted)s THEN NULL ELSE due_at END
FROM unnest(%(interrupt_ids)s::text[], %(askers)s::uuid[]) AS taken(interrupt_id, run_id)
WHERE interrupt.thread_id = %(thread_id)s AND interrupt.interrupt_id = taken.interrupt_id
  AND interrupt.run_id = taken.run_id
"""

ADD_PLACEHOLDERS = """
INSERT INTO interrupt (thread_id, interrupt_id, run_id, answered_by, answered_at)
SELECT %(thread_id)s, place, %(run_id)s, %(run_id)s, clock_timestamp() FROM unnest(%(interrupt_ids)s::text[]) AS place
"""

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

# A run closes the interrupts that it passes, even those that a queued run resumes. A resume by value is too late when
# none of its interrupts waits. A resume by id is too late when one of its interrupts is settled: LangGraph may have
# used the same id for another interrupt.
IS_TOO_LATE = """
SELECT CASE WHEN %(by_id)s THEN bool_or(settled_at IS NOT NULL) ELSE bool_and(settled_at IS NOT NULL) END AS too_late
FROM interrupt
WHERE thread_id = %(thread_id)s AND answered_by = %(run_id)s AND asked_at IS NOT NULL
"""

# Give the open interrupts of a failed run to the run that retries it. An interrupt whose resume was used stays with the
# first run, so that undoing the second changes nothing about it.
HAND_OVER = """
UPDATE interrupt SET answered_by = %(run_id)s
WHERE thread_id = %(thread_id)s AND answered_by = %(first)s AND settled_at IS NULL
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


class ResumingRun(Protocol):
    """The attributes of a new run that taking interrupts reads."""

    @property
    def thread_id(self) -> UUID: ...
    @property
    def run_id(self) -> UUID: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    @property
    def answers_run(self) -> UUID | None: ...
    @property
    def by_default(self) -> bool: ...


async def refuse_late_resume(database: Database, thread_id: UUID, run_id: UUID, kwargs: Mapping[str, Any]) -> None:
    """Raise AnswerTooLate at the start of a run whose interrupts no longer wait.

    Without this LangGraph would use the value for the thread's next interrupt. A resume by id with `strict_resume`
    raises LangGraph's own error instead.
    """
    resume = resume_of(kwargs)
    if resume is None or resume.lenient or resume.branches:
        return
    parameters = {"thread_id": thread_id, "run_id": run_id, "by_id": resume.by_id is not None}
    async with database.connection() as connection:
        row = await (await connection.execute(IS_TOO_LATE, parameters)).fetchone()
    if row is None or not row["too_late"]:
        return
    message = "What this run answers does not wait any more: the thread went on while the run was queued."
    if kwargs.get("strict_resume") and resume.by_id is not None:
        raise UnknownInterruptError(message, reason="not_pending", interrupt_ids=list(resume.by_id))
    raise AnswerTooLate(message)


async def hand_over_resumes(connection: AsyncConnection[DictRow], thread_id: UUID, first: UUID, run_id: UUID) -> None:
    """Give the open interrupts of run `first` to the run that retries it. The caller holds the thread's lock."""
    await connection.execute(HAND_OVER, {"thread_id": thread_id, "first": first, "run_id": run_id})


async def take_interrupts(
    connection: AsyncConnection[DictRow], new: ResumingRun, resume: Resume, replaced: Sequence[UUID] = ()
) -> bool:
    """Take the interrupts that a new run resumes. Returns whether it takes any; a lenient resume may take none.

    The caller holds the thread's lock. `replaced`: runs that the new run rolls back; their interrupts are free.

    Raises AlreadyAnswered if another run has taken one of them, and InvalidRequest for a value that does not fit the
    interrupt's form or a resume that names too many ids. The caller must then roll back its transaction.
    """
    ids = [] if resume.by_id is None else list(resume.by_id)
    if len(ids) > MAX_INTERRUPT_IDS and not resume.lenient:
        raise InvalidRequest(
            f"An answer can be for {MAX_INTERRUPT_IDS:,} interrupts at most. This one names {len(ids):,}."
        )
    if resume.branches and await _is_head(connection, new.thread_id, resume):
        resume = replace(resume, checkpoint_id=None)
    parameters = {"thread_id": new.thread_id, "ids": ids, "asker": new.answers_run}
    found = await (await connection.execute(FIND, parameters)).fetchall()
    for row in found:
        row["in_hand"] = row["in_hand"] and row["answered_by"] not in replaced
        row["free"] = (
            row["asked"]
            and not row["settled"]
            and (row["answered_by"] is None or (not row["in_hand"] and row["waits_in_thread"]))
        )
    if new.answers_run is not None:
        _check_asker(found, new.answers_run, ids)
    if resume.by_id is None:
        taken = [row for row in found if row["free"]]
        placeholders = [] if taken or resume.lenient else [NEXT_INTERRUPT]
        if placeholders:
            await _check_may_interrupt(connection, new.thread_id, found, resume)
    else:
        taken, placeholders = _by_id(found, ids, resume)
    for row in taken:
        if row["form"] is not None and not resume.lenient:
            try:
                check_resume(row["form"], resume.to(row["interrupt_id"]))
            except InvalidRequest as refusal:
                raise InvalidRequest(f"interrupt {row['interrupt_id']}: {refusal}") from None
    if taken:
        await connection.execute(
            TAKE,
            {
                "thread_id": new.thread_id,
                "run_id": new.run_id,
                "defaulted": new.by_default,
                "interrupt_ids": [row["interrupt_id"] for row in taken],
                "askers": [row["run_id"] for row in taken],
            },
        )
    if placeholders:
        await connection.execute(
            ADD_PLACEHOLDERS, {"thread_id": new.thread_id, "run_id": new.run_id, "interrupt_ids": placeholders}
        )
    return bool(taken or placeholders)


def _by_id(found: list[DictRow], ids: list[str], resume: Resume) -> tuple[list[DictRow], list[str]]:
    """The rows that a resume by id takes, and the ids that have no row yet."""
    taken: list[DictRow] = []
    placeholders: list[str] = []
    by_id = _grouped(found)
    placeholder = _open_placeholder(found)
    for interrupt_id in ids:
        known = by_id.get(interrupt_id, [])
        free = next((row for row in known if row["free"]), None)
        held = next((row for row in known if row["in_hand"]), None)
        if free is not None:
            taken.append(free)
        elif resume.lenient:
            continue
        elif held is not None:
            raise _taken(held)
        elif known and not known[-1]["waits_in_thread"] and not resume.branches:
            raise _taken(known[-1])
        elif placeholder is not None and not (known and resume.branches):
            raise _taken(placeholder)
        else:
            placeholders.append(interrupt_id)
    return taken, placeholders


def _grouped(found: list[DictRow]) -> dict[str, list[DictRow]]:
    by_id: dict[str, list[DictRow]] = {}
    for row in found:
        by_id.setdefault(row["interrupt_id"], []).append(row)
    return by_id


def _open_placeholder(found: list[DictRow]) -> DictRow | None:
    """The placeholder for the next interrupt, unless that interrupt has arrived."""
    given = {row["answered_by"] for row in found if row["asked"]}
    return next(
        (
            row
            for row in found
            if row["interrupt_id"] == NEXT_INTERRUPT and row["in_hand"] and row["answered_by"] not in given
        ),
        None,
    )


async def _is_head(connection: AsyncConnection[DictRow], thread_id: UUID, resume: Resume) -> bool:
    """Whether the checkpoint that the resume names is the thread's latest. Starting there is no branch."""
    parameters = {"thread_id": thread_id, "checkpoint_id": resume.checkpoint_id}
    row = await (await connection.execute(IS_HEAD, parameters)).fetchone()
    return row is not None and bool(row["is_head"])


async def _check_may_interrupt(
    connection: AsyncConnection[DictRow], thread_id: UUID, found: list[DictRow], resume: Resume
) -> None:
    """Check a resume by value when no interrupt waits.

    It is accepted if a run under way may still produce one, or if the thread is at a breakpoint. Otherwise the resume
    is too late.
    """
    held = next((row for row in found if row["in_hand"]), None)
    if held is not None:
        raise _taken(held)
    over = [row for row in found if row["settled"] and (row["answered_by"] or row["closed_by"])]
    last_runs = [over[-1][column] for column in ("answered_by", "closed_by") if over[-1][column]] if over else []
    parameters = {"thread_id": thread_id, "last_runs": last_runs}
    thread = await (await connection.execute(FIND_THREAD, parameters)).fetchone()
    if over and thread is not None and not thread["may_interrupt"] and not resume.branches:
        raise _taken(over[-1])


def _check_asker(found: list[DictRow], asker: UUID, ids: list[str]) -> None:
    """Check that run `asker` has these interrupts. A later run may have another interrupt with the same id."""
    by_id = _grouped(found)
    for interrupt_id in ids:
        mine = [row for row in by_id.get(interrupt_id, []) if asker in (row["run_id"], row["left_by"])]
        if not mine:
            raise InvalidRequest(f"Run {asker} has not asked interrupt {interrupt_id}.")
        if not any(row["free"] for row in mine):
            raise _taken(mine[-1])


def _taken(row: DictRow) -> AlreadyAnswered:
    interrupt_id = row["interrupt_id"] or None
    if row["answered_by"] is not None and row["closed_by"] is None:
        what = "The thread's question" if interrupt_id is None else f"Interrupt {interrupt_id}"
        message = f"{what} has been answered already, by run {row['answered_by']}."
        return AlreadyAnswered(message, run_id=row["answered_by"], interrupt_id=interrupt_id)
    message = f"Interrupt {interrupt_id} does not wait for an answer any more: the thread has gone on without one."
    return AlreadyAnswered(message, run_id=row["closed_by"], interrupt_id=interrupt_id)


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

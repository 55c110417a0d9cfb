"""Accepting a resume: of two resumes of one interrupt only the first is accepted.

A resume is a run. The transaction that creates it takes the interrupts it resumes, under the thread's lock, so the
second of two resumes finds them taken.

A resume may arrive before the interrupt has a row, between the event that shows the interrupt and the end of the run.
It then stores a placeholder (a row without `asked_at`), so that of two such resumes only one is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol
from uuid import UUID

from langgraph.errors import UnknownInterruptError
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.interrupts.resume import Resume, resume_of
from holdfast.engine.interrupts.terms import check_resume
from holdfast.errors import AlreadyAnswered, AnswerTooLate, InvalidRequest

# The interrupt id of a placeholder for the next interrupt, whose id is not known yet.
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

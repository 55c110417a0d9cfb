"""Human gates: who answers what a run asked, once.

A question is a row, written in the transaction that ends the run which asked. An answer is a run; creating it takes the
questions it answers, under the thread's lock and in the same transaction, so of two answers one finds them taken. What
LangGraph says still waits at the end of a run is the truth, and the rows follow it: a question that the run answered is
settled, one that it left goes on waiting, and one whose answer failed waits again.

An answer may come before its question is written, in the moment between the event that shows it and the run's end. It
keeps the place (a row without `asked_at`): of two such answers, too, one is accepted.
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
from holdfast.engine.interrupts.failed_resumes import forget_answers, give_back, settle_used, unask_used
from holdfast.engine.interrupts.resume import Answer, answer_of
from holdfast.engine.interrupts.terms import check_answer, terms_of
from holdfast.errors import AlreadyAnswered, AnswerTooLate, InvalidRequest
from holdfast.streams.serialize import to_json, to_jsonb

# The id of the place that an answer to whatever is asked next keeps.
ANYTHING = ""
MOST_IDS = 10_000

# What an answer may find: everything that is not over, and of the ids it names and of the rest the latest that is. The
# thread's own list of interrupts says what waits when the rows do not know, because a process of an earlier version,
# which has none, ended a run.
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

# A thread that rests at a breakpoint may be resumed by a value, although it asks nothing. A thread whose last run was
# stopped after it had used its answer, or had gone on without one, is not at a breakpoint: another answer would have no
# effect, or answer what is asked next. `last_runs`: who answered and who closed the last question that is over.
FIND_THREAD = """
SELECT interrupts <> '{}'::jsonb
    OR EXISTS (SELECT 1 FROM run WHERE run.thread_id = thread.thread_id AND run.status IN ('pending', 'running'))
    OR resting_status = 'interrupted' AND NOT EXISTS (
           SELECT 1 FROM run answering
           WHERE answering.run_id = ANY(%(last_runs)s::uuid[]) AND answering.status <> 'success' AND NOT EXISTS (
               SELECT 1 FROM run later
               WHERE later.thread_id = thread.thread_id AND later.finished_at > answering.finished_at)) AS may_ask
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

KEEP_PLACES = """
INSERT INTO interrupt (thread_id, interrupt_id, run_id, answered_by, answered_at)
SELECT %(thread_id)s, place, %(run_id)s, %(run_id)s, clock_timestamp() FROM unnest(%(interrupt_ids)s::text[]) AS place
"""

# Three statements at the end of runs that found a question, answered one or leave one, in this order. First: what was
# asked before and still waits. The answer of a run that came to its own end was used, so what it leaves under that id
# is another question; the answer of one that failed or was cancelled was not.
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

# Second: whatever else was open is over, and so are the places that the run's answers kept. What the run has not
# answered itself it has closed, also if a run that is queued behind it was to answer that.
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

# Third: what is new, which somebody may have answered already. A question that a failed run has answered, and that
# LangGraph still shows, is not new. A place for whatever is asked next is for the questions of one end: a run that has
# been given some gets none that is asked later.
ASK = """
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

# A run closes what it passes by, also if one that is queued behind it answers that. A value is too late when nothing
# waits any more of what it was for. An answer by id is when one of its questions is over: LangGraph may have asked
# something else under the same id.
IS_TOO_LATE = """
SELECT CASE WHEN %(by_id)s THEN bool_or(settled_at IS NOT NULL) ELSE bool_and(settled_at IS NOT NULL) END AS too_late
FROM interrupt
WHERE thread_id = %(thread_id)s AND answered_by = %(run_id)s AND asked_at IS NOT NULL
"""

# To the run that tries again what the first could not finish. An answer that the first has used stays the first's:
# nothing of it is undone when the second is.
HAND_OVER = """
UPDATE interrupt SET answered_by = %(run_id)s
WHERE thread_id = %(thread_id)s AND answered_by = %(first)s AND settled_at IS NULL
"""

FORGET = "DELETE FROM interrupt WHERE thread_id = %(thread_id)s AND run_id = ANY(%(run_ids)s)"

# Unless the thread has gone on since: then nobody waits there any more, whatever is deleted of its past. A question
# that another run has closed stays closed when its late answer is undone. When the run that closed it is undone, the
# answer that is still to be given keeps it. A question that was asked before somebody edited the state is over as well.
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

# A run that has ended told its thread so. When it is deleted, the thread waits as it did before.
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

# After somebody has changed the state by hand.
CLOSE_MISSING = """
UPDATE interrupt SET settled_at = now() FROM thread
WHERE interrupt.thread_id = %(thread_id)s AND thread.thread_id = interrupt.thread_id
  AND settled_at IS NULL AND answered_by IS NULL
  AND NOT jsonb_path_exists(thread.interrupts, '$.*[*] ? (@.id == $id)', jsonb_build_object('id', interrupt_id))
"""


class AnsweringRun(Protocol):
    """What taking questions needs to know of a new run."""

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


async def check_not_too_late(database: Database, thread_id: UUID, run_id: UUID, kwargs: Mapping[str, Any]) -> None:
    """Raise AnswerTooLate for a run that begins, if what it answers does not wait any more. LangGraph would give the
    answer to the thread's next question. An answer by id with `strict_resume` raises LangGraph's own error for it."""
    answer = answer_of(kwargs)
    if answer is None or answer.lenient or answer.branches:
        return
    parameters = {"thread_id": thread_id, "run_id": run_id, "by_id": answer.by_id is not None}
    async with database.connection() as connection:
        row = await (await connection.execute(IS_TOO_LATE, parameters)).fetchone()
    if row is None or not row["too_late"]:
        return
    message = "What this run answers does not wait any more: the thread went on while the run was queued."
    if kwargs.get("strict_resume") and answer.by_id is not None:
        raise UnknownInterruptError(message, reason="not_pending", interrupt_ids=list(answer.by_id))
    raise AnswerTooLate(message)


async def repeat_answers(connection: AsyncConnection[DictRow], thread_id: UUID, first: UUID, run_id: UUID) -> None:
    """What one run has answered, another answers in its stead. The caller holds the thread's lock."""
    await connection.execute(HAND_OVER, {"thread_id": thread_id, "first": first, "run_id": run_id})


async def take_questions(
    connection: AsyncConnection[DictRow], new: AnsweringRun, answer: Answer, replaced: Sequence[UUID] = ()
) -> bool:
    """Let a run that is being created answer what it answers. Returns whether it answers anything, which a lenient one
    may not. The caller holds the thread's lock. `replaced`: runs that are rolled back in its favour; what they took is
    free.

    Raises AlreadyAnswered when somebody else did so first, and InvalidRequest for an answer that does not fit the
    question's form or names too many; the caller's transaction must be rolled back then.
    """
    ids = [] if answer.by_id is None else list(answer.by_id)
    if len(ids) > MOST_IDS and not answer.lenient:
        raise InvalidRequest(f"An answer can be for {MOST_IDS:,} interrupts at most. This one names {len(ids):,}.")
    if answer.branches and await _is_head(connection, new.thread_id, answer):
        answer = replace(answer, checkpoint_id=None)
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
    if answer.by_id is None:
        taken = [row for row in found if row["free"]]
        places = [] if taken or answer.lenient else [ANYTHING]
        if places:
            await _check_may_ask(connection, new.thread_id, found, answer)
    else:
        taken, places = _by_id(found, ids, answer)
    for row in taken:
        if row["form"] is not None and not answer.lenient:
            try:
                check_answer(row["form"], answer.to(row["interrupt_id"]))
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
    if places:
        await connection.execute(
            KEEP_PLACES, {"thread_id": new.thread_id, "run_id": new.run_id, "interrupt_ids": places}
        )
    return bool(taken or places)


def _by_id(found: list[DictRow], ids: list[str], answer: Answer) -> tuple[list[DictRow], list[str]]:
    """The questions that the ids take, and the ids that no question is there for yet."""
    taken: list[DictRow] = []
    places: list[str] = []
    by_id = _grouped(found)
    anything = _unused_place(found)
    for interrupt_id in ids:
        known = by_id.get(interrupt_id, [])
        free = next((row for row in known if row["free"]), None)
        held = next((row for row in known if row["in_hand"]), None)
        if free is not None:
            taken.append(free)
        elif answer.lenient:
            continue
        elif held is not None:
            raise _taken(held)
        elif known and not known[-1]["waits_in_thread"] and not answer.branches:
            raise _taken(known[-1])
        elif anything is not None and not (known and answer.branches):
            raise _taken(anything)
        else:
            places.append(interrupt_id)
    return taken, places


def _grouped(found: list[DictRow]) -> dict[str, list[DictRow]]:
    by_id: dict[str, list[DictRow]] = {}
    for row in found:
        by_id.setdefault(row["interrupt_id"], []).append(row)
    return by_id


def _unused_place(found: list[DictRow]) -> DictRow | None:
    """The place of an answer to whatever is asked next, if that has not been asked."""
    given = {row["answered_by"] for row in found if row["asked"]}
    return next(
        (
            row
            for row in found
            if row["interrupt_id"] == ANYTHING and row["in_hand"] and row["answered_by"] not in given
        ),
        None,
    )


async def _is_head(connection: AsyncConnection[DictRow], thread_id: UUID, answer: Answer) -> bool:
    """Whether the checkpoint that an answer names is where the thread is. Starting there is no branch."""
    parameters = {"thread_id": thread_id, "checkpoint_id": answer.checkpoint_id}
    row = await (await connection.execute(IS_HEAD, parameters)).fetchone()
    return row is not None and bool(row["is_head"])


async def _check_may_ask(
    connection: AsyncConnection[DictRow], thread_id: UUID, found: list[DictRow], answer: Answer
) -> None:
    """An answer to nothing in particular, when no question waits: either one is still to be asked, by a run that is
    under way, or a breakpoint waits that has none; or the answer comes too late."""
    held = next((row for row in found if row["in_hand"]), None)
    if held is not None:
        raise _taken(held)
    over = [row for row in found if row["settled"] and (row["answered_by"] or row["closed_by"])]
    last_runs = [over[-1][column] for column in ("answered_by", "closed_by") if over[-1][column]] if over else []
    parameters = {"thread_id": thread_id, "last_runs": last_runs}
    thread = await (await connection.execute(FIND_THREAD, parameters)).fetchone()
    if over and thread is not None and not thread["may_ask"] and not answer.branches:
        raise _taken(over[-1])


def _check_asker(found: list[DictRow], asker: UUID, ids: list[str]) -> None:
    """Of a run's own questions only: what another has asked since under the same id is not what was answered."""
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
class Gated:
    """The end of a run that has to do with questions. `waiting` is what the thread waits for now, by task; None: that
    is not known, and what is stored decides. `branches`: the run answered at a checkpoint that it names, where its
    answer is stored longer."""

    thread_id: UUID
    run_id: UUID
    success: bool
    waiting: Mapping[str, Any] | None
    branches: bool = False


async def follow_ends(connection: AsyncConnection[DictRow], ends: Sequence[Gated]) -> None:
    """Bring the questions up to date with the ends of runs, in the transaction that writes those. Reads nothing, so
    that it can be pipelined."""
    undone = [end for end in ends if end.waiting is None]
    settled = [end for end in ends if end.waiting is not None]
    if undone:
        await give_back(connection, [end.thread_id for end in undone], [end.run_id for end in undone])
    if leaving := [end.run_id for end in settled if not end.success or end.branches]:
        await forget_answers(connection, leaving)
    if failed := [end for end in settled if not end.success and end.waiting]:
        await settle_used(connection, [end.thread_id for end in failed], [end.run_id for end in failed])
    columns = _questions(settled)
    if columns:
        await connection.execute(LEAVE, columns)
    if settled:
        parameters = {"thread_ids": [end.thread_id for end in settled], "run_ids": [end.run_id for end in settled]}
        await connection.execute(SETTLE, parameters)
    if columns:
        await connection.execute(ASK, columns)
    if failed:
        await unask_used(connection, [end.thread_id for end in failed], [end.run_id for end in failed])


async def ask(connection: AsyncConnection[DictRow], end: Gated) -> None:
    """Let a run that has ended ask what it waits for, beside what the thread asks already."""
    if columns := _questions([end]):
        await connection.execute(ASK, columns)


def _questions(ends: Sequence[Gated]) -> dict[str, list[Any]]:
    """What waits at these ends, in columns. Empty if nothing does."""
    questions = [_columns(end, task_id, asked) for end in ends for task_id, asked in _asked(end.waiting or {})]
    names = list(questions[0]) if questions else []
    return {name: [question[name] for question in questions] for name in names}


def _asked(waiting: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for task_id, asked in waiting.items():
        for one in asked:
            if isinstance(one, dict) and isinstance(one.get("id"), str):
                seen.setdefault(one["id"], (task_id, one))
    return list(seen.values())


def _columns(end: Gated, task_id: str, asked: dict[str, Any]) -> dict[str, Any]:
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
    """Before runs are erased: what they asked was never asked, and what they answered waits again."""
    parameters = {"thread_id": thread_id, "run_ids": run_ids}
    await connection.execute(FORGET, parameters)
    await connection.execute(REOPEN, parameters)


async def restore_thread(connection: AsyncConnection[DictRow], thread_id: UUID) -> None:
    """After a run that had ended was deleted: let the thread say again what waits."""
    await connection.execute(RESTORE_THREAD, {"thread_id": thread_id})


async def close_missing(connection: AsyncConnection[DictRow], thread_id: UUID) -> None:
    """After an update of the state: nobody waits for what the thread does not ask any more."""
    await connection.execute(CLOSE_MISSING, {"thread_id": thread_id})

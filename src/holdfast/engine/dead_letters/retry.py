"""Retrying a dead letter: the transaction that settles it creates a new run in the same thread.

It is a new run because terminal states are final: clients that saw the run fail, read its stream to the end or received
its webhook keep a true result, and can compare it with that of the retry.

A retry from the last checkpoint continues like a run after take-over. It has the same progress, so nothing durable is
applied or executed twice. A retry from the start begins where the failed run began; the checkpoints of the failed run
stay in the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson
from langgraph.checkpoint.base import empty_checkpoint
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.stored_json import as_object
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.engine.budget import share_budget
from holdfast.engine.dead_letters.letters import LINEAGE, settle, settled_already
from holdfast.engine.interrupts.resume import resume_of
from holdfast.engine.interrupts.rows import restore_thread, undo_runs
from holdfast.engine.new_run import CreatedRun, NewRun, RunRequest
from holdfast.engine.queue import LOCK_THREADS
from holdfast.engine.rollback import ERASE_CHECKPOINTS, ERASE_COMMAND_WRITES, ERASE_UNUSED_BLOBS
from holdfast.engine.submit import continue_run, create_run_within
from holdfast.errors import Conflict, NotFound
from holdfast.resources.tenants import Quota

RetryFrom = Literal["checkpoint", "start"]

# The values of `run.progress`, as `execution/starting_point.py` defines them.
NOTHING, COMMAND_WRITES, CHECKPOINT = 0, 1, 2

LOCK_LETTER = """
SELECT run_id, dead_letter, letter_outcome AS state, retried_by, progress, attempt, pots FROM run
WHERE run_id = %(run_id)s AND (dead_letter IS NOT NULL OR settled_letter IS NOT NULL) FOR NO KEY UPDATE
"""

# The thread of a stateless run is hidden when the run has ended, and swept when no dead letter needs it.
SHOW_THREAD = "UPDATE thread SET hidden_at = NULL WHERE thread_id = %(thread_id)s AND hidden_at IS NOT NULL"

# What a retry has to know of the dead letter:
# - `whole`: all runs whose history this run continued still exist.
# - `moved_on`: the thread has later runs, by the database's clock. A thread has one running run at a time.
# - `from_nothing`: the first checkpoint has no parent because the thread was empty, not because the history was pruned.
#   LangGraph counts steps from there. With durability "exit" the first checkpoint is that of the last step, so the
#   presence of earlier runs decides.
# - `answered`: the interrupts that these runs have resumed or were to resume, without those that they raised.
# - `stored`: the writes of the Command are stored on the checkpoint where it was applied.
# - `over`: since this run was created, another run has resumed an interrupt, an edit has closed one, or the thread has
#   passed one that this run was to resume. A resume by value may then fit none that waits now. `created_at` alone does
#   not decide, because for a delayed run it is the time when it is due.
SITUATION = f"""
SELECT own.run_ids, own.whole, first.checkpoint_id AS first_id, first.parent_checkpoint_id AS start_id,
       EXISTS (SELECT 1 FROM checkpoints WHERE checkpoints.thread_id = run.thread_id::text AND checkpoint_ns = ''
                 AND checkpoint_id = first.parent_checkpoint_id) AS has_start,
       (SELECT checkpoint_id FROM checkpoints
        WHERE checkpoints.thread_id = run.thread_id::text AND checkpoint_ns = ''
          AND metadata ->> 'run_id' = ANY(own.run_ids::text[]) ORDER BY checkpoint_id DESC LIMIT 1) AS last_id,
       EXISTS (SELECT 1 FROM run other WHERE other.thread_id = run.thread_id AND other.run_id <> ALL(own.run_ids)
                 AND (other.finished_at IS NULL OR other.started_at >= run.finished_at)) AS moved_on,
       EXISTS (SELECT 1 FROM interrupt i
               WHERE i.thread_id = run.thread_id AND i.settled_at IS NOT NULL
                 AND (i.settled_at >= run.created_at OR i.answered_by = ANY(own.run_ids))
                 AND (i.closed_by <> ALL(own.run_ids)
                      OR i.answered_by IS NULL OR i.answered_by <> ALL(own.run_ids))) AS over,
       first.step IN ('-2', '-1')
       OR %(held)s AND NOT EXISTS (SELECT 1 FROM run other WHERE other.thread_id = run.thread_id
                                     AND other.run_id <> ALL(own.run_ids) AND other.started_at < run.started_at)
           AS from_nothing,
       (SELECT array_agg(DISTINCT i.interrupt_id) FROM interrupt i
        WHERE i.thread_id = run.thread_id AND i.asked_at IS NOT NULL
          AND (i.answered_by = ANY(own.run_ids)
               OR i.answered_by IS NULL AND i.settled_at IS NULL AND i.run_id <> ALL(own.run_ids))) AS answered,
       EXISTS (SELECT 1 FROM checkpoint_writes w
               WHERE w.thread_id = run.thread_id::text AND w.checkpoint_ns = ''
                 AND w.task_id = '00000000-0000-0000-0000-000000000000'
                 AND w.checkpoint_id = coalesce(%(named)s, (
                     SELECT max(checkpoint_id) FROM checkpoints
                     WHERE checkpoints.thread_id = run.thread_id::text AND checkpoint_ns = ''))) AS stored
FROM run
CROSS JOIN LATERAL (
    {LINEAGE.format(run="run")}
    SELECT array_agg(run_id) AS run_ids, bool_or(retry_from IS DISTINCT FROM 'checkpoint') AS whole FROM lineage
) AS own
LEFT JOIN LATERAL (
    SELECT checkpoint_id, parent_checkpoint_id, metadata -> 'step' AS step FROM checkpoints
    WHERE checkpoints.thread_id = run.thread_id::text AND checkpoint_ns = ''
      AND metadata ->> 'run_id' = ANY(own.run_ids::text[]) ORDER BY checkpoint_id LIMIT 1
) AS first ON true
WHERE run.run_id = %(run_id)s
"""

# An empty checkpoint. LangGraph starts from it as in a new thread.
INSERT_EMPTY_CHECKPOINT = """
INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint, metadata)
VALUES (%(thread_id)s::uuid::text, '', %(checkpoint_id)s, %(checkpoint)s::jsonb, %(metadata)s::jsonb)
"""

MARK_RETRY = """
UPDATE run SET retry_of = %(letter_id)s, retry_from = %(retry_from)s, progress = %(progress)s, attempt = %(attempt)s
WHERE run_id = %(run_id)s
"""


@dataclass(frozen=True, kw_only=True)
class RetryOptions:
    """How to retry a dead letter. `kwargs` and `metadata` are those of the failed run, as far as the caller may use
    them.

    `fork`: retry even if the thread has continued since; the state of the retry then becomes the latest. `edited`: the
    caller has changed the kwargs.
    """

    start: bool = False
    fork: bool = False
    edited: bool = False
    kwargs: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    visible: Visibility = EVERYTHING
    # The tenant, and the quota, that the retry counts for.
    tenant_id: str = ""
    quota: Quota | None = None


@dataclass(frozen=True)
class _Start:
    """What the new run starts with."""

    kwargs: dict[str, Any]
    progress: int = NOTHING
    attempt: int = 0


async def retry_letter(database: Database, letter: Mapping[str, Any], retry: RetryOptions) -> CreatedRun:
    """Create the run that retries a dead letter, and settle it. Both are committed when this returns.

    Raises NotFound if there is no such dead letter, and Conflict if it is settled (naming the run that retried it) or
    cannot be retried in this way. Nothing has changed then.
    """
    run_id, thread_id = letter["run_id"], letter["thread_id"]
    async with database.transaction() as connection:
        await connection.execute(LOCK_THREADS, {"thread_ids": [thread_id]})
        locked = await (await connection.execute(LOCK_LETTER, {"run_id": run_id})).fetchone()
        if locked is None:
            raise NotFound("Dead letter", run_id)
        if locked["dead_letter"] is None:
            raise settled_already(locked)
        await connection.execute(SHOW_THREAD, {"thread_id": thread_id})
        request = RunRequest(
            kwargs=retry.kwargs,
            metadata={**retry.metadata, "retry_of": str(run_id)},
            priority=letter["priority"],
            thread_id=thread_id,
            visible=retry.visible,
            tenant_id=retry.tenant_id,
            quota=retry.quota,
            repeats=run_id,
        )
        new = continue_run(request, letter["assistant_id"], letter["graph_id"])
        start = await _start_of(connection, locked, new, retry)
        new = replace(new, kwargs=start.kwargs, answer_applied=start.progress == CHECKPOINT)
        created = await create_run_within(connection, new)
        # What the failed run has used counts for the budget of the retry.
        await share_budget(connection, run_id, locked["pots"], new.kwargs.get("budget"), new.run_id)
        await connection.execute(
            MARK_RETRY,
            {
                "run_id": new.run_id,
                "letter_id": run_id,
                "retry_from": "start" if retry.start else "checkpoint",
                "progress": start.progress,
                "attempt": start.attempt,
            },
        )
        await settle(connection, run_id, "retried", new.run_id)
    created.run["attempt"] = start.attempt
    return created


async def _start_of(connection: AsyncConnection[DictRow], letter: DictRow, new: NewRun, retry: RetryOptions) -> _Start:
    progress, kwargs = letter["progress"], _without_command(retry)
    if progress == NOTHING and resume_of(kwargs) is None:
        # The failed run has stored nothing that could be applied twice.
        return _Start(kwargs)
    named = _configurable(retry.kwargs).get("checkpoint_id")
    parameters = {
        "run_id": letter["run_id"],
        "held": retry.kwargs.get("durability") == "exit",
        "named": str(named) if named else None,
    }
    found = await (await connection.execute(SITUATION, parameters)).fetchone()
    assert found is not None
    if found["moved_on"] and progress == NOTHING:
        raise Conflict(
            f"Thread {new.thread_id} has other runs since run {letter['run_id']} failed, so its answer may be for "
            "another question than what waits now. Answer that with a new run, and discard this letter."
        )
    answer = resume_of(kwargs)
    if found["over"] and answer is not None and answer.by_id is None and progress < CHECKPOINT:
        raise Conflict(
            f"Questions of thread {new.thread_id} are over since run {letter['run_id']} was created, so its answer may "
            "be for another question than what waits now. Answer that with a new run, and discard this letter."
        )
    command = retry.kwargs.get("command") is not None
    if found["moved_on"] and (command or not retry.fork):
        how = "a run that was given a command cannot be forked" if command else "say `fork` to do so all the same"
        raise Conflict(
            f"Thread {new.thread_id} has other runs since run {letter['run_id']} failed. Retrying would take up its "
            f"state from before them: {how}."
        )
    if not retry.start:
        if found["moved_on"]:
            if found["last_id"] is None:
                raise _without_start(letter)
            return _Start({**_forked(retry.kwargs, found["last_id"]), "input": None})
        return _Start(*_continued(retry.kwargs, progress, found), letter["attempt"])
    began = found["has_start"] or (found["start_id"] is None and found["from_nothing"])
    if not found["whole"] or (progress == CHECKPOINT and (found["first_id"] is None or not began)):
        raise _without_start(letter)
    if command or progress < CHECKPOINT:
        # The writes of a Command are stored on the checkpoint where it was applied, so they must be deleted.
        undone = {"thread_id": new.thread_id, "run_ids": found["run_ids"]}
        for statement in (ERASE_CHECKPOINTS, ERASE_COMMAND_WRITES, ERASE_UNUSED_BLOBS):
            await connection.execute(statement, undone)
        # Let the interrupts that the runs had resumed wait again, for the new run to resume.
        await undo_runs(connection, new.thread_id, found["run_ids"])
        await restore_thread(connection, new.thread_id)
        return _Start(_without_command(retry))
    start = found["start_id"] or await _insert_empty_checkpoint(connection, new)
    return _Start(_forked(retry.kwargs, start))


def _without_start(letter: DictRow) -> Conflict:
    return Conflict(
        f"The state that run {letter['run_id']} would begin with is not kept any more, so it cannot be retried like "
        "this. Retry it otherwise, or create a new run."
    )


def _continued(kwargs: dict[str, Any], progress: int, found: DictRow) -> tuple[dict[str, Any], int]:
    """The kwargs and the progress of a run that continues from where the failed run stopped.

    The end of the failed run deleted the writes of its Command unless a task has finished with them; then the Command
    is given again. Its resume is given by id, for the interrupts that it was for: as a value it would resume those that
    the failed run has raised since."""
    command = kwargs.get("command")
    if progress != COMMAND_WRITES or command is None:
        return kwargs, progress
    answer = resume_of(kwargs)
    if answer is not None and answer.by_id is None and found["answered"]:
        command = {**command, "resume": dict.fromkeys(found["answered"], answer.value)}
        kwargs = {**kwargs, "command": command}
    if found["stored"] or not (command.get("update") or command.get("goto")):
        return kwargs, COMMAND_WRITES
    # Not strict: interrupts whose resume the failed run has used do not wait any more.
    return {**kwargs, "strict_resume": False}, NOTHING


def _without_command(retry: RetryOptions) -> dict[str, Any]:
    return {**retry.kwargs, "command": None} if retry.edited else retry.kwargs


def _forked(kwargs: dict[str, Any], checkpoint_id: str) -> dict[str, Any]:
    """The kwargs of a run that starts from a checkpoint of the thread."""
    places = ("checkpoint_id", "checkpoint_map", "checkpoint_ns")
    configurable = {key: value for key, value in _configurable(kwargs).items() if key not in places}
    config: dict[str, Any] = kwargs.get("config") or {}
    return {**kwargs, "config": {**config, "configurable": {**configurable, "checkpoint_id": checkpoint_id}}}


def _configurable(kwargs: dict[str, Any]) -> dict[str, Any]:
    return as_object(as_object(kwargs.get("config")).get("configurable"))


async def _insert_empty_checkpoint(connection: AsyncConnection[DictRow], new: NewRun) -> str:
    """Insert an empty checkpoint for the new run to start from, because the thread had none before the failed run.

    Without it the run would continue from the last checkpoint of the failed run.
    """
    checkpoint = empty_checkpoint()
    about = {
        "source": "fork",
        "step": -2,
        "parents": {},
        "run_id": str(new.run_id),
        "thread_id": str(new.thread_id),
        "graph_id": new.graph_id,
        "assistant_id": str(new.assistant_id),
    }
    parameters = {
        "thread_id": new.thread_id,
        "checkpoint_id": checkpoint["id"],
        "checkpoint": orjson.dumps(checkpoint).decode(),
        "metadata": orjson.dumps(about).decode(),
    }
    await connection.execute(INSERT_EMPTY_CHECKPOINT, parameters)
    return checkpoint["id"]

"""Retrying a dead letter: a new run in the same thread, created by the transaction that closes the letter.

A new run and not the old one again, because terminal states are final: whoever has seen the run fail, watched its
stream to the end or got its webhook was told the truth, and what came of the retry is there to be compared.

From the last checkpoint the new run goes on as one that is taken over does: it has the same progress, so that nothing
is applied or executed again that is durable. From the start it begins where the failed one began, whose checkpoints
stay in the history, beside the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from langgraph.checkpoint.base import empty_checkpoint
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.stored_json import as_object
from holdfast.db.visibility import EVERYTHING, Visibility
from holdfast.engine.budget import share_budget
from holdfast.engine.create import Created, NewRun, create_run_within
from holdfast.engine.dead_letters.letters import LINEAGE, settle, settled_already
from holdfast.engine.interrupts.resume import resume_of
from holdfast.engine.interrupts.rows import restore_thread, undo_runs
from holdfast.engine.queue import LOCK_THREADS
from holdfast.engine.rollback import ERASE_CHECKPOINTS, ERASE_COMMAND_WRITES, ERASE_UNUSED_BLOBS
from holdfast.errors import Conflict, NotFound
from holdfast.resources.tenants import Quota

RetryFrom = Literal["checkpoint", "start"]

# As `execution/starting_point.py` counts.
NOTHING, COMMAND_WRITES, CHECKPOINT = 0, 1, 2

LOCK_LETTER = """
SELECT run_id, dead_letter, letter_outcome AS state, retried_by, progress, attempt, pots FROM run
WHERE run_id = %(run_id)s AND (dead_letter IS NOT NULL OR settled_letter IS NOT NULL) FOR NO KEY UPDATE
"""

# A stateless run's thread is hidden when the run has ended, and swept when no letter needs it.
SHOW_THREAD = "UPDATE thread SET hidden_at = NULL WHERE thread_id = %(thread_id)s AND hidden_at IS NOT NULL"

# `whole`: the runs whose history this one went on in are all there. `moved_on`: others have come after, or will.
# Their order is that of the database's clock, and a thread has one running run at a time. `from_nothing`: the first
# checkpoint has no parent because there was none, and not because the history was pruned. LangGraph counts steps from
# there; with durability "exit" the first checkpoint is the last step's, and only earlier runs tell. `answered`: the
# questions that these runs have answered, or meant to; not those that they asked themselves. `stored`: what a Command
# wrote is there, on the checkpoint that it found. `over`: since this run was created, others have answered a question,
# somebody has closed one by hand, or the thread has passed by one that this run was to answer. A value may then be for
# none of those that wait now. `created_at` alone does not tell: that of a delayed run is when it is due.
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

# The state before there was any. LangGraph starts from it as in a new thread.
PUT_EMPTY = """
INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint, metadata)
VALUES (%(thread_id)s::uuid::text, '', %(checkpoint_id)s, %(checkpoint)s::jsonb, %(metadata)s::jsonb)
"""

MARK_RETRY = """
UPDATE run SET retry_of = %(letter_id)s, retry_from = %(retry_from)s, progress = %(progress)s, attempt = %(attempt)s
WHERE run_id = %(run_id)s
"""


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How a letter is to be retried. `kwargs` and `metadata` are the letter's own, as the caller may use them.
    `fork`: even if the thread has gone on since, whose later state is then not the latest any more. `edited`: the
    kwargs are not the letter's own."""

    start: bool = False
    fork: bool = False
    edited: bool = False
    kwargs: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    visible: Visibility = EVERYTHING
    # Whose the retry is measured as, and by what.
    tenant_id: str = ""
    quota: Quota | None = None


@dataclass(frozen=True)
class _Beginning:
    """What the new run begins with."""

    kwargs: dict[str, Any]
    progress: int = NOTHING
    attempt: int = 0


async def retry_letter(database: Database, letter: Mapping[str, Any], retry: Retry) -> tuple[NewRun, Created]:
    """Create the run that a letter is retried as. When this returns, it is committed, and the letter closed.

    Raises NotFound when there is no such letter, and Conflict when it is closed already, naming the run that it was
    retried as, or cannot be retried like this. Then nothing has changed.
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
        new = NewRun(
            thread_id=thread_id,
            assistant_id=letter["assistant_id"],
            graph_id=letter["graph_id"],
            kwargs=retry.kwargs,
            metadata={**retry.metadata, "retry_of": str(run_id)},
            priority=letter["priority"],
            visible=retry.visible,
            repeats=run_id,
            tenant_id=retry.tenant_id,
            quota=retry.quota,
        )
        beginning = await _beginning(connection, locked, new, retry)
        behind = beginning.progress == CHECKPOINT
        new = NewRun(**{**vars(new), "kwargs": beginning.kwargs, "behind_answers": behind})
        created = await create_run_within(connection, new)
        # What the letter has spent is spent.
        await share_budget(connection, run_id, locked["pots"], new.kwargs.get("budget"), new.run_id)
        await connection.execute(
            MARK_RETRY,
            {
                "run_id": new.run_id,
                "letter_id": run_id,
                "retry_from": "start" if retry.start else "checkpoint",
                "progress": beginning.progress,
                "attempt": beginning.attempt,
            },
        )
        await settle(connection, run_id, "retried", new.run_id)
    created.run["attempt"] = beginning.attempt
    return new, created


async def _beginning(connection: AsyncConnection[DictRow], letter: DictRow, new: NewRun, retry: Retry) -> _Beginning:
    progress, kwargs = letter["progress"], _without_command(retry)
    if progress == NOTHING and resume_of(kwargs) is None:
        # It left nothing that could be applied twice, whatever has happened in the thread since.
        return _Beginning(kwargs)
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
            return _Beginning({**_forked(retry.kwargs, found["last_id"]), "input": None})
        return _Beginning(*_gone_on(retry.kwargs, progress, found), letter["attempt"])
    began = found["has_start"] or (found["start_id"] is None and found["from_nothing"])
    if not found["whole"] or (progress == CHECKPOINT and (found["first_id"] is None or not began)):
        raise _without_start(letter)
    if command or progress < CHECKPOINT:
        # What a Command writes hangs on the checkpoint that it found, and can only be undone.
        undone = {"thread_id": new.thread_id, "run_ids": found["run_ids"]}
        for statement in (ERASE_CHECKPOINTS, ERASE_COMMAND_WRITES, ERASE_UNUSED_BLOBS):
            await connection.execute(statement, undone)
        # The questions that they answered wait again, for the new run to answer them.
        await undo_runs(connection, new.thread_id, found["run_ids"])
        await restore_thread(connection, new.thread_id)
        return _Beginning(_without_command(retry))
    start = found["start_id"] or await _put_empty(connection, new)
    return _Beginning(_forked(retry.kwargs, start))


def _without_start(letter: DictRow) -> Conflict:
    return Conflict(
        f"The state that run {letter['run_id']} would begin with is not kept any more, so it cannot be retried like "
        "this. Retry it otherwise, or create a new run."
    )


def _gone_on(kwargs: dict[str, Any], progress: int, found: DictRow) -> tuple[dict[str, Any], int]:
    """The kwargs and the progress of a run that goes on from where a letter is. The end of a letter deletes what its
    Command had stored, unless a task has finished with it: then the Command is given again. Its answer is for the
    questions that it was for. As a value it would be the answer to what the letter has asked since."""
    command = kwargs.get("command")
    if progress != COMMAND_WRITES or command is None:
        return kwargs, progress
    answer = resume_of(kwargs)
    if answer is not None and answer.by_id is None and found["answered"]:
        command = {**command, "resume": dict.fromkeys(found["answered"], answer.value)}
        kwargs = {**kwargs, "command": command}
    if found["stored"] or not (command.get("update") or command.get("goto")):
        return kwargs, COMMAND_WRITES
    # The letter's questions waited when it answered them. Those that it has used do not wait any more.
    return {**kwargs, "strict_resume": False}, NOTHING


def _without_command(retry: Retry) -> dict[str, Any]:
    return {**retry.kwargs, "command": None} if retry.edited else retry.kwargs


def _forked(kwargs: dict[str, Any], checkpoint_id: str) -> dict[str, Any]:
    """The kwargs of a run that begins at a checkpoint of the thread."""
    places = ("checkpoint_id", "checkpoint_map", "checkpoint_ns")
    configurable = {key: value for key, value in _configurable(kwargs).items() if key not in places}
    config: dict[str, Any] = kwargs.get("config") or {}
    return {**kwargs, "config": {**config, "configurable": {**configurable, "checkpoint_id": checkpoint_id}}}


def _configurable(kwargs: dict[str, Any]) -> dict[str, Any]:
    return as_object(as_object(kwargs.get("config")).get("configurable"))


async def _put_empty(connection: AsyncConnection[DictRow], new: NewRun) -> str:
    """A checkpoint of the new run to begin at when the thread had none: without it, the run would begin with what the
    failed one left."""
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
    await connection.execute(PUT_EMPTY, parameters)
    return checkpoint["id"]

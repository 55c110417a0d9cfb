"""What the multitask strategies and the two ways to cancel do, exactly."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.new_run import NewRun
from holdfast.engine.outcome import Released, RolledBack
from holdfast.engine.reap import release_orphans
from holdfast.engine.submit import create_run
from holdfast.errors import Cancelled, Conflict, NotFound
from holdfast.execution.starting_point import COMMAND_WRITES, NULL_TASK_ID
from holdfast.journal.entries import WritesEntry
from holdfast.journal.run_writer import RunWriter
from holdfast.settings import Settings
from tests.engine.scene import (
    INTERRUPTED,
    SUCCESS,
    checkpoint_ids,
    claim_runs,
    create,
    declare_lost,
    exists,
    online_worker,
    open_journal,
    put_checkpoint,
    unfinished,
    writer_of,
)
from tests.support.records import post_run, query, run_row, thread_events, thread_row

# LangGraph's places for an interrupt and for the answer to one.
INTERRUPT_INDEX, RESUME_INDEX = -3, -4


async def statuses(database: Database, thread_id: UUID) -> list[str]:
    rows = await query(database, "SELECT status FROM run WHERE thread_id = %s ORDER BY created_at, run_id", thread_id)
    return [row["status"] for row in rows]


async def everything(database: Database) -> list[object]:
    return [await query(database, f"SELECT * FROM {table} ORDER BY 1") for table in ("run", "thread")]


def put_writes(writer: RunWriter, checkpoint_id: str, task_id: str, index: int, progress: int = 0) -> None:
    place = (str(writer.thread_id), "", checkpoint_id, task_id, index)
    writer.add_writes(WritesEntry([(place, ("", "channel", "json", b"1"))], replace=False, progress=progress))


async def writes_left(database: Database, thread_id: UUID) -> set[tuple[str, int]]:
    rows = await query(database, "SELECT task_id, idx FROM checkpoint_writes WHERE thread_id = %s", str(thread_id))
    return {(row["task_id"], row["idx"]) for row in rows}


# --- multitask strategies -----------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [False, True])
async def test_reject_changes_nothing(database: Database, claimed: bool) -> None:
    thread_id = uuid4()
    await create(database, thread_id)
    if claimed:
        await claim_runs(database, await online_worker(database))
    before = await everything(database)
    with pytest.raises(Conflict):
        await create(database, thread_id, multitask_strategy="reject")
    assert await everything(database) == before


async def test_a_missing_thread_is_not_made(database: Database) -> None:
    with pytest.raises(NotFound):
        await create_run(database, NewRun(thread_id=uuid4(), assistant_id=UUID(int=1), graph_id="graph", kwargs={}))
    assert await everything(database) == [[], []]


async def test_enqueue_waits_for_the_runs_before_it(database: Database, settings: Settings) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    first = await create(database, thread_id)
    second = await create(database, thread_id, priority=5)
    assert (first.ready, second.ready) == (True, False)
    [run] = await claim_runs(database, worker_id)
    assert run.run_id == first.run["run_id"]
    assert await claim_runs(database, worker_id) == []
    async with open_journal(settings) as journal:
        await writer_of(journal, run).finish(SUCCESS)
    assert (await thread_row(database, thread_id))["status"] == "busy"
    assert [row.run_id for row in await claim_runs(database, worker_id)] == [second.run["run_id"]]


async def test_interrupt_keeps_what_the_old_run_did(database: Database, settings: Settings) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    queued = await create(database, thread_id)
    async with open_journal(settings) as journal:
        writer = writer_of(journal, run)
        checkpoint = put_checkpoint(writer)
        await writer.flush()
        new = await create(database, thread_id, multitask_strategy="interrupt")
        assert new.cancelled.ended == [queued.run["run_id"]]
        assert [row["run_id"] for row in new.cancelled.requested] == [run.run_id]
        assert not new.ready
        assert await statuses(database, thread_id) == ["running", "interrupted", "pending"]
        await writer.finish(INTERRUPTED)
    assert await statuses(database, thread_id) == ["interrupted", "interrupted", "pending"]
    thread = await thread_row(database, thread_id)
    assert thread["status"] == "busy"
    assert thread["error"]["error"] == "UserInterrupt"
    assert await checkpoint_ids(database, thread_id) == {checkpoint}
    [following] = await claim_runs(database, worker_id)
    assert following.run_id == new.run["run_id"]
    assert not following.fresh
    assert following.announced_seq == 3, "the old run was announced by event 1 and ended by event 2"


async def test_rollback_leaves_nothing_of_the_old_runs(database: Database, settings: Settings) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    earlier = await create(database, thread_id)
    async with open_journal(settings) as journal:
        [run] = await claim_runs(database, worker_id)
        writer = writer_of(journal, run)
        kept = put_checkpoint(writer)
        await writer.finish(SUCCESS)
        before = await thread_row(database, thread_id)

        old = await create(database, thread_id)
        [run] = await claim_runs(database, worker_id)
        queued = await create(database, thread_id)
        writer = writer_of(journal, run)
        writer.add_event("values", b"{}")
        erased = put_checkpoint(writer)
        put_writes(writer, erased, "task", 0)
        await writer.flush()
        new = await create(database, thread_id, multitask_strategy="rollback")
        assert new.cancelled.ended == [queued.run["run_id"]]
        assert [row["run_id"] for row in new.cancelled.requested] == [old.run["run_id"]]
        assert not await exists(database, queued.run["run_id"])

        # The owner, who does not know yet, cannot end it any other way.
        with pytest.raises(Cancelled) as refused:
            await writer.finish(SUCCESS)
        assert refused.value.action == "rollback"
        assert await statuses(database, thread_id) == ["success", "running", "pending"]
        writer.discard()
        await writer.finish(RolledBack())

    assert not await exists(database, old.run["run_id"])
    assert await exists(database, earlier.run["run_id"])
    assert await checkpoint_ids(database, thread_id) == {kept}
    assert await writes_left(database, thread_id) == set()
    thread = await thread_row(database, thread_id)
    assert thread["status"] == "busy"
    for column in ("values", "interrupts", "error", "resting_status"):
        assert thread[column] == before[column]
    [following] = await claim_runs(database, worker_id)
    assert following.run_id == new.run["run_id"]
    assert following.next_seq == len(await thread_events(database, thread_id)) + 1 == 7


async def test_rolling_back_a_command_takes_its_writes_back(database: Database, settings: Settings) -> None:
    """The run before ended with a question. A Command that answered it is undone: the question stands again, and so
    does what the other nodes of that step had done by then."""
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    async with open_journal(settings) as journal:
        [run] = await claim_runs(database, worker_id)
        writer = writer_of(journal, run)
        head = put_checkpoint(writer)
        put_writes(writer, head, "asking", INTERRUPT_INDEX)
        put_writes(writer, head, "done", 0)
        await writer.finish(SUCCESS)

        await create(database, thread_id, kwargs={"command": {"resume": "yes"}})
        [run] = await claim_runs(database, worker_id)
        writer = writer_of(journal, run)
        put_writes(writer, head, NULL_TASK_ID, RESUME_INDEX, COMMAND_WRITES)
        put_writes(writer, head, "asking", 0)
        await writer.flush()
        await cancel_runs(database, thread_id, None, "rollback")
        await writer.finish(RolledBack())
    assert await writes_left(database, thread_id) == {("asking", INTERRUPT_INDEX), ("done", 0)}
    assert await checkpoint_ids(database, thread_id) == {head}
    assert await statuses(database, thread_id) == ["success"]


async def test_rolling_back_a_queued_command_leaves_the_running_one_alone(
    database: Database, settings: Settings
) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    async with open_journal(settings) as journal:
        [run] = await claim_runs(database, worker_id)
        writer = writer_of(journal, run)
        head = put_checkpoint(writer)
        put_writes(writer, head, "asking", INTERRUPT_INDEX)
        await writer.finish(SUCCESS)

        await create(database, thread_id, kwargs={"command": {"resume": {"1" * 32: "yes"}}})
        [run] = await claim_runs(database, worker_id)
        writer = writer_of(journal, run)
        put_writes(writer, head, NULL_TASK_ID, RESUME_INDEX, COMMAND_WRITES)
        await writer.flush()
        queued = await create(database, thread_id, kwargs={"command": {"resume": {"0" * 32: "again"}}})
        await cancel_runs(database, thread_id, [queued.run["run_id"]], "rollback")
    assert await writes_left(database, thread_id) == {("asking", INTERRUPT_INDEX), (NULL_TASK_ID, RESUME_INDEX)}
    assert await statuses(database, thread_id) == ["success", "running"]


# --- cancel -------------------------------------------------------------------------------------------


async def test_interrupting_a_pending_run(database: Database) -> None:
    thread_id = uuid4()
    first = await create(database, thread_id)
    second = await create(database, thread_id)
    cancelled = await cancel_runs(database, thread_id, [first.run["run_id"]], "interrupt")
    assert cancelled.ended == [first.run["run_id"]]
    assert await statuses(database, thread_id) == ["interrupted", "pending"]
    [left] = await unfinished(database, thread_id)
    assert left["ready_at"] is not None, "the next in the queue takes its place"
    await cancel_runs(database, thread_id, [second.run["run_id"]], "interrupt")
    thread = await thread_row(database, thread_id)
    assert (thread["status"], thread["error"], thread["has_state"]) == ("idle", None, False)


async def test_interrupting_a_run_between_two_attempts(database: Database, settings: Settings) -> None:
    """It stopped in the middle of the graph, and the thread says so."""
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    async with open_journal(settings) as journal:
        writer = writer_of(journal, run)
        checkpoint = put_checkpoint(writer)
        await writer.finish(Released(after=60.0))
    await cancel_runs(database, thread_id, None, "interrupt")
    assert await statuses(database, thread_id) == ["interrupted"]
    thread = await thread_row(database, thread_id)
    assert (thread["status"], thread["error"]["error"]) == ("interrupted", "UserInterrupt")
    assert await checkpoint_ids(database, thread_id) == {checkpoint}


async def test_interrupting_a_running_run(database: Database, settings: Settings) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    cancelled = await cancel_runs(database, thread_id, [run.run_id], "interrupt")
    assert [(row["run_id"], row["worker_id"]) for row in cancelled.requested] == [(run.run_id, worker_id)]
    assert await statuses(database, thread_id) == ["running"]
    async with open_journal(settings) as journal:
        await writer_of(journal, run).finish(INTERRUPTED)
    thread = await thread_row(database, thread_id)
    assert (thread["status"], thread["error"]["error"]) == ("interrupted", "UserInterrupt")


@pytest.mark.parametrize("claimed", [False, True])
async def test_rolling_back_the_only_run_sets_the_thread_free(
    database: Database, settings: Settings, claimed: bool
) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    if claimed:
        [run] = await claim_runs(database, worker_id)
        await cancel_runs(database, thread_id, None, "rollback")
        async with open_journal(settings) as journal:
            await writer_of(journal, run).finish(RolledBack())
    else:
        await cancel_runs(database, thread_id, None, "rollback")
    assert await statuses(database, thread_id) == []
    thread = await thread_row(database, thread_id)
    assert (thread["status"], thread["has_state"]) == ("idle", False)


async def test_a_finished_run_cannot_be_cancelled(database: Database, settings: Settings) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    async with open_journal(settings) as journal:
        await writer_of(journal, run).finish(SUCCESS)
    before = await everything(database)
    cancelled = await cancel_runs(database, thread_id, [run.run_id], "rollback")
    assert (cancelled.ended, cancelled.requested) == ([], [])
    assert await everything(database) == before


async def test_a_rollback_outranks_an_interrupt(database: Database) -> None:
    thread_id = uuid4()
    await create(database, thread_id)
    [run] = await claim_runs(database, await online_worker(database))
    for action, standing in (("interrupt", "interrupt"), ("rollback", "rollback"), ("interrupt", "rollback")):
        await cancel_runs(database, thread_id, None, "rollback" if action == "rollback" else "interrupt")
        assert (await run_row(database, run.run_id))["cancel_action"] == standing


async def test_a_promised_rollback_survives_the_worker(database: Database, settings: Settings) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    async with open_journal(settings) as journal:
        writer = writer_of(journal, run)
        put_checkpoint(writer)
        await writer.flush()
    await cancel_runs(database, thread_id, None, "rollback")
    await declare_lost(database, worker_id)
    await release_orphans(database, max_crashes=3)
    cancelled = await cancel_runs(database, thread_id, None, "interrupt")
    assert cancelled.ended == [run.run_id]
    assert await statuses(database, thread_id) == []
    assert await checkpoint_ids(database, thread_id) == set()


async def test_a_promised_rollback_of_a_poison_run_happens(database: Database, settings: Settings) -> None:
    thread_id, worker_id = uuid4(), await online_worker(database)
    await create(database, thread_id)
    waiting = await create(database, thread_id)
    [run] = await claim_runs(database, worker_id)
    async with open_journal(settings) as journal:
        writer = writer_of(journal, run)
        put_checkpoint(writer)
        await writer.flush()
    await cancel_runs(database, thread_id, [run.run_id], "rollback")
    await declare_lost(database, worker_id)
    await release_orphans(database, max_crashes=1)
    assert not await exists(database, run.run_id)
    assert await checkpoint_ids(database, thread_id) == set()
    thread = await thread_row(database, thread_id)
    assert (thread["status"], thread["resting_status"], thread["error"]) == ("busy", "idle", None)
    [left] = await unfinished(database, thread_id)
    assert (left["run_id"], left["ready_at"] is not None) == (waiting.run["run_id"], True)


@pytest.mark.parametrize("command", [None, {"resume": "\\u0000 is six characters, \u0000 one"}])
async def test_a_rollback_does_not_stumble_over_what_the_run_was_given(
    database: Database, command: dict[str, str] | None
) -> None:
    """Of a run that has been begun: what it wrote with its Command goes, too."""
    created = await post_run(database, "graph", input="a\u0000b", command=command)
    await query(database, "UPDATE run SET fence = 1 RETURNING 1")
    await cancel_runs(database, created.run["thread_id"], None, "rollback")
    assert await query(database, "SELECT 1 FROM run") == []

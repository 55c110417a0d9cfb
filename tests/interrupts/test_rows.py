"""The questions in the database, as runs ask, answer, fail and disappear."""

from __future__ import annotations

from importlib.resources import files
from typing import Any
from uuid import UUID, uuid4

import pytest

import holdfast.db
from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.interrupts.resume import resume_of
from holdfast.engine.outcome import Ended
from holdfast.engine.reap import release_orphans
from holdfast.engine.runs import delete_run
from holdfast.engine.states import RunStatus
from holdfast.errors import AlreadyAnswered
from holdfast.journal.entries import EndEffects
from holdfast.journal.journal import Journal
from holdfast.settings import Settings
from tests.engine.scene import SUCCESS, claim_runs, create, declare_lost, online_worker, open_journal, writer_of
from tests.support.records import query

ID = "0" * 31 + "a"
OTHER = "0" * 31 + "b"


def waits(*values: tuple[str, Any], status: Any = RunStatus.SUCCESS, thread_status: str = "interrupted") -> Ended:
    return Ended(
        status=status,
        thread_status=thread_status,
        values=b"{}",
        interrupts={f"task {key}": [{"id": key, "value": value}] for key, value in values},
    )


def answering(*ids: str) -> dict[str, Any]:
    return {"command": {"resume": dict.fromkeys(ids, "yes")}}


class Scene:
    def __init__(self, database: Database, journal: Journal, worker_id: UUID) -> None:
        self.database = database
        self.journal = journal
        self.worker_id = worker_id
        self.thread_id = uuid4()

    async def answer(self, *ids: str, **options: Any) -> UUID:
        created = await create(self.database, self.thread_id, kwargs=answering(*ids), **options)
        run_id: UUID = created.run["run_id"]
        return run_id

    async def end(self, outcome: Ended) -> ClaimedRun:
        """Claim the thread's next run, and end it so."""
        [run] = await claim_runs(self.database, self.worker_id)
        gated = run.asking or resume_of(run.kwargs) is not None
        await writer_of(self.journal, run).finish(outcome, effects=EndEffects(touches_interrupts=gated))
        return run

    async def ask(self, *values: tuple[str, Any]) -> UUID:
        await create(self.database, self.thread_id)
        run_id: UUID = (await self.end(waits(*values))).run_id
        return run_id

    async def rows(self) -> list[tuple[str, UUID, UUID | None, bool]]:
        """id, asker, answerer, over"""
        found = await query(
            self.database,
            "SELECT interrupt_id, run_id, answered_by, settled_at IS NOT NULL AS over FROM interrupt "
            "WHERE thread_id = %s AND asked_at IS NOT NULL ORDER BY asked_at, interrupt_id",
            self.thread_id,
        )
        return [(row["interrupt_id"], row["run_id"], row["answered_by"], row["over"]) for row in found]


@pytest.fixture
async def worker_id(database: Database) -> UUID:
    return await online_worker(database)


async def test_a_second_question_under_the_same_id(database: Database, settings: Settings, worker_id: UUID) -> None:
    async with open_journal(settings) as journal:
        scene = Scene(database, journal, worker_id)
        first = await scene.ask((ID, "?"))
        second = await scene.answer(ID)
        await scene.end(waits((ID, "?")))
        assert await scene.rows() == [(ID, first, second, True), (ID, second, None, False)]
        # Whoever still has the first question before him is late.
        with pytest.raises(AlreadyAnswered) as late:
            await scene.answer(ID, answers_run=first)
        assert late.value.details == {"run_id": str(second), "interrupt_id": ID}
        third = await scene.answer(ID, answers_run=second)
        assert (await scene.rows())[1] == (ID, second, third, False)
        # Undone, all is as it was.
        await cancel_runs(database, scene.thread_id, [third], "rollback")
        assert (await scene.rows())[1] == (ID, second, None, False)


async def test_a_run_that_fails_leaves_the_question_to_the_one_who_asked(
    database: Database, settings: Settings, worker_id: UUID
) -> None:
    async with open_journal(settings) as journal:
        scene = Scene(database, journal, worker_id)
        first = await scene.ask((ID, "?"), (OTHER, "?"))
        second = await scene.answer(ID)
        await scene.end(waits((ID, "?"), (OTHER, "?"), status=RunStatus.ERROR, thread_status="error"))
        assert await scene.rows() == [(ID, first, None, False), (OTHER, first, None, False)]
        # One that asks something else has used the answer, even if it failed later.
        third = await scene.answer(ID)
        await scene.end(waits((ID, "another"), (OTHER, "?"), status=RunStatus.ERROR, thread_status="error"))
        assert await scene.rows() == [(ID, first, third, True), (OTHER, first, None, False), (ID, third, None, False)]
        assert second != third


async def test_refused_resume_leaves_its_interrupts_waiting(
    database: Database, settings: Settings, worker_id: UUID
) -> None:
    """A strict resume that names something unknown beside what it answers."""
    async with open_journal(settings) as journal:
        scene = Scene(database, journal, worker_id)
        first = await scene.ask((ID, "?"))
        await scene.answer(ID, OTHER)
        await scene.end(Ended(status=RunStatus.ERROR, thread_status=None))
        assert await scene.rows() == [(ID, first, None, False)]
        assert await query(database, "SELECT 1 FROM interrupt WHERE asked_at IS NULL") == []


@pytest.mark.parametrize("progress", [0, 2])
async def test_poison_run_reopens_its_interrupt_unless_it_was_used(
    database: Database, settings: Settings, worker_id: UUID, progress: int
) -> None:
    """Before its answer was used, the question waits again; after that the thread has gone on."""
    async with open_journal(settings) as journal:
        scene = Scene(database, journal, worker_id)
        first = await scene.ask((ID, "?"))
        second = await scene.answer(ID)
        await claim_runs(database, worker_id)
        await query(database, "UPDATE run SET progress = %s WHERE run_id = %s RETURNING 1", progress, second)
        await declare_lost(database, worker_id)
        await release_orphans(database, max_crashes=1)
        [row] = await scene.rows()
        assert row[:3] == (ID, first, second if progress == 2 else None)


async def test_an_answer_between_two_attempts(database: Database, settings: Settings, worker_id: UUID) -> None:
    async with open_journal(settings) as journal:
        scene = Scene(database, journal, worker_id)
        first = await scene.ask((ID, "?"))
        second = await scene.answer(ID)
        await claim_runs(database, worker_id)
        await declare_lost(database, worker_id)
        await release_orphans(database, max_crashes=3)
        assert await scene.rows() == [(ID, first, second, False)], "it goes on, and so does its answer"
        with pytest.raises(AlreadyAnswered) as late:
            await scene.answer(ID)
        assert late.value.details == {"run_id": str(second), "interrupt_id": ID}
        await cancel_runs(database, scene.thread_id, [second], "interrupt")
        assert await scene.rows() == [(ID, first, None, False)]


async def test_two_answers_before_their_question(database: Database, settings: Settings, worker_id: UUID) -> None:
    async with open_journal(settings) as journal:
        scene = Scene(database, journal, worker_id)
        await create(database, scene.thread_id)
        early = await scene.answer(ID)
        with pytest.raises(AlreadyAnswered):
            await scene.answer(ID)
        other = await scene.answer(OTHER)
        asker = (await scene.end(waits((ID, "?"), (OTHER, "?")))).run_id
        assert await scene.rows() == [(ID, asker, early, False), (OTHER, asker, other, False)]
        await scene.end(waits((OTHER, "?")))
        await scene.end(SUCCESS)
        assert await scene.rows() == [(ID, asker, early, True), (OTHER, asker, other, True)]


async def test_a_question_closed_by_a_run_that_is_undone_waits_again(
    database: Database, settings: Settings, worker_id: UUID
) -> None:
    async with open_journal(settings) as journal:
        scene = Scene(database, journal, worker_id)
        first = await scene.ask((ID, "?"))
        second = await scene.ask((OTHER, "?"))
        assert await scene.rows() == [(ID, first, None, True), (OTHER, second, None, False)]
        with pytest.raises(AlreadyAnswered, match="does not wait"):
            await scene.answer(ID)
        await delete_run(database, scene.thread_id, second)
        assert await scene.rows() == [(ID, first, None, False)]
        [thread] = await query(database, "SELECT * FROM thread WHERE thread_id = %s", scene.thread_id)
        assert thread["interrupts"] == {f"task {ID}": [{"id": ID, "value": "?"}]}
        # What was answered before the thread went on is over, whatever is deleted of the past.
        third = await scene.answer(ID)
        await scene.end(SUCCESS)
        await scene.ask((OTHER, "?"))
        await delete_run(database, scene.thread_id, third)
        assert (await scene.rows())[0] == (ID, first, third, True)


async def test_migration_adds_rows_for_waiting_interrupts(
    database: Database, settings: Settings, worker_id: UUID
) -> None:
    migration = (files(holdfast.db) / "migrations" / "0007_gates.sql").read_text()
    backfill = migration[migration.index("INSERT INTO interrupt") :]
    async with open_journal(settings) as journal:
        scene, busy, none = (Scene(database, journal, worker_id) for _ in range(3))
        first = await scene.ask((ID, "?"), (OTHER, None))
        await busy.ask((ID, "?"))
        await none.ask()
        await create(database, busy.thread_id)
        async with database.connection() as connection:
            await connection.execute("DELETE FROM interrupt")
            await connection.execute(backfill.encode())
        assert await scene.rows() == [(ID, first, None, False), (OTHER, first, None, False)]
        assert (await busy.rows(), await none.rows()) == ([], [])
        await scene.answer(ID)
        with pytest.raises(AlreadyAnswered):
            await scene.answer(ID)


async def test_runs_without_questions_write_none(database: Database, settings: Settings, worker_id: UUID) -> None:
    """Nothing is said to the database about questions by a run that has nothing to do with them."""
    async with open_journal(settings) as journal:
        scene = Scene(database, journal, worker_id)
        await create(database, scene.thread_id)
        async with database.connection() as connection:
            await connection.execute("ALTER TABLE interrupt RENAME TO elsewhere")
        await scene.end(SUCCESS)
        await create(database, scene.thread_id)

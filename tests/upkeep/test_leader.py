"""One process at a time leads, and another does when it is gone."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.settings import Settings, load_settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.upkeep.leader import Upkeep


class Candidate(Upkeep):
    """Counts its passes instead of doing the duties."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, PostgresSignals(database))
        self.passes = 0

    async def _pass(self, connection: AsyncConnection[DictRow]) -> float | None:
        await connection.execute("SELECT 1")
        self.passes += 1
        return None


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({"REAPER_INTERVAL_SECONDS": "0.1"}, database_url=database_url)


async def leads(candidate: Candidate) -> None:
    before = candidate.passes
    async with asyncio.timeout(60):
        while candidate.passes < before + 3:
            await asyncio.sleep(0.01)


async def test_another_leads_when_the_leader_dies(database: Database) -> None:
    first, second = Candidate(database), Candidate(database)
    leading = asyncio.create_task(first.run())
    await leads(first)
    waiting = asyncio.create_task(second.run())
    await leads(first)
    assert second.passes == 0
    leading.cancel()
    await asyncio.wait({leading})
    await leads(second)
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_a_leader_without_its_session_leads_no_more(database: Database) -> None:
    first, second = Candidate(database), Candidate(database)
    tasks = [asyncio.create_task(first.run())]
    await leads(first)
    async with database.connection() as connection:
        ended = await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'holdfast upkeep' AND datname = current_database()"
        )
        assert ended.rowcount == 1
    tasks.append(asyncio.create_task(second.run()))
    async with asyncio.timeout(60):
        while True:
            before = (first.passes, second.passes)
            await asyncio.sleep(0.3)
            # Exactly one of them goes on, whichever it is.
            moved = (first.passes > before[0], second.passes > before[1])
            if moved in ((True, False), (False, True)):
                break
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

"""One process at a time leads, and another does when it is gone."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.settings import Settings, load_settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep import leader
from holdfast.upkeep.leader import Upkeep


class Candidate(Upkeep):
    """Counts its passes instead of looking for lost workers."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, PostgresSignals(database), Metrics())
        self.passes = 0

    async def _look(self, session: AsyncConnection[DictRow] | None) -> float:
        assert session is not None
        await session.execute("SELECT 1")
        self.passes += 1
        return 0.1


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
    await first.start()
    await leads(first)
    await second.start()
    await leads(first)
    assert second.passes == 0
    await first.stop()
    await leads(second)
    await second.stop()


async def test_a_leader_without_its_session_leads_no_more(database: Database) -> None:
    first, second = Candidate(database), Candidate(database)
    await first.start()
    await leads(first)
    async with database.connection() as connection:
        ended = await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name ~ '^holdfast upkeep' AND datname = current_database()"
        )
        assert ended.rowcount == 1
    await second.start()
    async with asyncio.timeout(60):
        while True:
            before = (first.passes, second.passes)
            await asyncio.sleep(0.3)
            # Exactly one of them goes on, whichever it is.
            moved = (first.passes > before[0], second.passes > before[1])
            if moved in ((True, False), (False, True)):
                break
    await first.stop()
    await second.stop()


class Blocked(Candidate):
    """Does nothing with its session any more, as a process that is stopped, or whose event loop is blocked."""

    def __init__(self, database: Database, *, within_transaction: bool) -> None:
        super().__init__(database)
        self._within_transaction = within_transaction
        self.blocked = asyncio.Event()

    async def _look(self, session: AsyncConnection[DictRow] | None) -> float:
        assert session is not None
        async with session.transaction() if self._within_transaction else nullcontext():
            await session.execute("SELECT 1")
            self.blocked.set()
            await asyncio.sleep(3600)
        return 0.1


@pytest.mark.parametrize("within_transaction", [False, True], ids=["between looks", "in a transaction"])
async def test_another_leads_when_the_leader_is_blocked(
    database_url: str, within_transaction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "SILENCE_SECONDS", 1.0)
    # It does not take a lease.
    settings = load_settings(
        {"REAPER_INTERVAL_SECONDS": "0.1", "LEASE_DURATION_SECONDS": "3600"}, database_url=database_url
    )
    database = Database(settings, "test")
    await database.open()
    first, second = Blocked(database, within_transaction=within_transaction), Candidate(database)
    await first.start()
    await first.blocked.wait()
    await second.start()
    await leads(second)
    await first.stop()
    await second.stop()
    await database.close()

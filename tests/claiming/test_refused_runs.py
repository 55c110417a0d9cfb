"""Runs that the database refuses to let a worker claim: the others are executed, and each refused run is reported."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.engine.careful_claim import MAX_REFUSED, RunByRunLook
from holdfast.engine.claim import claim
from holdfast.settings import Settings
from tests.engine.scene import GRAPH, create, online_worker
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, first, line
from tests.support.records import post_run, query, run_ended, run_row
from tests.support.waiting import until_true
from tests.upkeep.test_bad_rows import REFUSE, refuse_changes


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, jobs=1)


async def refuse_all_but(database: Database, condition: str) -> None:
    """Refuse to change each run of which the condition is not true."""
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        await connection.execute(
            "CREATE TRIGGER refuse BEFORE UPDATE ON run FOR EACH ROW "
            f"WHEN (({condition}) IS NOT TRUE) EXECUTE FUNCTION refuse()".encode()
        )


def reported(logs: list[Any]) -> list[str]:
    return [entry["run_id"] for entry in logs if entry["event"] == "upkeep.row_set_aside" and entry["duty"] == "claim"]


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("refused", ["the run", "its announcement"])
async def test_refused_run_delays_no_other(settings: Settings, database: Database, refused: str, jobs: int) -> None:
    bad, *good = [(await post_run(database, "graph", input=GO)).run["run_id"] for _ in range(4)]
    if refused == "the run":
        await refuse_changes(database, bad)
    else:
        async with database.transaction() as connection:
            await connection.execute(REFUSE)
            await connection.execute(
                "CREATE TRIGGER refuse BEFORE INSERT ON event FOR EACH ROW "
                f"WHEN (NEW.run_id = '{bad}' AND NEW.kind = 'metadata') EXECUTE FUNCTION refuse()".encode()
            )
    with capture_logs() as logs:
        async with running_worker(settings.model_copy(update={"jobs": jobs}), catalog_of(graph=line(first))) as worker:
            for run_id in good:
                assert (await run_ended(database, run_id))["attempt"] == 1
            # It is not tried with each claim.
            again = (await post_run(database, "graph", input=GO)).run["run_id"]
            await run_ended(database, again)
            assert worker.live().well
    assert reported(logs) == [str(bad)]
    assert "claim.outage" not in {entry["event"] for entry in logs}
    assert (await run_row(database, bad))["status"] == "pending"


async def test_refused_run_is_claimed_again_later(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.claiming.refused_runs.MAX_SKIP_SECONDS", 0.1)
    run_id = (await post_run(database, "graph", input=GO)).run["run_id"]
    await refuse_changes(database, run_id)
    with capture_logs() as logs:
        async with running_worker(settings, catalog_of(graph=line(first))):
            await until_true(lambda: len(reported(logs)) > 0, "it is set aside")
            async with database.connection() as connection:
                await connection.execute("ALTER TABLE run DISABLE TRIGGER refuse")
            assert (await run_ended(database, run_id))["status"] == "success"


async def test_many_refused_runs_delay_no_other(settings: Settings, database: Database) -> None:
    bad = [(await post_run(database, "graph", input=GO)).run["run_id"] for _ in range(2 * MAX_REFUSED + 5)]
    good = (await post_run(database, "graph", input=GO)).run["run_id"]
    await refuse_all_but(database, f"OLD.run_id = '{good}'")
    with capture_logs() as logs:
        async with running_worker(settings, catalog_of(graph=line(first))):
            await run_ended(database, good)
    assert sorted(reported(logs)) == sorted(str(run_id) for run_id in bad)


async def claim_carefully(database: Database, worker_id: UUID, slots: int, **options: Any) -> tuple[list[UUID], int]:
    look = RunByRunLook(options.pop("aside", []))
    async with database.transaction() as connection:
        rows = await claim(connection, worker_id, slots, [GRAPH], look=look, **options)
    return [row.run_id for row in rows], len(look.refused)


@pytest.mark.parametrize("kind", ["plain", "of tenants", "suspects"])
async def test_claim_skips_runs_set_aside(database: Database, kind: str) -> None:
    """However the statement finds its candidates, and whether it takes them together or one by one."""
    worker_id = await online_worker(database)
    created = [(await create(database, UUID(int=number))).run["run_id"] for number in range(1, 4)]
    if kind == "of tenants":
        # One has nothing but the run that is set aside, and is first.
        for place, run_id in enumerate(created):
            await query(database, "UPDATE run SET tenant_id = %s WHERE run_id = %s RETURNING 1", f"t{place}", run_id)
    elif kind == "suspects":
        await query(database, "UPDATE run SET crashes_in_a_row = 1 RETURNING 1")
    aside = [created[0]]
    async with database.connection() as connection:
        [taken] = await claim(connection, worker_id, 1, [GRAPH], aside=aside)
    assert taken.run_id == created[1]
    other = await online_worker(database)
    assert await claim_carefully(database, other, 1, aside=aside) == ([created[2]], 0)
    # Nothing is left but what is set aside, for which no slot is kept.
    later = (await create(database, UUID(int=9))).run["run_id"]
    async with database.connection() as connection:
        rows = await claim(connection, await online_worker(database), 1, [GRAPH], aside=aside)
    assert [row.run_id for row in rows] == [later]


@pytest.mark.parametrize("kind", ["plain", "of tenants", "suspects"])
async def test_careful_claim_finds_refused_run(database: Database, kind: str) -> None:
    created = [(await create(database, UUID(int=number))).run["run_id"] for number in range(1, 4)]
    if kind == "of tenants":
        await query(database, "UPDATE run SET tenant_id = 'acme' RETURNING 1")
    elif kind == "suspects":
        await query(database, "UPDATE run SET crashes_in_a_row = 1 RETURNING 1")
    await refuse_changes(database, created[0])
    worker_id = await online_worker(database)
    slots = 1 if kind == "suspects" else 3
    with pytest.raises(psycopg.errors.DataException):
        async with database.connection() as connection:
            await claim(connection, worker_id, slots, [GRAPH])
    claimed, refused = await claim_carefully(database, worker_id, slots)
    assert (claimed, refused) == (created[1:2] if kind == "suspects" else created[1:], 1)


async def test_refusal_of_all_runs_is_reported_as_outage(settings: Settings, database: Database) -> None:
    """No run is to blame for a table or a right that is missing, and none is set aside."""
    created = [(await post_run(database, "graph", input=GO)).run["run_id"] for _ in range(2)]
    async with database.transaction() as connection:
        await connection.execute("ALTER TABLE event RENAME COLUMN kind TO sort")
    with capture_logs() as logs:
        async with running_worker(settings, catalog_of(graph=line(first))):
            await until_true(lambda: any(entry["event"] == "claim.outage" for entry in logs), "it is reported")
            async with database.transaction() as connection:
                await connection.execute("ALTER TABLE event RENAME COLUMN sort TO kind")
            for run_id in created:
                await run_ended(database, run_id)
    assert reported(logs) == []

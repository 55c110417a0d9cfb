"""Runs that a worker owns without executing them are given up, and none of them delays the others."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from holdfast.claiming.unexecuted_runs import UnexecutedRuns
from holdfast.db.connect import Database
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry.metrics import Metrics
from tests.engine.scene import claim_runs, create, online_worker
from tests.support.records import run_row
from tests.upkeep.test_bad_rows import refuse_changes


@pytest.fixture
async def owned(database: Database) -> tuple[UUID, list[UUID]]:
    """A worker, and three runs that it owns."""
    worker_id = await online_worker(database)
    for _ in range(3):
        await create(database, uuid4())
    return worker_id, [row.run_id for row in await claim_runs(database, worker_id)]


def unexecuted_runs(database: Database, *held: UUID) -> UnexecutedRuns:
    return UnexecutedRuns(database, PostgresSignals(database), lambda: held, lambda: None, Metrics())


async def states(database: Database, run_ids: list[UUID]) -> list[str]:
    return [(await run_row(database, run_id))["status"] for run_id in run_ids]


async def test_executing_runs_are_not_returned(database: Database, owned: tuple[UUID, list[UUID]]) -> None:
    worker_id, run_ids = owned
    assert await unexecuted_runs(database, run_ids[0]).give_up(worker_id)
    assert await states(database, run_ids) == ["running", "pending", "pending"]


async def test_locked_unexecuted_run_delays_no_other(database: Database, owned: tuple[UUID, list[UUID]]) -> None:
    worker_id, run_ids = owned
    found = unexecuted_runs(database)
    found.check_soon()
    async with database.transaction() as locking:
        await locking.execute("SELECT 1 FROM run WHERE run_id = %s FOR UPDATE", (run_ids[0],))
        assert not await found.give_up(worker_id)
        assert found.is_due()
        assert await states(database, run_ids) == ["running", "pending", "pending"]
    assert await found.give_up(worker_id)
    assert not found.is_due()
    assert await states(database, run_ids) == ["pending"] * 3


@pytest.mark.parametrize("unended", [False, True])
async def test_unchangeable_unexecuted_run_delays_no_other(
    database: Database, owned: tuple[UUID, list[UUID]], unended: bool
) -> None:
    worker_id, run_ids = owned
    await refuse_changes(database, run_ids[0])
    found = unexecuted_runs(database)
    if unended:
        for run_id in run_ids:
            found.disown_soon(run_id)
    with capture_logs() as logs:
        assert await found.give_up(worker_id)
        assert await found.give_up(worker_id)
    assert not found.is_due()
    owners = [(await run_row(database, run_id))["worker_id"] for run_id in run_ids]
    assert [owner == worker_id for owner in owners] == [True, False, False]
    [reported] = [entry for entry in logs if entry["event"] == "upkeep.row_set_aside"]
    assert (reported["run_id"], reported["duty"]) == (str(run_ids[0]), "unexecuted_runs")


async def test_run_lost_in_the_meantime_is_not_disowned(database: Database, owned: tuple[UUID, list[UUID]]) -> None:
    worker_id, run_ids = owned
    found = unexecuted_runs(database, *run_ids[1:])
    found.disown_soon(run_ids[0])
    assert await unexecuted_runs(database, *run_ids[1:]).give_up(worker_id)
    assert await found.give_up(worker_id)
    assert not found.is_due()

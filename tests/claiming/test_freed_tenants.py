"""The next claim considers tenants of which a run has ended, even if it ended during the claim before."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

from holdfast.db.connect import Database
from holdfast.engine.claim import Claims
from holdfast.worker.main import Worker
from tests.support.catalogs import catalog_of
from tests.support.crash_graphs import steps
from tests.support.live_worker import quick_settings, running_worker
from tests.support.waiting import until_true


@pytest.mark.parametrize("fails", [False, True], ids=["claimed", "claim failed"])
async def test_next_claim_asks_for_tenants_whose_runs_ended_during_claim(
    database_url: str, database: Database, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    asked: list[set[str]] = []
    workers: list[Worker] = []

    async def claim(*_: Any, tenants: list[str], **__: Any) -> Claims:
        if not workers or len(asked) > 1 or (not asked and not tenants):
            return Claims()
        asked.append(set(tenants))
        if len(asked) == 1:
            await asyncio.sleep(0)
            workers[0].claims._freed_tenants.update({"again", "later"})
            if fails:
                raise psycopg.OperationalError("the connection was lost")
        return Claims()

    monkeypatch.setattr("holdfast.claiming.claim_loop.claim", claim)
    async with running_worker(quick_settings(database_url), catalog_of(steps=steps([]))) as worker:
        workers.append(worker)
        worker.claims._freed_tenants.update({"first", "again"})
        worker.claims.wake()
        await until_true(lambda: len(asked) > 0, "a claim")
        worker.claims.wake()
        await until_true(lambda: len(asked) > 1, "the next claim")
    assert asked[0] == {"first", "again"}
    assert asked[1] == {"again", "later"} | ({"first"} if fails else set())

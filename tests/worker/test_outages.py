"""The database is away for longer than the lease, and the worker lives on."""

from __future__ import annotations

import asyncio
from typing import Any

from structlog.testing import capture_logs

from holdfast.db.connect import Database
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, line
from tests.support.postgres_proxy import PostgresProxy
from tests.support.records import post_run, query, run_ended
from tests.support.waiting import until_true

RUNS = 4


async def test_outage_longer_than_the_lease_blames_no_run(database_url: str, database: Database) -> None:
    entered: list[int] = []
    gate = asyncio.Event()

    async def wait(state: Words) -> dict[str, Any]:
        entered.append(1)
        await gate.wait()
        return {"words": ["done"]}

    async with PostgresProxy(database_url) as proxy:
        # A lease that is short beside the grace in which the worker registers anew.
        settings = quick_settings(proxy.url, lease=3.0, heartbeat=1.0, session_grace=5.0)
        created = [await post_run(database, "graph", input=GO) for _ in range(RUNS)]
        with capture_logs() as logs:
            async with running_worker(settings, catalog_of(graph=line(wait))):
                await until_true(lambda: len(entered) == RUNS, "all runs are executed")
                proxy.cut()
                await until_true(
                    lambda: any(line["event"] == "worker.lease_lost" for line in logs), "the worker drops its runs"
                )
                proxy.restore()
                await until_true(lambda: len(entered) == 2 * RUNS, "all runs are executed again, beside each other")
                rows = await query(database, "SELECT crashes, crashes_in_a_row FROM run")
                gate.set()
                for one in created:
                    await run_ended(database, one.run["run_id"])
    assert [(row["crashes"], row["crashes_in_a_row"]) for row in rows] == [(0, 0)] * RUNS

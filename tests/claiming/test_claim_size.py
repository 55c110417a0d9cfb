"""Claims of runs whose inputs take long to arrive at the worker."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, line
from tests.support.postgres_proxy import PostgresProxy
from tests.support.records import post_run, run_ended

BYTES_PER_SECOND = 800_000


async def shorten(state: Words) -> dict[str, Any]:
    return {"words": ["short"]}


@pytest.mark.parametrize(("runs", "size"), [(8, 300_000), (1, 2_000_000)], ids=["many together", "a single one"])
async def test_worker_claims_runs_whose_inputs_arrive_slowly(
    database: Database, database_url: str, runs: int, size: int
) -> None:
    """The answer to a claim contains the inputs. One that takes too long is given up, and the next claim would take the
    same runs: for ever, and none behind them would be executed."""
    created = [await post_run(database, "graph", input={"words": ["x" * size]}) for _ in range(runs)]
    created.append(await post_run(database, "graph", input=GO))
    async with PostgresProxy(database_url) as proxy:
        settings = quick_settings(proxy.url, jobs=runs, database_timeout=2.0)
        with capture_logs() as logs:
            async with running_worker(settings, catalog_of(graph=line(shorten))):
                proxy.bytes_per_second = BYTES_PER_SECOND
                ended = [await run_ended(database, run.run["run_id"]) for run in created]
    assert [run["status"] for run in ended] == ["success"] * len(created)
    assert [run["crashes"] for run in ended] == [0] * len(created)
    assert "claim.outage" in {line["event"] for line in logs}, "the inputs were not large enough"

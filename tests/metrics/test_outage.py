"""A scrape is answered whatever the database does, and costs it little."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.insight import figures
from holdfast.insight.figures import FleetFigures
from holdfast.insight.fleet import queue_figures
from holdfast.settings import Settings, load_settings
from holdfast.telemetry import metrics as declared
from holdfast.telemetry.metrics import Metrics
from tests.metrics.scrape import Scrape, scrape
from tests.support import waiting
from tests.support.postgres_proxy import PostgresProxy
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[PostgresProxy]:
    async with PostgresProxy(database_url) as proxy:
        yield proxy


async def test_an_outage_takes_the_figures_of_the_fleet_and_nothing_else(
    proxy: PostgresProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "COUNT_TIMEOUT_SECONDS", 0.5)
    environ = {"HOLDFAST_METRICS_CACHE_SECONDS": "0.1", "HOLDFAST_DATABASE_TIMEOUT": "10"}
    settings = load_settings(environ, database_url=proxy.url, port=free_port())
    async with answering(settings, GraphCatalog.load(load_config(EXAMPLES))) as client:
        url = f"http://127.0.0.1:{settings.port}"

        async def up(value: int) -> Scrape | None:
            seen = await scrape(client, url)
            return seen if seen.value("database_up") == value else None

        whole = await waiting.until(lambda: up(1), "the database is up")
        assert whole is not None
        fleet = {name for name, metric in declared.ALL_METRICS.items() if metric.fleet}
        # There is no worker, and so no lease and nothing that is not served.
        absent = {"holdfast_workers_lease_left_seconds", "holdfast_queue_unserved"}
        assert fleet & whole.names == fleet - absent
        proxy.cut()
        cut = await waiting.until(lambda: up(0), "the outage is seen")
        assert cut is not None
        assert not fleet & cut.names
        assert {"holdfast_stream_watchers", "holdfast_pool_size", "holdfast_loop_delay_seconds"} <= cut.names
        answer = await client.get("/metrics", params={"format": "json"})
        assert answer.status_code == 200
        assert (answer.json()["queue"], answer.json()["workers"]) == (None, None)
        proxy.restore()
        restored = await waiting.until(lambda: up(1), "the end of the outage is seen", patience=60)
        assert restored is not None
        assert fleet & restored.names == fleet - absent


async def test_the_database_is_asked_seldom(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def counting(connection: AsyncConnection[DictRow]) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return await queue_figures(connection)

    monkeypatch.setattr("holdfast.insight.figures.queue_figures", counting)
    fleet, counted = FleetFigures(), Metrics()
    first = await asyncio.gather(*(fleet.readings(database, counted) for _ in range(50)))
    assert asked == 1
    assert all(one[declared.DATABASE_UP] == 1 for one in first)
    fleet._until = 0.0
    await fleet.readings(database, counted)
    assert asked == 2
    # Both clocks are this machine's; it may have stood still between one look and the other.
    assert abs(counted.clock_ahead) < 10


async def test_a_count_that_takes_long_is_not_made_often(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    clock = Mock(time=time.time, monotonic=lambda: now)
    monkeypatch.setattr("holdfast.insight.figures.time", clock)

    async def slow(connection: AsyncConnection[DictRow]) -> dict[str, Any]:
        nonlocal now
        now += 3.0
        return await queue_figures(connection)

    monkeypatch.setattr("holdfast.insight.figures.queue_figures", slow)
    fleet, counted = FleetFigures(), Metrics()
    await fleet.readings(database, counted)
    assert fleet._until == now + 20 * 3


async def test_metrics_can_be_turned_off(settings: Settings) -> None:
    silent = settings.model_copy(update={"metrics": False, "port": free_port()})
    async with answering(silent, GraphCatalog.load(load_config(EXAMPLES))) as client:

        async def up() -> Scrape | None:
            seen = await scrape(client, f"http://127.0.0.1:{silent.port}")
            return seen if seen.value("database_up") == 1 else None

        seen = await waiting.until(up, "the database is up")
        assert seen is not None
        assert seen.has("queue_ready")
        assert not seen.has("loop_delay_seconds_count")
        assert not seen.has("takeovers_total")

"""A limit of the operator's that one large row exceeds hurts only that row: here `temp_file_limit`, which only a
superuser may change."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.config import get_stream_writer
from psycopg import sql
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.engine.outcome import Ended
from holdfast.engine.states import RunStatus
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, first, line
from tests.support.records import post_run, query, run_ended, run_row
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.station import open_station
from tests.support.waiting import until

LIMIT = "1MB"
LARGE = "x" * 8_000_000
YEARLY = "0 0 1 1 *"


async def set_limit(database: Database) -> None:
    """For sessions that are opened from now on."""
    async with database.connection() as connection:
        name = sql.Identifier(connection.info.dbname)
        await connection.execute(sql.SQL("ALTER DATABASE {} SET temp_file_limit = {}").format(name, LIMIT))


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, port=free_port())


@pytest.fixture
async def limited(settings: Settings, database: Database) -> Settings:
    await set_limit(database)
    return settings


async def test_event_beyond_the_limit_fails_its_own_run(limited: Settings, database: Database) -> None:
    async def write_much(state: Words) -> dict[str, Any]:
        get_stream_writer()(LARGE)
        return {"words": ["much"]}

    async with running_worker(limited, catalog_of(large=line(write_much), small=line(first))):
        large = await post_run(database, "large", input=GO, stream_mode=["values", "custom"])
        small = [await post_run(database, "small", input=GO) for _ in range(3)]
        assert [(await run_ended(database, one.run["run_id"]))["status"] for one in small] == ["success"] * 3
        row = await run_ended(database, large.run["run_id"])
    assert (row["status"], row["error"]["error"]) == ("error", "JournalFailed")
    assert "temp_file_limit" in row["error"]["message"]


async def test_write_beyond_the_limit_fails_no_run_of_its_batch(limited: Settings, database: Database) -> None:
    async with open_station(limited, database, catalog_of(graph=line(first))) as station:
        created = [await post_run(database, "graph", input=GO) for _ in range(2)]
        large, small = [attempt.writer for attempt in await station.claim(2)]
        large.add_event("custom", b'"%s"' % LARGE.encode())
        small.add_event("custom", b"1")
        await small.finish(Ended(status=RunStatus.SUCCESS, thread_status="idle", values=b"{}"))
        statuses = {(await run_row(database, one.run["run_id"]))["status"] for one in created}
    assert statuses == {"success", "running"}


async def test_cron_beyond_the_limit_keeps_no_other_from_firing(settings: Settings, database: Database) -> None:
    catalog = catalog_of(graph=line(first))
    crons = []
    async with answering(settings, catalog) as client:
        for words in ([LARGE], ["small"]):
            content = {"assistant_id": "graph", "schedule": YEARLY, "input": {"words": words}}
            crons.append((await client.post("/runs/crons", json=content)).json()["cron_id"])
    await set_limit(database)
    due = "UPDATE cron SET next_run_date = now() - interval '1 s' WHERE cron_id = ANY(%s) RETURNING 1"
    assert len(await query(database, due, crons)) == 2
    large, small = crons

    async def small_fired() -> bool:
        fired = await query(database, "SELECT 1 FROM cron WHERE cron_id = %s AND next_run_date > now()", small)
        return bool(fired)

    with capture_logs() as logs:
        async with running_worker(settings, catalog):
            await until(small_fired, "the small cron fires")
    aside = {entry["cron_id"] for entry in logs if entry["event"] == "upkeep.row_set_aside"}
    assert aside == {large}


async def test_request_beyond_the_limit_is_refused_in_words(limited: Settings) -> None:
    async with answering(limited, catalog_of(graph=line(first))) as client:
        request = {"assistant_id": "graph", "input": {"words": [LARGE]}}
        refused = await client.post("/runs", json=request)
        accepted = await client.post("/runs", json={**request, "input": GO})
    assert refused.status_code == 422
    assert "temp_file_limit" in refused.json()["detail"]
    assert accepted.status_code == 200

"""Runs that nobody can execute are put aside after a while; letters and keys that nobody needs are forgotten."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import orjson

from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.dead_letters.graph_gone import end_graphless_runs, record_missing_graphs
from holdfast.settings import Settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.dead_letters import Letters
from holdfast.upkeep.sweeper import Sweeper
from tests.support.catalogs import catalog_of
from tests.support.nodes import GO, first, line
from tests.support.records import payloads, post_run, query, run_events, run_row, thread_row
from tests.support.station import DECLARE_LOST, open_station

DAY = 86_400.0
ONLINE = """
INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until)
VALUES (%s, 'online', 'test', 0, 'test', 1, %s, now() + interval '1 hour') RETURNING worker_id
"""
AGE_RUNS = (
    "UPDATE run SET ready_at = ready_at - interval '2 days', created_at = created_at - interval '2 days' RETURNING 1"
)
AGE_ABSENCE = "UPDATE graph_absence SET missing_since = missing_since - interval '2 days' RETURNING 1"


async def online(database: Database, *graphs: str) -> UUID:
    worker_id = uuid4()
    await query(database, ONLINE, worker_id, list(graphs))
    return worker_id


async def missing(database: Database, gap: float = 60.0) -> list[str]:
    async with database.connection() as connection:
        return await record_missing_graphs(connection, after=DAY, gap=gap)


async def upkeep(database: Database, **settings: Any) -> None:
    """One pass of a process that has just begun to lead."""
    changed = Database(database.settings.model_copy(update=settings), "upkeep")
    await changed.open()
    try:
        await Letters(changed, PostgresSignals(database), Metrics()).run()
    finally:
        await changed.close()


async def test_a_graph_that_is_missing_for_long_enough_is_gone(database: Database) -> None:
    await online(database, "another")
    created = await post_run(database, "ghost", input=GO, webhook="https://example.com/hook")
    behind = await post_run(database, "another", input=GO, thread_id=created.run["thread_id"])
    await query(database, AGE_RUNS)
    # However long the run has waited: a deploy may just have begun.
    await upkeep(database)
    assert (await run_row(database, created.run["run_id"]))["status"] == "pending"
    await query(database, AGE_ABSENCE)
    await upkeep(database)
    run = await run_row(database, created.run["run_id"])
    assert (run["status"], run["dead_letter"], run["error"]["error"]) == ("error", "graph_gone", "GraphGone")
    assert "'ghost'" in run["error"]["message"]
    assert "GRAPH_GONE_AFTER_SECONDS" in run["error"]["message"]
    events = await run_events(database, run["thread_id"], run["run_id"])
    assert [event.kind for event in events] == ["error", "end"]
    assert payloads(events, "end") == [{"status": "error", "error": run["error"]}]
    assert run["first_seq"] == events[0].seq
    [owed] = await query(database, "SELECT run_id, run FROM webhook_delivery")
    assert (owed["run_id"], owed["run"]["error"]["error"]) == (run["run_id"], "GraphGone")
    thread = await thread_row(database, run["thread_id"])
    assert (thread["status"], thread["resting_status"], thread["last_seq"]) == ("busy", "error", events[-1].seq)
    # The next of the thread may start.
    assert (await run_row(database, behind.run["run_id"]))["ready_at"] is not None


async def test_a_run_that_has_just_come_waits_although_its_graph_is_gone(database: Database) -> None:
    await online(database, "another")
    await post_run(database, "ghost", input=GO)
    await missing(database)
    await query(database, AGE_ABSENCE)
    assert await missing(database) == ["ghost"]
    assert await end_graphless_runs(database, ["ghost"], after=DAY, batch=10) == []


async def test_a_fleet_that_is_off_has_lost_no_graph(database: Database) -> None:
    await post_run(database, "ghost", input=GO)
    await query(database, AGE_RUNS)
    assert await missing(database) == []
    worker_id = await online(database, "another")
    await missing(database)
    await query(database, AGE_ABSENCE)
    await query(database, DECLARE_LOST, worker_id)
    # It is off again, and whoever comes up first must not be taken for all there is.
    assert await missing(database) == []
    await online(database, "another")
    assert await missing(database) == []


async def test_the_count_begins_anew_when_the_graph_was_there_or_nobody_looked(database: Database) -> None:
    await online(database, "another")
    await post_run(database, "ghost", input=GO)
    await query(database, AGE_RUNS)
    await missing(database)
    await query(database, AGE_ABSENCE)
    await query(database, "UPDATE graph_absence SET seen_at = now() - interval '1 hour' RETURNING 1")
    assert await missing(database) == []
    await query(database, AGE_ABSENCE)
    worker_id = await online(database, "ghost")
    assert await missing(database) == []
    await query(database, DECLARE_LOST, worker_id)
    assert await missing(database) == []


async def test_a_graph_that_comes_back_at_the_last_moment_keeps_its_runs(database: Database) -> None:
    await online(database, "another")
    created = await post_run(database, "ghost", input=GO)
    await query(database, AGE_RUNS)
    await online(database, "ghost")
    assert await end_graphless_runs(database, ["ghost"], after=DAY, batch=10) == []
    assert (await run_row(database, created.run["run_id"]))["status"] == "pending"


async def test_runs_of_one_thread_are_put_aside_one_after_the_other(database: Database) -> None:
    await online(database, "another")
    created = await post_run(database, "ghost", input=GO)
    await post_run(database, "ghost", input=GO, thread_id=created.run["thread_id"])
    await query(database, AGE_RUNS)
    await missing(database)
    await query(database, AGE_ABSENCE)
    await upkeep(database)
    await upkeep(database)
    runs = await query(database, "SELECT status, dead_letter FROM run")
    assert [(run["status"], run["dead_letter"]) for run in runs] == [("error", "graph_gone")] * 2
    assert (await thread_row(database, created.run["thread_id"]))["status"] == "error"


async def test_runs_of_a_missing_graph_wait_for_ever_if_so_configured(database: Database) -> None:
    await online(database, "another")
    created = await post_run(database, "ghost", input=GO)
    await query(database, AGE_RUNS)
    await upkeep(database, graph_gone_after=0.0)
    assert await query(database, "SELECT 1 FROM graph_absence") == []
    assert (await run_row(database, created.run["run_id"]))["status"] == "pending"


async def test_a_promised_rollback_happens_all_the_same(settings: Settings, database: Database) -> None:
    async with open_station(settings, database, catalog_of(ghost=line(first))) as station:
        created = await post_run(database, "ghost", input=GO)
        [_] = await station.claim()
        await cancel_runs(database, created.run["thread_id"], None, "rollback")
        await query(
            database,
            "UPDATE run SET status = 'pending', worker_id = NULL, ready_at = now() - interval '2 days' RETURNING 1",
        )
        assert len(await end_graphless_runs(database, ["ghost"], after=DAY, batch=10)) == 1
    assert await query(database, "SELECT 1 FROM run") == []


async def test_a_graph_that_cannot_be_opened_any_more_is_gone(settings: Settings, database: Database) -> None:
    catalog = catalog_of(graph=line(first))
    async with open_station(settings, database, catalog) as station:
        created = await post_run(database, "graph", input=GO)
        [attempt] = await station.claim()
        del catalog._sources["graph"]
        await station.executor.execute(attempt)
    run = await run_row(database, created.run["run_id"])
    assert (run["status"], run["dead_letter"]) == ("error", "graph_gone")
    assert "graph" in run["error"]["message"]


async def test_a_letter_that_nobody_deals_with_is_a_failed_run_in_the_end(database: Database) -> None:
    await online(database, "another")
    for _ in range(2):
        await post_run(database, "ghost", input=GO)
    await query(database, AGE_RUNS)
    assert len(await end_graphless_runs(database, ["ghost"], after=DAY, batch=10)) == 2
    [old, *_] = await query(database, "SELECT run_id FROM run")
    aged = "UPDATE run SET finished_at = now() - interval '40 days' WHERE run_id = %s RETURNING 1"
    await query(database, aged, old["run_id"])
    await Sweeper(database, Metrics()).finish()
    assert [row["run_id"] for row in await query(database, "SELECT run_id FROM run WHERE dead_letter IS NULL")] == [
        old["run_id"]
    ]
    expired = await run_row(database, old["run_id"])
    assert (expired["settled_letter"], expired["letter_outcome"], expired["status"]) == (
        "graph_gone",
        "expired",
        "error",
    )


async def test_expired_keys_are_forgotten(database: Database) -> None:
    keep = """
    INSERT INTO idempotency_key (scope, key, fingerprint, kind, status, headers, body, created_at)
    SELECT '', n::text, '', 'whole', 200, %s, '', now() - n * interval '10 hours' FROM generate_series(1, 6) AS n
    RETURNING 1
    """
    await query(database, keep, orjson.dumps({}).decode())
    assert (await Sweeper(database, Metrics()).finish())["idempotency keys"] == 4
    assert [row["key"] for row in await query(database, "SELECT key FROM idempotency_key ORDER BY key")] == ["1", "2"]

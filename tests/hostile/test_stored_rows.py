"""Hostile values in every stored field that others fill: each hurts its own row at most.

For each table, hostile rows and usual ones lie side by side. Every read of the API, requests that change them, the
commands and every duty pass over all of them. No answer is 500, no loop fails, and the usual rows are served as if they
were alone.
At the end the sweeps remove all of it, in two of three groups.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import TupleRow

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.hostile.columns import fillable
from tests.hostile.estate import OF_TABLE, Copy, Estate, make_originals
from tests.hostile.logged import alarms, failed_loops, logged
from tests.hostile.readers import Reader
from tests.hostile.sweeping import swept
from tests.support.live_worker import running_worker
from tests.support.receiver import receiving
from tests.support.serving import answering
from tests.support.waiting import until

PROJECT = Path(__file__).parent / "project" / "langgraph.json"
PATIENCE = 100.0
# All are in the lists. Of single reads, each value in some column has its turn: all of them would take a minute more.
READ_ONE_IN = 3
# Of commands that show one run, one copy of many: it is the server that reads the rows.
COMMANDS_ONE_IN = 100
# Checks of `holdfast doctor` that fail while there is work and no worker.
WITHOUT_WORKER = ("workers", "stuck runs")
OPTIONS = "-c search_path=holdfast,public"
# What is due, and not over.
OPEN = {
    "run": "SELECT thread_id::text AS id, status || ' ' || attempt FROM run WHERE status IN ('pending', 'running') "
    "AND ready_at < now() + interval '1 minute'",
    "cron": "SELECT cron_id::text, next_run_date::text FROM cron WHERE enabled AND next_run_date <= now()",
    "interrupt": "SELECT thread_id::text, due_at::text FROM interrupt WHERE due_at <= now() AND settled_at IS NULL "
    "AND answered_by IS NULL",
    "webhook_delivery": "SELECT thread_id::text, last_error FROM webhook_delivery WHERE state = 'pending' "
    "AND next_attempt_at <= now()",
}
# What becomes of a row that is as it should be.
SERVED = {
    "queued": "SELECT status FROM run WHERE run_id = %(run_id)s",
    "orphaned": "SELECT status FROM run WHERE run_id = %(run_id)s",
    "poison": "SELECT dead_letter FROM run WHERE run_id = %(run_id)s",
    "undelivered": "SELECT state FROM webhook_delivery WHERE run_id = %(earlier)s",
    "due": "SELECT status FROM run WHERE thread_id = %(thread_id)s ORDER BY created_at DESC LIMIT 1",
    "woken": "SELECT status FROM run WHERE run_id = %(run_id)s",
    "firing": "SELECT status FROM run WHERE metadata ->> 'cron_id' = %(cron_id)s",
}
EXPECTED = {"poison": "poison", "undelivered": "delivered"}

# Together, because one of everything is made for each, and in three, for three processes.
GROUPS = {
    "runs": ("run",),
    "threads": ("thread", "event", "checkpoints", "checkpoint_blobs", "checkpoint_writes", "child", "budget_pot"),
    "others": (
        *("interrupt", "webhook_delivery", "cron", "assistant"),
        *("assistant_version", "idempotency_key", "store"),
    ),
}
assert sorted(table for tables in GROUPS.values() for table in tables) == sorted(OF_TABLE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
async def test_hostile_rows_hurt_only_themselves(
    settings: Settings, database_url: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = GraphCatalog.load(load_config(PROJECT))
    complaints: list[str] = []
    with logged() as logs:
        try:
            async with receiving() as receiver, answering(settings, catalog) as client:
                reader = Reader(client, complaints)
                async with running_worker(settings, catalog):
                    originals = await make_originals(client, database_url, receiver.url)
                with psycopg.connect(database_url, options=OPTIONS, autocommit=True) as connection:
                    estate = Estate(connection, originals)
                    copies = [
                        copy for table in GROUPS[group] for copy in estate.fill(table, fillable(connection, table))
                    ]
                    neighbours = [copy for copy in copies if copy.neighbour]
                    await reader.read_lists()
                    await reader.examine(database_url, failing=WITHOUT_WORKER)
                    async with running_worker(settings, catalog):
                        complaints += await unserved(connection, neighbours)
                        complaints += await still_open(connection, copies)
                        await reader.examine(database_url)
                    await reader.read_lists()
                    different = list({copy.name: copy for copy in copies}.values())
                    await reader.read(
                        [*different[::READ_ONE_IN], *(copy for copy in different if copy.state == "single")]
                    )
                    await reader.change(copies)
                    # There, runs may wait for a child that nobody finds any more, and pruning takes long.
                    if group != "threads":
                        await reader.repeat(different[::READ_ONE_IN], originals["kept"])
                        await reader.command(different[::COMMANDS_ONE_IN])
                        complaints += await swept(client, connection, settings, copies)
        finally:
            print("\n".join(alarms(logs)))
    complaints += failed_loops(logs)
    complaints += [f"log: {record.getMessage()} {record.exc_text}" for record in caplog.records if record.exc_info]
    assert not complaints, f"{len(complaints)} in {group}:\n" + "\n".join(complaints[:100])


async def unserved(connection: psycopg.Connection[TupleRow], neighbours: list[Copy]) -> list[str]:
    """Wait until each row that is as it should be has been served. Returns those that have not been in time."""
    waiting = [copy for copy in neighbours if copy.state in SERVED]

    async def all_served() -> bool:
        for copy in list(waiting):
            row = connection.execute(SERVED[copy.state].encode(), copy.names).fetchone()
            if row is not None and row[0] == EXPECTED.get(copy.state, "success"):
                waiting.remove(copy)
        return not waiting

    with suppress(AssertionError):
        await until(all_served, "usual rows are served", patience=PATIENCE)
    return [f"not served: {copy}" for copy in waiting]


async def still_open(connection: psycopg.Connection[TupleRow], copies: list[Copy]) -> list[str]:
    """Wait until nothing is due any more, hostile or not. Returns what is."""
    by_id = {identity: str(copy) for copy in copies for identity in copy.ids}

    def left() -> list[str]:
        return [
            f"without an outcome: {table} {state}: {by_id.get(identity, identity)}"
            for table, statement in OPEN.items()
            for identity, state in connection.execute(statement.encode()).fetchall()
        ]

    async def closed() -> bool:
        return not left()

    with suppress(AssertionError):
        await until(closed, "everything has an outcome", patience=PATIENCE)
    return left()

"""Each duty of the upkeep goes round a row that the database refuses to change.

The duties and the sweeps are found, not listed: a new one fails here until it has a case.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.engine.children.parents import NEVER
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.resources.assistants import ensure_system_assistants
from holdfast.settings import Settings, load_settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.leader import Upkeep
from holdfast.upkeep.sweeper import MAX_FAILURES_IN_A_ROW, Sweeper
from tests.engine.scene import create, declare_lost, online_worker
from tests.support.records import query
from tests.support.smoke import EXAMPLES
from tests.support.waiting import until
from tests.upkeep.test_bad_rows import INSERT_CHECKPOINT, OLD, QUESTION, age_history
from tests.upkeep.test_crons import cron, make_due

# A row is bad if one of its columns has a value.
REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_jsonb(coalesce(OLD, NEW)) ->> TG_ARGV[0] = TG_ARGV[1] THEN
        RAISE EXCEPTION 'this row is bad' USING ERRCODE = 'data_exception';
    END IF;
    RETURN coalesce(NEW, OLD);
END $$
"""
REFUSE_ROW = """
CREATE TRIGGER refuse BEFORE UPDATE OR DELETE ON {} FOR EACH ROW EXECUTE FUNCTION refuse('{}', '{}')
"""


@dataclass(frozen=True)
class Case:
    """`plant` puts two rows there, the bad one first, and returns what is in their `column`. `served` is a query that
    finds the good one when it is done. `reported_as`: as what, if not as the duty."""

    duty: str
    table: str
    column: str
    plant: Callable[[Database], Awaitable[Sequence[Any]]]
    served: str
    event: str = "upkeep.row_set_aside"
    reported_as: str | None = None


def settings_of(database_url: str) -> Settings:
    given = {"REAPER_INTERVAL_SECONDS": "0.1", "GRAPH_GONE_AFTER_SECONDS": "1", "MAX_CRASHES": "3"}
    return load_settings(given, database_url=database_url)


async def new_runs(database: Database) -> list[UUID]:
    return [(await create(database, uuid4())).run["run_id"] for _ in range(2)]


async def lost_workers(database: Database) -> list[UUID]:
    workers = [await online_worker(database) for _ in range(2)]
    await query(database, "UPDATE worker SET lease_until = now() - interval '1 s' RETURNING 1")
    return workers


async def orphans(database: Database) -> list[UUID]:
    worker_id = await online_worker(database)
    runs = await new_runs(database)
    running = (
        "UPDATE run SET status = 'running', worker_id = %s, fence = 1, attempt = 1, started_at = now() RETURNING 1"
    )
    await query(database, running, worker_id)
    await declare_lost(database, worker_id)
    return runs


async def abandoned_children(database: Database) -> list[UUID]:
    children = await new_runs(database)
    for number, child in enumerate(children):
        parent = uuid4()
        await query(database, "UPDATE run SET parent_run_id = %s WHERE run_id = %s RETURNING 1", parent, child)
        await query(
            database,
            "INSERT INTO abandoned (run_id, abandoned_at) VALUES (%s, now() - %s * interval '1 s') RETURNING 1",
            parent,
            9 - number,
        )
    return children


async def abandoned_parents(database: Database) -> list[UUID]:
    await abandoned_children(database)
    return [row["run_id"] for row in await query(database, "SELECT run_id FROM abandoned ORDER BY abandoned_at")]


async def waiting_parents(database: Database) -> list[UUID]:
    runs = await new_runs(database)
    await query(database, f"UPDATE run SET ready_at = {NEVER}, started_at = now() RETURNING 1")
    return runs


async def runs_without_graph(database: Database) -> list[UUID]:
    await online_worker(database)
    runs = await new_runs(database)
    await query(database, "UPDATE run SET ready_at = now() - interval '2 days' RETURNING 1")
    return runs


async def due_questions(database: Database) -> list[str]:
    for run_id, interrupt_id, late in zip(await new_runs(database), ("bad", "good"), ("9 s", "1 s"), strict=True):
        await query(database, QUESTION, interrupt_id, late, run_id)
    return ["bad", "good"]


async def due_crons(database: Database) -> list[UUID]:
    await ensure_system_assistants(database, GraphCatalog.load(load_config(EXAMPLES)))
    crons = [await cron(database) for _ in range(2)]
    await make_due(database, *crons)
    await query(
        database,
        "UPDATE cron SET next_run_date = next_run_date - interval '1 s' WHERE cron_id = %s RETURNING 1",
        crons[0],
    )
    return crons


async def due_deliveries(database: Database) -> list[UUID]:
    # To a route of a project that has none: they are given up without a call.
    insert = (
        "INSERT INTO webhook_delivery (run_id, thread_id, url, run, next_attempt_at) "
        "VALUES (%s, %s, '/hook', '{}', now() - %s * interval '1 s') RETURNING delivery_id"
    )
    return [(await query(database, insert, uuid4(), uuid4(), late))[0]["delivery_id"] for late in (9, 1)]


async def expired_items(database: Database) -> list[str]:
    await query(
        database,
        "INSERT INTO store (prefix, key, value, expires_at) "
        "VALUES ('a', 'bad', '{}', now() - interval '9 s'), ('a', 'good', '{}', now() - interval '1 s') RETURNING 1",
    )
    return ["bad", "good"]


RELEASED = "SELECT 1 FROM run WHERE run_id = %s AND status = 'pending' AND ready_at <= now()"

CASES = [
    Case(
        "takeover",
        "worker",
        "worker_id",
        lost_workers,
        "SELECT 1 FROM worker WHERE worker_id = %s AND status = 'lost'",
        "upkeep.duty_failing",
    ),
    Case("takeover", "run", "run_id", orphans, RELEASED),
    Case(
        "families",
        "run",
        "run_id",
        abandoned_children,
        "SELECT 1 FROM run WHERE run_id = %s AND status = 'interrupted'",
    ),
    Case(
        "families",
        "abandoned",
        "run_id",
        abandoned_parents,
        "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM abandoned WHERE run_id = %s)",
    ),
    Case("families", "run", "run_id", waiting_parents, RELEASED),
    Case(
        "letters",
        "run",
        "run_id",
        runs_without_graph,
        "SELECT 1 FROM run WHERE run_id = %s AND dead_letter = 'graph_gone'",
    ),
    Case(
        "deadlines",
        "interrupt",
        "interrupt_id",
        due_questions,
        "SELECT 1 FROM interrupt WHERE interrupt_id = %s AND (due_at IS NULL OR answered_by IS NOT NULL)",
    ),
    Case(
        "crons",
        "cron",
        "cron_id",
        due_crons,
        "SELECT 1 FROM run WHERE metadata ->> 'cron_id' = %s::uuid::text",
    ),
    Case(
        "webhooks",
        "webhook_delivery",
        "delivery_id",
        due_deliveries,
        "SELECT 1 FROM webhook_delivery WHERE delivery_id = %s AND state = 'failed'",
    ),
    Case(
        "items",
        "store",
        "key",
        expired_items,
        "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM store WHERE key = %s)",
        reported_as="sweep of store items",
    ),
]


async def refuse(database: Database, table: str, column: str, value: object) -> None:
    async with database.transaction() as connection:
        await connection.execute(REFUSE)
        await connection.execute(REFUSE_ROW.format(table, column, value).encode())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.duty}-{case.table}-{case.plant.__name__}")
async def test_a_duty_goes_round_a_row_that_is_refused(database: Database, database_url: str, case: Case) -> None:
    bad, good = await case.plant(database)
    await refuse(database, case.table, case.column, bad)
    leading = Database(settings_of(database_url), "test")
    await leading.open()
    with capture_logs() as logs:
        upkeep = Upkeep(leading, PostgresSignals(leading), Metrics())
        await upkeep.start()
        try:

            async def served() -> bool:
                reported = {line["duty"] for line in logs if line["event"] == case.event}
                return bool(await query(database, case.served, good)) and reported == {case.reported_as or case.duty}

            await until(served, "the good row is served, and the bad one is reported")
        finally:
            await upkeep.stop()
            await leading.close()
    assert await query(database, case.served, bad) == []


def test_each_duty_has_a_case(database_url: str) -> None:
    database = Database(settings_of(database_url), "test")
    duties = {duty.name for duty in Upkeep(database, PostgresSignals(database), Metrics()).duties}
    # These two are not in the list: they have sessions and tasks of their own.
    duties |= {"takeover", "webhooks"}
    assert duties - {"sweeps"} == {case.duty for case in CASES}


# --- sweeps: what makes the two threads, or their runs, due, and how to see that the good one is done ---------------

# The bad one is older, so that it is taken first.
LONG_AGO = "now() - interval '99 days' - (thread_id = %s)::integer * interval '1 day'"
NO_RUNS = "DELETE FROM run RETURNING 1"
ENDED = f"UPDATE run SET status = 'success', ready_at = NULL, finished_at = {LONG_AGO}"
WITH_TTL = f"UPDATE thread SET status = 'idle', ttl_minutes = 1, expires_at = {LONG_AGO}"
GONE = "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM {} WHERE {} = %s)"
THREAD_GONE = GONE.format("thread", "thread_id")
LATER = "SELECT 1 FROM thread WHERE thread_id = %s AND expires_at > now()"
DELIVERED = f"""
INSERT INTO webhook_delivery (delivery_id, run_id, thread_id, url, run, state, settled_at)
SELECT thread_id, gen_random_uuid(), thread_id, '/', '{{}}', 'failed', {LONG_AGO} FROM thread RETURNING 1
"""
KEPT = f"""
INSERT INTO idempotency_key (scope, key, fingerprint, kind, status, headers, body, created_at)
SELECT '', thread_id, '', 'whole', 200, '{{}}', '', {LONG_AGO} FROM thread RETURNING 1
"""
SPENT = f"INSERT INTO tenant_spend (tenant_id, day, part) SELECT thread_id, {LONG_AGO}, 0 FROM thread RETURNING 1"
STOPPED = f"""
INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until, stopped_at)
SELECT thread_id, 'offline', '', 0, '', 1, '{{}}', now(), {LONG_AGO} FROM thread RETURNING 1
"""
EXPIRED = f"""
INSERT INTO store (prefix, key, value, expires_at) SELECT 'a', thread_id, '{{}}', {LONG_AGO} FROM thread RETURNING 1
"""


@dataclass(frozen=True)
class SweepCase:
    """`due` makes both due. `column` of `table` has the id of the thread, or of its run if it is `run_id`."""

    table: str
    column: str
    due: str
    served: str
    keeps_runs: bool = False


SWEEPS = {
    "temporary threads": SweepCase(
        "thread",
        "thread_id",
        f"UPDATE thread SET temporary = true, hidden_at = {LONG_AGO} RETURNING 1",
        THREAD_GONE,
    ),
    "resting threads": SweepCase(
        "thread", "thread_id", f"UPDATE thread SET status = 'idle', updated_at = {LONG_AGO} RETURNING 1", THREAD_GONE
    ),
    "runs' events": SweepCase(
        "run",
        "run_id",
        f"{ENDED}, first_seq = 1 RETURNING 1",
        "SELECT 1 FROM run WHERE run_id = %s AND first_seq IS NULL",
        keeps_runs=True,
    ),
    "undone runs' events": SweepCase(
        "thread",
        "thread_id",
        f"UPDATE thread SET undone_at = {LONG_AGO} RETURNING 1",
        "SELECT 1 FROM thread WHERE thread_id = %s AND undone_at IS NULL",
    ),
    "finished runs": SweepCase(
        "run", "run_id", f"{ENDED}, first_seq = NULL RETURNING 1", GONE.format("run", "run_id"), keeps_runs=True
    ),
    "webhook deliveries": SweepCase(
        "webhook_delivery", "delivery_id", DELIVERED, GONE.format("webhook_delivery", "delivery_id")
    ),
    "undecided dead letters": SweepCase(
        "run",
        "run_id",
        f"{ENDED.replace('success', 'error')}, dead_letter = 'poison' RETURNING 1",
        "SELECT 1 FROM run WHERE run_id = %s AND dead_letter IS NULL",
        keeps_runs=True,
    ),
    "threads that are still active": SweepCase(
        "thread", "thread_id", f"{WITH_TTL}, ttl_strategy = 'delete', updated_at = now() RETURNING 1", LATER
    ),
    "threads with a time to live": SweepCase(
        "thread",
        "thread_id",
        f"{WITH_TTL}, ttl_strategy = 'delete', updated_at = created_at - interval '9 days' RETURNING 1",
        THREAD_GONE,
    ),
    "threads' past states": SweepCase(
        "thread",
        "thread_id",
        f"{WITH_TTL}, ttl_strategy = 'keep_latest', updated_at = created_at - interval '9 days' RETURNING 1",
        LATER,
    ),
    "checkpoints": SweepCase(
        "checkpoints",
        "thread_id",
        f"UPDATE thread SET created_at = {LONG_AGO} RETURNING 1",
        "SELECT 1 FROM thread WHERE thread_id = %s AND history_from IS NOT NULL",
    ),
    "idempotency keys": SweepCase("idempotency_key", "key", KEPT, GONE.format("idempotency_key", "key::uuid")),
    "days of spending": SweepCase("tenant_spend", "tenant_id", SPENT, GONE.format("tenant_spend", "tenant_id::uuid")),
    "stopped workers": SweepCase("worker", "worker_id", STOPPED, GONE.format("worker", "worker_id")),
    "store items": SweepCase("store", "key", EXPIRED, GONE.format("store", "key::uuid")),
}


def eager(settings: Settings) -> Settings:
    ttls = dict.fromkeys(("thread_ttl", "finished_run_ttl", "dead_letter_ttl", "checkpoint_ttl"), 60.0)
    return settings.model_copy(update=ttls)


@pytest.mark.parametrize("what", SWEEPS)
async def test_a_sweep_goes_round_a_row_that_is_refused(settings: Settings, database: Database, what: str) -> None:
    case = SWEEPS[what]
    created = [(await create(database, uuid4())).run for _ in range(2)]
    if not case.keeps_runs:
        await query(database, NO_RUNS)
    for run in created:
        await age_history(database, run["thread_id"])
        for number in (1, 2):
            await query(database, INSERT_CHECKPOINT, str(run["thread_id"]), OLD.format(number), "{}")
    await query(database, case.due, created[0]["thread_id"])
    key = "run_id" if case.keeps_runs else "thread_id"
    bad, good = (run[key] for run in created)
    await refuse(database, case.table, case.column, bad)
    sweeping = Database(eager(settings), "test")
    await sweeping.open()
    try:
        sweeper = Sweeper(sweeping, Metrics())
        [chore] = [chore for chore in (*sweeper._chores, sweeper._items) if chore.what == what]
        with capture_logs() as logs:
            # All of it is done, as `holdfast sweep` does.
            await sweeper._finish(chore)
    finally:
        await sweeping.close()
    assert await query(database, case.served, good)
    assert await query(database, case.served, bad) == []
    reported = [line for line in logs if line["event"] == "upkeep.row_set_aside"]
    assert [line["duty"] for line in reported] in ([f"sweep of {what}"], ["sweeps"])


def test_each_sweep_has_a_case(database_url: str) -> None:
    sweeper = Sweeper(Database(settings_of(database_url), "test"), Metrics())
    assert {chore.what for chore in (*sweeper._chores, sweeper._items)} == set(SWEEPS)


REFUSED_KEYS = f"""
INSERT INTO idempotency_key (scope, key, fingerprint, kind, status, headers, body, created_at)
SELECT 'bad', n::text, '', 'whole', 200, '{{}}', '', now() - interval '99 days'
FROM generate_series(0, {MAX_FAILURES_IN_A_ROW}) n
RETURNING 1
"""


async def test_a_sweep_that_fails_again_and_again_keeps_no_other_from_the_end(database: Database) -> None:
    await query(database, REFUSED_KEYS)
    await expired_items(database)
    await refuse(database, "idempotency_key", "scope", "bad")
    with capture_logs() as logs, pytest.raises(psycopg.DataError, match="this row is bad"):
        await Sweeper(database, Metrics()).finish()
    assert not await query(database, "SELECT FROM store")
    assert [line["duty"] for line in logs if line["event"] == "upkeep.duty_failing"] == ["sweep of idempotency keys"]

"""What the statements on the hot path read, in a database with a past and a backlog: a few rows, found by an index.

Each is measured with the settings Holdfast gives its connections and, as behind PgBouncer, without them; with a plan
made for the parameters and with the one that serves all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from psycopg import Connection
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row

from holdfast.db.connect import connection_parameters, open_blocking_session
from holdfast.engine import (
    claim,
    new_run,
    upcoming,
)
from holdfast.settings import load_settings
from tests.engine.hot_statements import (
    AT_THEIR_LIMIT,
    BY_KEY,
    CLAIM_TEN,
    CLAIMS,
    STATEMENTS,
    Statement,
)
from tests.engine.plans import (
    GRAPH,
    Prepared,
    fill,
    filled_database,
    measure,
    readings,
    undone,
)
from tests.support.databases import TEMPLATE


@pytest.fixture(scope="module")
def filled_url(server_url: str) -> Iterator[str]:
    with filled_database(server_url) as url:
        yield url


@pytest.fixture
def filled(filled_url: str) -> Iterator[Connection[DictRow]]:
    with undone(filled_url) as connection:
        yield connection


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.name)
def test_a_hot_statement_reads_a_few_rows_by_index(filled: Connection[DictRow], statement: Statement) -> None:
    if statement.after is not None:
        filled.execute(statement.after[0].encode(), statement.after[1]())
    for reading in readings(filled, statement.text, statement.parameters()):
        shown = json.dumps(reading.plan, indent=1)
        assert not reading.whole_tables, shown
        assert reading.rows <= statement.rows, shown


def test_plans_made_anew_go_from_key_to_key_before_anybody_has_counted_the_rows(server_url: str) -> None:
    """Of the journal and of group commits, whose plans are kept for a while: first for tables that are empty."""
    name, far = f"test_{uuid4().hex[:12]}", list[str]()
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}".encode())
        settings = load_settings({}, database_url=make_conninfo(server_url, dbname=name))
        with (
            Connection[DictRow].connect(
                connection_parameters(settings, "test", session=True, generic_plans=True), row_factory=dict_row
            ) as kept,
            open_blocking_session(settings, "test") as filling,
        ):
            prepared = [Prepared(kept, f"kept_{place}", statement.text) for place, statement in enumerate(BY_KEY)]
            for statement, plan in zip(BY_KEY, prepared, strict=True):
                plan.explain("COSTS OFF", statement.parameters())
            kept.commit()
            fill(filling, known=False)
            kept.execute("DISCARD PLANS")
            for statement, plan in zip(BY_KEY, prepared, strict=True):
                if statement.after is not None:
                    kept.execute(statement.after[0].encode(), statement.after[1]())
                reading = plan.measure(statement.parameters())
                kept.rollback()
                if reading.whole_tables or reading.rows > statement.rows:
                    far.append(f"{statement.name} reads {reading.rows:.0f} rows: {json.dumps(reading.plan, indent=1)}")
        server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
    assert not far, "\n".join(far)


# --- claiming, which must cost the same whatever waits --------------------------------------------------------------


@pytest.mark.parametrize("statement", CLAIMS, ids=["plain", "fairly"])
def test_claiming_reads_the_same_with_and_without_a_backlog(filled: Connection[DictRow], statement: str) -> None:
    """Ten due runs cost as much in front of thousands that are not due, or wait behind another, as they do alone."""
    busy = [reading.rows for reading in readings(filled, statement, CLAIM_TEN)]
    filled.execute("DELETE FROM run WHERE ready_at > now() OR status = 'pending' AND ready_at IS NULL")
    alone = [reading.rows for reading in readings(filled, statement, CLAIM_TEN)]
    # A priority at which nothing is due costs a look.
    assert all(with_backlog <= without + 5 for with_backlog, without in zip(busy, alone, strict=True))


@pytest.mark.parametrize("priorities", [1, 5])
@pytest.mark.parametrize("statement", CLAIMS, ids=["plain", "fairly"])
def test_claiming_when_nothing_is_due(filled: Connection[DictRow], statement: str, priorities: int) -> None:
    filled.execute(
        "UPDATE run SET ready_at = now() + interval '1 day', priority = abs(hashtext(run_id::text)) %% %s "
        "WHERE status = 'pending' AND ready_at IS NOT NULL",
        (priorities,),
    )
    # Before Postgres 18, EXPLAIN rounds the rows of a loop to a whole number: the steps from priority to priority count
    # as one more.
    rounded = int(filled.info.server_version < 180000)
    for reading in readings(filled, statement, CLAIM_TEN):
        assert reading.rows <= 2 * priorities + 2 + rounded, json.dumps(reading.plan, indent=1)


def test_claiming_after_many_have_finished(database_url: str) -> None:
    """Finished runs leave entries in the queue's index until it is vacuumed. Whoever passes them marks them, so that
    the next claim does not read them again."""
    with open_blocking_session(load_settings({}, database_url=database_url), "test") as connection:
        fill(connection)
        connection.execute("ALTER TABLE run SET (autovacuum_enabled = off)")
        with connection.transaction(force_rollback=True):
            before = measure(connection, claim.CLAIM, CLAIM_TEN, generic=False)
        connection.execute(
            """
            WITH waiting AS (
                INSERT INTO thread (thread_id) SELECT gen_random_uuid() FROM generate_series(1, 5000)
                RETURNING thread_id
            )
            INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, ready_at, priority, kwargs)
            SELECT gen_random_uuid(), thread_id, gen_random_uuid(), %s, now() - interval '2 hours',
                   now() - interval '2 hours', 2, '{}' FROM waiting
            """,
            (GRAPH,),
        )
        connection.execute(
            "UPDATE run SET status = 'success', ready_at = NULL, finished_at = now() "
            "WHERE ready_at < now() - interval '90 minutes'"
        )
        # The first marks them, unless somebody (autovacuum, in another table) still has a snapshot from before.
        deadline = time.monotonic() + 60
        while True:
            with connection.transaction(force_rollback=True):
                after = measure(connection, claim.CLAIM, CLAIM_TEN, generic=False)
            if after.pages <= 2 * before.pages + 50 or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        assert after.rows <= before.rows
        assert after.pages <= 2 * before.pages + 50


def test_claiming_does_not_read_what_no_worker_has_a_graph_for(filled: Connection[DictRow]) -> None:
    """Nor the backlog of a tenant whose turn it is not, nor one behind its limit."""
    before = [reading.rows for reading in readings(filled, claim.CLAIM_FAIRLY, CLAIM_TEN)]
    filled.execute("INSERT INTO tenant (tenant_id, max_running) VALUES ('full', 0)")
    for tenant, graph in (("", "gone"), ("acme", "gone"), ("acme", GRAPH), ("full", GRAPH)):
        filled.execute(
            """
            WITH waiting AS (
                INSERT INTO thread (thread_id) SELECT gen_random_uuid() FROM generate_series(1, 3000)
                RETURNING thread_id
            )
            INSERT INTO run
                (run_id, thread_id, tenant_id, assistant_id, graph_id, created_at, ready_at, priority, kwargs)
            SELECT gen_random_uuid(), thread_id, %s, gen_random_uuid(), %s, now() - interval '9 hours',
                   now() - interval '9 hours', 0, '{}' FROM waiting
            """,
            (tenant, graph),
        )
    for reading, alone in zip(readings(filled, claim.CLAIM_FAIRLY, CLAIM_TEN), before, strict=True):
        assert not reading.whole_tables, json.dumps(reading.plan, indent=1)
        assert reading.rows <= alone + 60, json.dumps(reading.plan, indent=1)


def test_claiming_steps_over_a_flood_of_high_priority_of_another_tenant(filled: Connection[DictRow]) -> None:
    """At every priority that there is, due and not due. Each costs a probe, and nothing of the flood is read."""
    before = [reading.rows for reading in readings(filled, claim.CLAIM_FAIRLY, CLAIM_TEN)]
    priorities = 2 * new_run.MAX_PRIORITY + 1
    for tenant, due in (("acme", "1 day"), ("full", "-1 hours")):
        filled.execute(
            """
            WITH waiting AS (
                INSERT INTO thread (thread_id) SELECT gen_random_uuid() FROM generate_series(1, 5000)
                RETURNING thread_id
            )
            INSERT INTO run
                (run_id, thread_id, tenant_id, assistant_id, graph_id, created_at, ready_at, priority, kwargs)
            SELECT gen_random_uuid(), thread_id, %s, gen_random_uuid(), %s, now(), now() + %s::interval,
                   row_number() OVER () %% %s - %s, '{}' FROM waiting
            """,
            (tenant, GRAPH, due, priorities, new_run.MAX_PRIORITY),
        )
    filled.execute("INSERT INTO tenant (tenant_id, max_running) VALUES ('full', 0)")
    for reading, alone in zip(readings(filled, claim.CLAIM_FAIRLY, CLAIM_TEN), before, strict=True):
        assert not reading.whole_tables, json.dumps(reading.plan, indent=1)
        assert reading.rows <= alone + priorities + 20, json.dumps(reading.plan, indent=1)


def test_next_due_finds_what_is_due_soonest_whatever_is_urgent_later(filled: Connection[DictRow]) -> None:
    """There are runs of a higher priority that are due tomorrow."""
    due = filled.execute(
        "UPDATE run SET ready_at = now() + interval '5 seconds', priority = -1 "
        "WHERE run_id = (SELECT run_id FROM run WHERE status = 'pending' AND ready_at < now() LIMIT 1) RETURNING run_id"
    ).fetchone()
    found = filled.execute(upcoming.NEXT_DUE).fetchone()
    assert due is not None
    assert found is not None
    assert found["run_id"] == due["run_id"]


def test_claiming_without_tenants_takes_nothing_when_there_are_some(filled: Connection[DictRow]) -> None:
    filled.execute(
        "UPDATE run SET tenant_id = 'acme' "
        "WHERE run_id = (SELECT run_id FROM run WHERE status = 'pending' AND ready_at < now() LIMIT 1)"
    )
    rows = filled.execute(claim.CLAIM, CLAIM_TEN).fetchall()
    assert [(row["run_id"], row["fairly"]) for row in rows] == [(None, True)]


def test_claiming_visits_a_few_of_many_tenants_at_their_limit(filled: Connection[DictRow]) -> None:
    """Each has a run that runs, one that is queued, and may have no more."""
    for statement in AT_THEIR_LIMIT:
        filled.execute(statement)
    filled.execute("ANALYZE run; ANALYZE tenant")
    # Each visit reads a row of the queue, of the tenant and of its running runs.
    for reading in readings(filled, claim.CLAIM_FAIRLY, {**CLAIM_TEN, "after": "tenant-100"}):
        assert reading.rows <= 8 * claim.MAX_TENANTS_VISITED, json.dumps(reading.plan, indent=1)

"""A database with a past and a backlog, and what a statement really reads in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import ClientCursor, Connection
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, tuple_row

from holdfast.db.connect import open_blocking_session
from holdfast.settings import load_settings
from tests.support.databases import TEMPLATE

GRAPH = "graph"
# Tables that may be read as a whole. Every other one grows, and is filled below.
SMALL_TABLES = {
    "worker": "a row for each process of the last days",
    "tenant": "a row for each customer of the operator",
    "api_key": "a few for each tenant",
    "graph_absence": "a row for each graph that runs name and no worker has",
    "abandoned": "a queue of runs whose children are to be cancelled, within seconds",
    "holdfast_migration": "a row for each migration",
    "checkpoint_migrations": "a row for each migration of LangGraph's",
    "store_migrations": "a row for each migration of LangGraph's",
}

THREADS = 5_000
RUNS_PER_THREAD = 4
RUNNING = 1_000
DUE = 500
BACKLOG = 5_000
TOMORROW = 3_000
EVENTS_PER_THREAD = 10


def thread_at(number: int) -> UUID:
    return UUID(f"00000000-0000-4000-8000-{number:012d}")


def run_at(thread: int, place: int) -> UUID:
    return UUID(f"00000000-0000-4000-9000-{thread:08d}{place:04d}")


# The first threads have a running run, those after them one that is due, all of these more that wait; the others rest.
FILL = [
    """
    INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until)
    SELECT ('00000000-0000-4000-a000-' || lpad(n::text, 12, '0'))::uuid, 'online', '', 0, '', 10, '{}',
           now() + interval '1 hour' FROM generate_series(1, 100) AS n
    """,
    """
    INSERT INTO thread (thread_id, status, has_state, last_seq)
    SELECT ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid,
           CASE WHEN n <= %(busy)s THEN 'busy' ELSE 'idle' END, true, %(events)s
    FROM generate_series(1, %(threads)s) AS n
    """,
    """
    INSERT INTO run (run_id, thread_id, assistant_id, graph_id, status, created_at, ready_at, finished_at, worker_id,
                     fence, priority, kwargs)
    SELECT ('00000000-0000-4000-9000-' || lpad(n::text, 8, '0') || lpad(place::text, 4, '0'))::uuid,
           ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid, gen_random_uuid(), %(graph)s,
           CASE WHEN n > %(busy)s OR place = 1 THEN 'success'
                WHEN place = 2 AND n <= %(running)s THEN 'running' ELSE 'pending' END,
           now() - interval '1 hour' + (n * 10 + place) * interval '10 ms',
           CASE WHEN n <= %(busy)s AND place = 2
                THEN now() - interval '1 hour' + (n * 10 + place) * interval '10 ms' END,
           CASE WHEN n > %(busy)s OR place = 1 THEN now() - interval '30 minutes' END,
           CASE WHEN n <= %(running)s AND place = 2
                THEN ('00000000-0000-4000-a000-' || lpad((n %% 100 + 1)::text, 12, '0'))::uuid END,
           1, n %% 3, '{}'
    FROM generate_series(1, %(threads)s) AS n, generate_series(1, %(runs)s) AS place
    """,
    # A backlog behind the running run of thread 1.
    """
    INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, kwargs)
    SELECT gen_random_uuid(), '00000000-0000-4000-8000-000000000001', gen_random_uuid(), %(graph)s,
           now() - interval '10 minutes' + n * interval '1 ms', '{}'
    FROM generate_series(1, %(backlog)s) AS n
    """,
    # More urgent than everything else, but not before tomorrow.
    """
    WITH sleeping AS (
        INSERT INTO thread (thread_id, status) SELECT gen_random_uuid(), 'busy' FROM generate_series(1, %(tomorrow)s)
        RETURNING thread_id
    )
    INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, ready_at, priority, kwargs)
    SELECT gen_random_uuid(), thread_id, gen_random_uuid(), %(graph)s, now() + interval '1 day',
           now() + interval '1 day', 10, '{}' FROM sleeping
    """,
    """
    INSERT INTO event (thread_id, seq, run_id, kind, data)
    SELECT ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid, seq,
           ('00000000-0000-4000-9000-' || lpad(n::text, 8, '0') || '0001')::uuid, 'values', '{}'
    FROM generate_series(1, %(threads)s) AS n, generate_series(1, %(events)s) AS seq
    """,
    """
    INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint, metadata)
    SELECT '00000000-0000-4000-8000-' || lpad(n::text, 12, '0'), '', lpad(step::text, 8, '0'),
           jsonb_build_object('channel_versions', jsonb_build_object('channel', step::text)),
           jsonb_build_object('run_id', '00000000-0000-4000-9000-' || lpad(n::text, 8, '0') || '0001')
    FROM generate_series(1, %(threads)s) AS n, generate_series(1, 3) AS step
    """,
    """
    INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type, blob)
    SELECT thread_id, '', 'channel', checkpoint -> 'channel_versions' ->> 'channel', 'json', '1' FROM checkpoints
    """,
    """
    INSERT INTO checkpoint_writes
        (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
    SELECT thread_id, '', checkpoint_id, 'task', '', 0, 'channel', 'json', '1' FROM checkpoints
    """,
    # Most are delivered, the others are due.
    """
    INSERT INTO webhook_delivery
        (delivery_id, run_id, thread_id, url, run, state, next_attempt_at, created_at, delivered_at, settled_at)
    SELECT run_id, run_id, thread_id, 'https://receiver' || right(run_id::text, 1) || '/', '{}',
           CASE WHEN priority = 0 THEN 'pending' ELSE 'delivered' END,
           now() - interval '1 hour', created_at,
           CASE WHEN priority <> 0 THEN now() END, CASE WHEN priority <> 0 THEN now() END
    FROM run WHERE status = 'success'
    """,
    # Each thread has been asked often; some wait, most of them with a deadline that is far away.
    """
    INSERT INTO interrupt (thread_id, interrupt_id, run_id, value, asked_at, deadline_at, due_at, answered_by,
                           settled_at)
    SELECT ('00000000-0000-4000-8000-' || lpad(n::text, 12, '0'))::uuid, md5(n::text || place), gen_random_uuid(), '{}',
           now() - interval '1 day', now() + interval '1 day', now() + interval '1 day',
           CASE WHEN place > 1 THEN gen_random_uuid() END, CASE WHEN place > 1 THEN now() - place * interval '1 h' END
    FROM generate_series(1, %(threads)s) AS n, generate_series(1, 5) AS place WHERE place > 1 OR n %% 4 = 0
    """,
    """
    INSERT INTO assistant (assistant_id, graph_id, name)
    SELECT ('00000000-0000-4000-b000-' || lpad(n::text, 12, '0'))::uuid, 'graph-' || n %% 50, 'Assistant ' || n
    FROM generate_series(1, %(threads)s) AS n
    """,
    """
    INSERT INTO assistant_version (assistant_id, version, graph_id, name, config, context, metadata)
    SELECT assistant_id, number, graph_id, name, '{}', '{}', '{}' FROM assistant, generate_series(1, 2) AS number
    """,
    # One in a hundred is due within the hour.
    """
    INSERT INTO cron (cron_id, assistant_id, schedule, next_run_date, on_run_completed, payload, template)
    SELECT gen_random_uuid(), assistant_id, '0 0 * * *',
           now() + CASE WHEN right(assistant_id::text, 2) = '00' THEN interval '1 hour' ELSE interval '1 day' END,
           'delete', '{}', '{}'
    FROM assistant
    """,
    # Most have ended.
    """
    INSERT INTO child (parent_run_id, key, run_id, thread_id, assistant_id, graph_id, digest, awaited, status, ended_at)
    SELECT run_id, 'key-' || place, gen_random_uuid(), gen_random_uuid(), assistant_id, %(graph)s, '', 1,
           CASE WHEN status = 'success' THEN 'success' END, CASE WHEN status = 'success' THEN now() END
    FROM run, generate_series(1, 2) AS place WHERE priority = 0
    """,
    "INSERT INTO budget_pot (pot_id, limits) SELECT run_id, '{}' FROM run WHERE priority = 1",
    """
    INSERT INTO idempotency_key (scope, key, fingerprint, kind, status, headers, body, created_at)
    SELECT '', 'key-' || n, '', 'whole', 200, '{}', '', now() - n * interval '1 s'
    FROM generate_series(1, %(threads)s) AS n
    """,
    """
    INSERT INTO tenant_spend (tenant_id, day, part, cost_usd)
    SELECT 'tenant-' || n, current_date, part, 1 FROM generate_series(1, 1000) AS n, generate_series(0, 6) AS part
    """,
]


def fill(connection: Connection[DictRow], *, known: bool = True) -> None:
    """Give the tables a past. `known`: the planner is told of it, and makes its plans anew."""
    parameters = {
        "graph": GRAPH,
        "running": RUNNING,
        "busy": RUNNING + DUE,
        "threads": THREADS,
        "runs": RUNS_PER_THREAD,
        "backlog": BACKLOG,
        "tomorrow": TOMORROW,
        "events": EVENTS_PER_THREAD,
    }
    with connection.transaction():
        for statement in FILL:
            used = {name: value for name, value in parameters.items() if f"%({name})s" in statement}
            connection.execute(statement.encode(), used or None)
    if known:
        connection.execute("VACUUM ANALYZE")


@dataclass(frozen=True)
class Reading:
    """What a statement read of the tables that grow: rows in all scans, whether they passed the filter or not; which
    tables as a whole; and pages."""

    rows: float
    pages: int
    whole_tables: list[str]
    plan: dict[str, Any]


def measure(connection: Connection[DictRow], statement: str, parameters: dict[str, Any], *, generic: bool) -> Reading:
    """Execute a statement inside the caller's transaction and say what it read. `generic` is the plan that serves all
    parameters, which Postgres may settle on when a statement is used often."""
    connection.execute(f"SET LOCAL plan_cache_mode = force_{'generic' if generic else 'custom'}_plan".encode())
    prepared = Prepared(connection, "measured", statement)
    try:
        return prepared.measure(parameters)
    finally:
        connection.execute("DEALLOCATE measured")


class Prepared:
    """A statement as its connection keeps it, under a name, together with the plan once there is one for all."""

    def __init__(self, connection: Connection[DictRow], name: str, statement: str) -> None:
        self._connection = connection
        self._name = name
        self._parameters: list[str] = []

        def number(match: re.Match[str]) -> str:
            if match[1] not in self._parameters:
                self._parameters.append(match[1])
            return f"${self._parameters.index(match[1]) + 1}"

        text = re.sub(r"%\((\w+)\)[sbt]", number, statement).replace("%%", "%")
        connection.execute(f"PREPARE {name} AS {text}".encode())

    def explain(self, options: str, parameters: dict[str, Any]) -> dict[str, Any]:
        arguments = f"({', '.join(['%s'] * len(self._parameters))})" if self._parameters else ""
        call = f"EXPLAIN ({options}, FORMAT JSON) EXECUTE {self._name}{arguments}"
        with ClientCursor(self._connection, row_factory=tuple_row) as cursor:
            cursor.execute(call.encode(), [parameters[name] for name in self._parameters])
            row = cursor.fetchone()
        assert row is not None
        plan: dict[str, Any] = row[0][0]["Plan"]
        return plan

    def measure(self, parameters: dict[str, Any]) -> Reading:
        """Execute it, and say what it read."""
        return _reading(self.explain("ANALYZE, BUFFERS, TIMING OFF", parameters))


def _reading(plan: dict[str, Any]) -> Reading:
    nodes = list(walk(plan))
    return Reading(
        rows=sum(rows_of(node) for node in nodes if node["Node Type"].endswith("Scan") and _grows(node)),
        pages=plan.get("Shared Hit Blocks", 0) + plan.get("Shared Read Blocks", 0),
        whole_tables=[
            node["Relation Name"] for node in nodes if node["Node Type"].endswith("Seq Scan") and _grows(node)
        ],
        plan=plan,
    )


def _grows(node: dict[str, Any]) -> bool:
    """Whether it scans a table that grows. The catalogue of Postgres is not one."""
    table = node.get("Relation Name")
    return table is not None and table not in SMALL_TABLES and not table.startswith("pg_")


def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from walk(child)


def rows_of(node: dict[str, Any]) -> float:
    per_loop = (
        node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    )
    return float(per_loop * node["Actual Loops"])


@contextmanager
def filled_database(server_url: str, changes: Sequence[str] = ()) -> Iterator[str]:
    """A migrated database with a past, changed so; nobody changes it for good after that."""
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        url = make_conninfo(server_url, dbname=name)
        with open_blocking_session(load_settings({}, database_url=url), "test") as filling:
            fill(filling)
            for statement in changes:
                filling.execute(statement.encode())
            if changes:
                filling.execute("VACUUM ANALYZE")
        yield url
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def undone(url: str) -> Iterator[Connection[DictRow]]:
    """A connection as Holdfast's own, in a transaction that is rolled back."""
    settings = load_settings({}, database_url=url)
    with open_blocking_session(settings, "test") as connection, connection.transaction(force_rollback=True):
        yield connection


def readings(connection: Connection[DictRow], text: str, parameters: dict[str, Any]) -> Iterator[Reading]:
    """A statement under every way it may be planned, each time on the same data."""
    for generic in (False, True):
        for sequential in ("off", "on"):
            with connection.transaction(force_rollback=True):
                connection.execute(f"SET LOCAL enable_seqscan = {sequential}".encode())
                yield measure(connection, text, parameters, generic=generic)

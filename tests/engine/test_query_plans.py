"""What the statements on the hot path read, in a database with a past and a backlog: a few rows, found by an index.

Each is measured with the settings Holdfast gives its connections and, as behind PgBouncer, without them; with a plan
made for the parameters and with the one that serves all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import Connection
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row

from holdfast.db.connect import connection_parameters, open_blocking_session
from holdfast.engine import cancel, claim, create, gates, lease, outbox, outcome, queue, quota, reap, rollback
from holdfast.resources import interrupts, webhooks
from holdfast.settings import load_settings
from holdfast.streams import log
from holdfast.worker import batch
from tests.conftest import TEMPLATE
from tests.engine import plans
from tests.engine.plans import (
    GRAPH,
    TABLES,
    Prepared,
    fill,
    filled_database,
    measure,
    readings,
    run_at,
    thread_at,
    undone,
)

WORKER = UUID("00000000-0000-4000-a000-000000000001")
# Runs 2 of these threads are running.
RUNNING = range(1, 11)
RESTING = 1_000
# The one with the backlog.
BUSY = 1

CLAIM_TEN = {
    "worker_id": WORKER,
    "slots": 10,
    "graphs": [GRAPH],
    "after": "",
    "served": claim.TURN_OVER,
    "max_running": None,
    "margin": 20,
}


@dataclass(frozen=True)
class Statement:
    name: str
    text: str
    parameters: Callable[[], dict[str, Any]]
    # How many rows it may read: a small constant, however many there are.
    rows: int
    # What comes before it in the same transaction.
    after: tuple[str, Callable[[], dict[str, Any]]] | None = None


ASSISTANT, SEEN = uuid4(), datetime.now(UTC)
ADD_ASSISTANT = """
INSERT INTO assistant (assistant_id, graph_id, name, updated_at) VALUES (%(assistant_id)s, 'graph', 'Graph', %(seen)s)
"""


def known_assistant() -> dict[str, Any]:
    return {"assistant_id": ASSISTANT, "seen": SEEN}


def new_run(thread: int) -> dict[str, Any]:
    return {
        "run_ids": [uuid4()],
        "thread_ids": [thread_at(thread)],
        "assistant_ids": [ASSISTANT],
        "seens": [SEEN],
        "graph_ids": [GRAPH],
        "afters": [0.0],
        "priorities": [0],
        "strategies": ["enqueue"],
        "metadatas": ["{}"],
        "assistant_metadatas": ["{}"],
        "kwargs": ["{}"],
        "webhooks": [None],
        "streamed": [True],
        "acceptance": b"{}",
        "stamps": [json.dumps({"graph_id": GRAPH})],
        "temporaries": [False],
        "adopting": [False],
        "ttl_minutes": [30.0],
        "ttl_strategies": ["delete"],
        "tenant_ids": [""],
    }


def running_threads() -> dict[str, Any]:
    return {"thread_ids": [thread_at(number) for number in RUNNING]}


def watched_threads() -> dict[str, Any]:
    return {**running_threads(), "seqs": [0] * len(RUNNING)}


def running_runs(**columns: Any) -> dict[str, Any]:
    return {"run_ids": [run_at(number, 2) for number in RUNNING], **columns}


def ten(value: Any) -> list[Any]:
    return [value] * len(RUNNING)


def cancelled_in_the_queue() -> dict[str, Any]:
    return {"run_ids": [run_at(plans.RUNNING + 1, 2)], "error": cancel.USER_INTERRUPT}


def one_run() -> dict[str, Any]:
    return {"thread_id": thread_at(2), "run_ids": [run_at(2, 2)]}


def events(first: int) -> dict[str, Any]:
    return {
        "thread_ids": [thread_at(number) for number in RUNNING],
        "seqs": ten(first),
        "run_ids": [run_at(number, 2) for number in RUNNING],
        "kinds": ten("values"),
        "namespaces": ten(""),
        "datas": ten(b"{}"),
    }


def written(**columns: list[Any]) -> dict[str, Any]:
    return {"thread_ids": [str(thread_at(number)) for number in RUNNING], "namespaces": ten(""), **columns}


def ended() -> dict[str, Any]:
    return running_runs(
        statuses=ten("success"), errors=ten(None), tracebacks=ten(None), dead_letters=ten(None), progress=ten(1)
    )


def ended_threads() -> dict[str, Any]:
    return {
        **running_threads(),
        "restings": ten("idle"),
        "values": ten("{}"),
        "interrupts": ten("{}"),
        "errors": ten(None),
        "last_seqs": ten(20),
    }


def asked() -> dict[str, Any]:
    return {
        **running_threads(),
        **running_runs(),
        "successes": ten(True),
        "interrupt_ids": ten("0" * 32),
        "values": ten('"?"'),
        "task_ids": ten("task"),
        "forms": ten(None),
        "seconds": ten(60.0),
        "moments": ten(None),
        "defaults": ten("1"),
        "escalations": ten(None),
    }


CHECKPOINT_WRITES = {
    "ids": ten("00000003"),
    "tasks": ten("task"),
    "indexes": ten(0),
    "paths": ten(""),
    "channels": ten("channel"),
    "types": ten("json"),
    "blobs": ten(b"1"),
}

CLAIMS = [claim.CLAIM, claim.CLAIM_FAIRLY]

STATEMENTS = [
    # Claiming ten.
    Statement("claim", claim.CLAIM, lambda: CLAIM_TEN, 120),
    Statement("claim fairly", claim.CLAIM_FAIRLY, lambda: CLAIM_TEN, 120),
    Statement("next due", claim.NEXT_DUE, dict, 10),
    Statement("strays", claim.RETURN_STRAYS, lambda: {"worker_id": WORKER, "held": [run_at(1, 2)]}, 40),
    # Creating, on a thread that rests, a new one, and one with a long queue.
    Statement("create thread", create.CREATE_THREADS, lambda: new_run(99_999), 5),
    Statement("lock thread", create.LOCK_OPEN_THREADS, lambda: new_run(RESTING), 5),
    Statement("lock later head", create.LOCK_LATER_HEADS, lambda: new_run(RESTING), 5),
    Statement("lock later head of many", create.LOCK_LATER_HEADS, lambda: new_run(BUSY), 5),
    Statement("insert", create.INSERT_RUNS, lambda: new_run(RESTING), 10, (ADD_ASSISTANT, known_assistant)),
    Statement("insert behind many", create.INSERT_RUNS, lambda: new_run(BUSY), 10, (ADD_ASSISTANT, known_assistant)),
    Statement("mark busy", create.MARK_BUSY, lambda: {**new_run(RESTING), "run_ids": [run_at(RESTING, 1)]}, 5),
    # Of a tenant with limits.
    Statement("measure", quota.MEASURE, lambda: {"tenant_id": "acme", "max_queued": 10, "spend_per_day_usd": 1.0}, 12),
    # A batch of ten runs.
    Statement("lock threads", queue.LOCK_THREADS, running_threads, 20),
    Statement("verify", batch.VERIFY, lambda: running_runs(fences=ten(1), finals=ten(True), count=len(RUNNING)), 40),
    Statement("inspect", batch.INSPECT, running_runs, 20),
    Statement("insert events", batch.INSERT_EVENTS, lambda: events(11), 0),
    Statement("repeat events", batch.REPEAT_EVENTS, lambda: events(10), 0),
    Statement(
        "put blobs",
        batch.PUT_BLOBS,
        lambda: written(channels=ten("channel"), versions=ten("9"), types=ten("json"), blobs=ten(b"1")),
        0,
    ),
    Statement(
        "put checkpoints",
        batch.PUT_CHECKPOINTS,
        lambda: written(ids=ten("9"), parents=ten("8"), checkpoints=ten("{}"), metadatas=ten("{}")),
        0,
    ),
    Statement("put writes", batch.PUT_WRITES, lambda: written(**CHECKPOINT_WRITES), 0),
    Statement("replace writes", batch.REPLACE_WRITES, lambda: written(**CHECKPOINT_WRITES), 0),
    Statement("take answers", batch.TAKE_ANSWERS, lambda: written(**CHECKPOINT_WRITES), 20),
    Statement("progress", batch.MARK_PROGRESS, lambda: running_runs(progress=ten(2)), 20),
    Statement("end runs", outcome.END_RUNS, ended, 20),
    Statement("end threads", outcome.END_THREADS, ended_threads, 20),
    Statement("release runs", outcome.RELEASE_RUNS, lambda: running_runs(afters=ten(1.0)), 20),
    Statement("promote", queue.PROMOTE_NEXT, running_threads, 60, after=(outcome.END_RUNS, ended)),
    Statement("settle", queue.SETTLE_THREAD, running_threads, 40),
    # The lease.
    Statement(
        "renew",
        lease.RENEW,
        lambda: {"worker_id": WORKER, "lease": 30.0, "session": False, "reconnected": False, "claims": 0},
        40,
    ),
    Statement("watch", reap.WATCH_WORKERS, lambda: {"grace": 2.0}, 100),
    Statement("mark lost", reap.MARK_LOST, lambda: {"worker_id": WORKER, "grace": 2.0}, 5),
    # Reads what is running, which is bounded by the size of the fleet.
    Statement("orphans", reap.ORPHANS, dict, 2 * plans.RUNNING + 200),
    Statement("release", reap.RELEASE, lambda: running_runs(max_crashes=3), 40),
    # Webhooks.
    Statement("queue webhooks", outbox.QUEUE_WEBHOOKS, running_runs, 40, after=(outcome.END_RUNS, ended)),
    Statement("next delivery", webhooks.NEXT_DUE["any"], dict, 1),
    Statement("claim deliveries", webhooks.CLAIM["any"], lambda: {"limit": 10, "lease": 15.0, "max_bytes": 2**20}, 40),
    Statement("next delivery elsewhere", webhooks.NEXT_DUE["absolute"], dict, 1),
    Statement(
        "claim deliveries elsewhere",
        webhooks.CLAIM["absolute"],
        lambda: {"limit": 10, "lease": 15.0, "max_bytes": 2**20},
        40,
    ),
    Statement("next delivery to own routes", webhooks.NEXT_DUE["relative"], dict, 1),
    Statement(
        "claim deliveries to own routes",
        webhooks.CLAIM["relative"],
        lambda: {"limit": 10, "lease": 15.0, "max_bytes": 2**20},
        40,
    ),
    # Questions: those of a thread, and those that are due.
    Statement(
        "find questions", gates.FIND, lambda: {"thread_id": thread_at(RESTING), "ids": ["0" * 32], "asker": None}, 30
    ),
    Statement("leave questions", gates.LEAVE, asked, 100),
    Statement("settle questions", gates.SETTLE, asked, 250),
    Statement("ask questions", gates.ASK, asked, 200),
    Statement("give back", gates.GIVE_BACK, lambda: {**running_threads(), **running_runs()}, 200),
    Statement("deadlines", interrupts.UPCOMING, lambda: {"limit": 10}, 10),
    # Reading.
    Statement(
        "read", log.READ_AFTER, lambda: {"thread_id": thread_at(RESTING), "after": 4, "limit": 5, "bytes": 2**20}, 6
    ),
    Statement("heads", log.HEADS, watched_threads, 20),
    Statement("ended runs", log.ENDED_RUNS, running_runs, 20),
    Statement(
        "last output",
        log.LAST_OUTPUT,
        lambda: {"thread_id": thread_at(RESTING), "run_id": run_at(RESTING, 1), "first_seq": 1},
        12,
    ),
    # Cancelling.
    Statement("request cancel", cancel.REQUEST_CANCEL, lambda: {**one_run(), "action": "interrupt"}, 5),
    Statement("tell cancelled", cancel.TELL_CANCELLED, cancelled_in_the_queue, 10),
    Statement("end pending", cancel.END_PENDING, cancelled_in_the_queue, 10),
    Statement("erase checkpoints", rollback.ERASE_CHECKPOINTS, one_run, 20),
    Statement("erase command writes", rollback.ERASE_COMMAND_WRITES, one_run, 20),
    Statement("erase blobs", rollback.ERASE_UNUSED_BLOBS, one_run, 20),
    Statement("keep numbers", rollback.KEEP_NUMBERS, one_run, 5),
    Statement("erase runs", rollback.ERASE_RUNS, one_run, 5),
]

# Those that the intake and the journal use for every run.
BY_KEY = [
    statement
    for statement in STATEMENTS
    if statement.text
    in {
        *(create.CREATE_THREADS, create.LOCK_OPEN_THREADS, create.LOCK_LATER_HEADS, create.INSERT_RUNS),
        *(create.MARK_BUSY, queue.LOCK_THREADS, batch.VERIFY, batch.INSERT_EVENTS, batch.REPEAT_EVENTS),
        *(batch.PUT_BLOBS, batch.PUT_CHECKPOINTS, batch.PUT_WRITES, batch.REPLACE_WRITES, batch.TAKE_ANSWERS),
        *(batch.MARK_PROGRESS, outcome.END_RUNS, outcome.END_THREADS, outcome.RELEASE_RUNS, queue.PROMOTE_NEXT),
        *(queue.SETTLE_THREAD, outbox.QUEUE_WEBHOOKS, rollback.ERASE_CHECKPOINTS, rollback.ERASE_COMMAND_WRITES),
        *(rollback.ERASE_UNUSED_BLOBS, rollback.KEEP_NUMBERS, rollback.ERASE_RUNS),
    }
]


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
        assert not set(reading.whole_tables) & set(TABLES), shown
        assert reading.rows <= statement.rows, shown


def test_plans_made_anew_go_from_key_to_key_before_anybody_has_counted_the_rows(server_url: str) -> None:
    """Of the journal and of the intake, whose plans are kept for a while: first for tables that are empty."""
    name, far = f"test_{uuid4().hex[:12]}", list[str]()
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}".encode())
        settings = load_settings({}, database_url=make_conninfo(server_url, dbname=name))
        with (
            Connection[DictRow].connect(
                connection_parameters(settings, "test", session=True, planned_once=True), row_factory=dict_row
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
                if set(reading.whole_tables) & set(TABLES) or reading.rows > statement.rows:
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
    for reading in readings(filled, statement, CLAIM_TEN):
        assert reading.rows <= 2 * priorities + 2, json.dumps(reading.plan, indent=1)


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
        assert not set(reading.whole_tables) & set(TABLES), json.dumps(reading.plan, indent=1)
        assert reading.rows <= alone + 60, json.dumps(reading.plan, indent=1)


def test_claiming_steps_over_a_flood_of_high_priority_of_another_tenant(filled: Connection[DictRow]) -> None:
    """At every priority that there is, due and not due. Each costs a probe, and nothing of the flood is read."""
    before = [reading.rows for reading in readings(filled, claim.CLAIM_FAIRLY, CLAIM_TEN)]
    priorities = 2 * create.MAX_PRIORITY + 1
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
            (tenant, GRAPH, due, priorities, create.MAX_PRIORITY),
        )
    filled.execute("INSERT INTO tenant (tenant_id, max_running) VALUES ('full', 0)")
    for reading, alone in zip(readings(filled, claim.CLAIM_FAIRLY, CLAIM_TEN), before, strict=True):
        assert not set(reading.whole_tables) & set(TABLES), json.dumps(reading.plan, indent=1)
        assert reading.rows <= alone + priorities + 20, json.dumps(reading.plan, indent=1)


def test_next_due_finds_what_is_due_soonest_whatever_is_urgent_later(filled: Connection[DictRow]) -> None:
    """There are runs of a higher priority that are due tomorrow."""
    due = filled.execute(
        "UPDATE run SET ready_at = now() + interval '5 seconds', priority = -1 "
        "WHERE run_id = (SELECT run_id FROM run WHERE status = 'pending' AND ready_at < now() LIMIT 1) RETURNING run_id"
    ).fetchone()
    found = filled.execute(claim.NEXT_DUE).fetchone()
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

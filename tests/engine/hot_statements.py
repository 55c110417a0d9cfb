"""The statements on the hot path: with which parameters each is measured, and how many rows it may read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from holdfast.engine import (
    cancel,
    claim,
    create,
    lease,
    outbox,
    outcome,
    queue,
    quota,
    reap,
    rollback,
    unexecuted,
    upcoming,
    usage,
)
from holdfast.engine.interrupts import accepting, failed_resumes, inbox, rows
from holdfast.journal import batch
from holdfast.streams import log
from holdfast.webhooks import deliveries
from tests.engine import plans
from tests.engine.plans import (
    GRAPH,
    run_at,
    thread_at,
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
    "suspect": True,
    "tenants": ["zeta"],
    "hinted": [run_at(1, 2)],
    "aside": [],
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
        "assistants_updated_at": [SEEN],
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
        "thread_stamps": [json.dumps({"graph_id": GRAPH})],
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


def picked() -> dict[str, Any]:
    place = plans.RUNNING + 1
    return {"run_id": run_at(place, 2), "thread_id": thread_at(place), "updated_at": SEEN, "position": 1}


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
        "statuses": ten("idle"),
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

# The hundred runs that are due first.
SUSPECT = """
UPDATE run SET crashes_in_a_row = 1 WHERE run_id IN (
    SELECT run_id FROM run WHERE status = 'pending' AND ready_at <= now() ORDER BY ready_at LIMIT 100)
"""

AT_THEIR_LIMIT = (
    b"DELETE FROM run WHERE status = 'pending' AND tenant_id = ''",
    b"INSERT INTO tenant (tenant_id, max_running) SELECT 'tenant-' || n, 1 FROM generate_series(1, 5000) AS n",
    b"""
    WITH busy AS (
        INSERT INTO thread (thread_id, tenant_id)
        SELECT gen_random_uuid(), 'tenant-' || n FROM generate_series(1, 5000) AS n, generate_series(1, 2)
        RETURNING thread_id, tenant_id
    ), numbered AS (
        SELECT *, row_number() OVER (PARTITION BY tenant_id) AS place FROM busy
    )
    INSERT INTO run (run_id, thread_id, tenant_id, assistant_id, graph_id, status, worker_id, fence, created_at,
                     ready_at, kwargs)
    SELECT gen_random_uuid(), thread_id, tenant_id, gen_random_uuid(), 'graph',
           CASE place WHEN 1 THEN 'running' ELSE 'pending' END, CASE place WHEN 1 THEN gen_random_uuid() END, 1, now(),
           now(), '{}' FROM numbered
    """,
)

MARK_POISON = "UPDATE run SET error = '{}' WHERE run_id = ANY(%(run_ids)s)"

CLAIMS = [claim.CLAIM, claim.CLAIM_FAIRLY]

STATEMENTS = [
    # Claiming ten.
    Statement("claim", claim.CLAIM, lambda: CLAIM_TEN, 120),
    Statement("claim fairly", claim.CLAIM_FAIRLY, lambda: CLAIM_TEN, 120),
    Statement("claim suspect", claim.CLAIM_SUSPECT, lambda: {**CLAIM_TEN, "slots": 1}, 5),
    Statement(
        "claim one of many suspects", claim.CLAIM_SUSPECT, lambda: {**CLAIM_TEN, "slots": 1}, 700, (SUSPECT, dict)
    ),
    Statement("next due", upcoming.NEXT_DUE, dict, 10),
    # What a claim finds while a run is set aside, and one run that is taken by itself.
    Statement("claim past one", claim.CLAIM, lambda: {**CLAIM_TEN, "aside": [run_at(1, 2)]}, 120),
    Statement("claim fairly past one", claim.CLAIM_FAIRLY, lambda: {**CLAIM_TEN, "aside": [run_at(1, 2)]}, 120),
    Statement("pick", claim.without_taking(claim.CLAIM), lambda: CLAIM_TEN, 120),
    Statement("take", claim.TAKE, lambda: {**CLAIM_TEN, **picked()}, 10),
    Statement("find unexecuted", unexecuted.FIND_UNEXECUTED, lambda: {"worker_id": WORKER, "held": [run_at(1, 2)]}, 40),
    Statement("return unexecuted", unexecuted.RETURN_UNEXECUTED, lambda: {"worker_id": WORKER, **running_runs()}, 40),
    Statement("disown", unexecuted.DISOWN, lambda: {"worker_id": WORKER, **running_runs()}, 40),
    # Creating, on a thread that rests, a new one, and one with a long queue.
    Statement("create thread", create.CREATE_THREADS, lambda: new_run(99_999), 5),
    Statement("lock thread", create.LOCK_OPEN_THREADS, lambda: new_run(RESTING), 5),
    Statement("lock later head", create.LOCK_LATER_HEADS, lambda: new_run(RESTING), 5),
    Statement("lock later head of many", create.LOCK_LATER_HEADS, lambda: new_run(BUSY), 5),
    Statement("insert", create.INSERT_RUNS, lambda: new_run(RESTING), 10, (ADD_ASSISTANT, known_assistant)),
    Statement("insert behind many", create.INSERT_RUNS, lambda: new_run(BUSY), 10, (ADD_ASSISTANT, known_assistant)),
    Statement("mark busy", create.MARK_BUSY, lambda: {**new_run(RESTING), "run_ids": [run_at(RESTING, 1)]}, 5),
    # Of a tenant with limits.
    Statement(
        "read tenant usage",
        quota.READ_TENANT_USAGE,
        lambda: {"tenant_id": "acme", "max_queued": 10, "spend_per_day_usd": 1.0},
        12,
    ),
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
    Statement("clear suspicion", batch.CLEAR_SUSPICION, running_runs, 20),
    Statement("progress", batch.MARK_PROGRESS, lambda: running_runs(progress=ten(2)), 20),
    Statement("record usage", usage.RECORD_USAGE, lambda: running_runs(usages=ten('{"*": {"steps": 1}}')), 60),
    Statement("end runs", outcome.END_RUNS, ended, 20),
    Statement("end threads", outcome.END_THREADS, ended_threads, 20),
    Statement("release runs", outcome.RELEASE_RUNS, lambda: running_runs(afters=ten(1.0)), 20),
    Statement("promote", queue.PROMOTE_NEXT, running_threads, 60, after=(outcome.END_RUNS, ended)),
    Statement("settle", queue.SET_THREAD_STATUS, running_threads, 40),
    # The lease.
    Statement(
        "renew",
        lease.RENEW,
        lambda: {
            "worker_id": WORKER,
            "lease": 30.0,
            "session": False,
            "reconnected": False,
            "claims": 0,
            "problem": None,
        },
        40,
    ),
    Statement("watch", reap.WATCH_WORKERS, lambda: {"grace": 2.0, "short_grace": 0.3, "settled": True}, 110),
    Statement("mark lost", reap.MARK_LOST, lambda: {"worker_id": WORKER, "grace": 2.0}, 5),
    # Reads what is running, which is bounded by the size of the fleet.
    Statement("orphans", reap.ORPHANS, lambda: {"aside": [], "max_crashes": 3}, 2 * plans.RUNNING + 200),
    Statement("tell poisoned", reap.INSERT_END_EVENTS, running_runs, 80, after=(MARK_POISON, running_runs)),
    Statement("release", reap.RELEASE, lambda: running_runs(max_crashes=3, shared_worker=[], poison=False), 40),
    # Webhooks.
    Statement("queue webhooks", outbox.QUEUE_WEBHOOKS, running_runs, 40, after=(outcome.END_RUNS, ended)),
    *(
        Statement(f"next delivery, {kind}", deliveries.NEXT_DUE[kind], lambda: {"aside": []}, 1)
        for kind in deliveries.FIND_DUE
    ),
    *(
        Statement(
            f"find deliveries, {kind}",
            deliveries.FIND_DUE[kind],
            lambda: {"tenant_id": "", "receiver": "", "receivers": 10, "each": 10, "aside": []},
            200,
        )
        for kind in deliveries.FIND_DUE
    ),
    Statement(
        "claim deliveries",
        deliveries.CLAIM,
        lambda: {
            "delivery_ids": [run_at(plans.RUNNING + plans.DUE + number, 1) for number in range(1, 11)],
            "lease": 15.0,
            "max_bytes": 2**20,
        },
        40,
    ),
    # Interrupts: those of a thread, and those that are due.
    Statement(
        "find interrupts",
        accepting.FIND,
        lambda: {"thread_id": thread_at(RESTING), "ids": ["0" * 32], "asker": None},
        30,
    ),
    Statement("leave interrupts", rows.LEAVE, asked, 100),
    Statement("settle interrupts", rows.SETTLE, asked, 250),
    Statement("store interrupts", rows.STORE, asked, 200),
    Statement(
        "reopen interrupts", failed_resumes.REOPEN_INTERRUPTS, lambda: {**running_threads(), **running_runs()}, 200
    ),
    Statement("deadlines", inbox.UPCOMING, lambda: {"limit": 10, "aside": []}, 10),
    # Reading.
    Statement(
        "read", log.READ_AFTER, lambda: {"thread_id": thread_at(RESTING), "after": 4, "limit": 5, "bytes": 2**20}, 6
    ),
    Statement("heads", log.NEWEST_SEQS, watched_threads, 20),
    Statement("ended runs", log.ENDED_RUNS, running_runs, 20),
    Statement(
        "last output",
        log.LAST_OUTPUT,
        lambda: {"thread_id": thread_at(RESTING), "run_id": run_at(RESTING, 1), "first_seq": 1},
        12,
    ),
    # Cancelling.
    Statement("request cancel", cancel.REQUEST_CANCEL, lambda: {**one_run(), "action": "interrupt"}, 5),
    Statement("tell cancelled", cancel.INSERT_CANCEL_EVENTS, cancelled_in_the_queue, 10),
    Statement("end pending", cancel.END_PENDING, cancelled_in_the_queue, 10),
    Statement("erase checkpoints", rollback.ERASE_CHECKPOINTS, one_run, 20),
    Statement("erase command writes", rollback.ERASE_COMMAND_WRITES, one_run, 20),
    Statement("erase blobs", rollback.ERASE_UNUSED_BLOBS, one_run, 20),
    Statement("keep numbers", rollback.KEEP_EVENT_NUMBERS, one_run, 5),
    Statement("erase runs", rollback.ERASE_RUNS, one_run, 5),
]

# Those that group commits and the journal use for every run.
BY_KEY = [
    statement
    for statement in STATEMENTS
    if statement.text
    in {
        *(create.CREATE_THREADS, create.LOCK_OPEN_THREADS, create.LOCK_LATER_HEADS, create.INSERT_RUNS),
        *(create.MARK_BUSY, queue.LOCK_THREADS, batch.VERIFY, batch.INSERT_EVENTS, batch.REPEAT_EVENTS),
        *(batch.PUT_BLOBS, batch.PUT_CHECKPOINTS, batch.PUT_WRITES, batch.REPLACE_WRITES, batch.TAKE_ANSWERS),
        *(batch.MARK_PROGRESS, outcome.END_RUNS, outcome.END_THREADS, outcome.RELEASE_RUNS, queue.PROMOTE_NEXT),
        *(queue.SET_THREAD_STATUS, outbox.QUEUE_WEBHOOKS, rollback.ERASE_CHECKPOINTS, rollback.ERASE_COMMAND_WRITES),
        *(rollback.ERASE_UNUSED_BLOBS, rollback.KEEP_EVENT_NUMBERS, rollback.ERASE_RUNS),
    }
]

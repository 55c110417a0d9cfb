"""No two operations wait for each other: every pair meets on the same threads, in opposite orders, again and again.

A gate holds a row in the middle at first, so that both have taken some locks when they meet.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.claim import claim
from holdfast.engine.outcome import Outcome, Released, RolledBack
from holdfast.engine.queue import LOCK_THREADS
from holdfast.engine.reap import release_orphans
from holdfast.engine.states import CancelAction, MultitaskStrategy
from holdfast.engine.threads import delete_thread
from holdfast.engine.unexecuted import find_unexecuted, return_unexecuted
from holdfast.errors import Conflict, NotFound
from holdfast.journal.batch import INSPECT, write_portions
from holdfast.journal.entries import Portion
from holdfast.settings import Settings
from tests.engine.scene import BROKEN_QUEUES, GRAPH, INTERRUPTED, SUCCESS, create, portion_of_row
from tests.support.records import query

THREADS = 6
ROUNDS = 4

# Half of the threads have a running run, whose worker is lost and does not know; half have one that can be claimed. All
# have others waiting. The ids of runs and of threads have nothing to do with each other.
SCENE = """
WITH thread_ids AS (
    INSERT INTO thread (thread_id, status) SELECT gen_random_uuid(), 'busy' FROM generate_series(1, %(threads)s)
    RETURNING thread_id
), numbered AS (
    SELECT thread_id, row_number() OVER () AS number FROM thread_ids
)
INSERT INTO run (run_id, thread_id, assistant_id, graph_id, status, created_at, ready_at, worker_id, fence, kwargs)
SELECT gen_random_uuid(), thread_id, gen_random_uuid(), %(graph)s,
       CASE WHEN place = 1 AND number %% 2 = 0 THEN 'running' ELSE 'pending' END,
       now() - interval '1 minute' + place * interval '1 s',
       CASE WHEN place = 1 THEN now() - interval '1 minute' + interval '1 s' END,
       CASE WHEN place = 1 AND number %% 2 = 0 THEN %(lost)s::uuid END,
       CASE WHEN place = 1 AND number %% 2 = 0 THEN 1 ELSE 0 END, '{}'
FROM numbered, generate_series(1, 3) AS place
"""


@dataclass(frozen=True)
class Scene:
    threads: list[UUID]
    # As the lost worker claimed them.
    running: list[DictRow]
    lost: UUID
    online: UUID


async def set_scene(database: Database) -> Scene:
    lost, online = uuid4(), uuid4()
    async with database.transaction() as connection:
        for table in ("run", "thread", "worker", "event", "checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            await connection.execute(f"DELETE FROM {table}".encode())
        await connection.execute(
            "INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until) "
            "SELECT worker_id, status, '', 0, '', 1, '{}', now() + interval '1 hour' "
            "FROM (VALUES (%s::uuid, 'lost'), (%s::uuid, 'online')) AS worker(worker_id, status)",
            (lost, online),
        )
        await connection.execute(SCENE, {"threads": THREADS, "graph": GRAPH, "lost": lost})
    threads = await query(database, "SELECT thread_id FROM thread ORDER BY thread_id")
    running = await query(
        database, "SELECT run_id, thread_id, fence, 1 AS next_seq FROM run WHERE status = 'running' ORDER BY run_id"
    )
    return Scene([row["thread_id"] for row in threads], running, lost, online)


# --- the operations -----------------------------------------------------------------------------------

# Each gets the scene and whether to go through it backwards.
Operation = Callable[[Database, Scene, bool], Awaitable[None]]
Meeting = Callable[[Database], Awaitable[None]]


async def for_each_thread(scene: Scene, backwards: bool, step: Callable[[UUID], Coroutine[Any, Any, Any]]) -> None:
    """Requests for all threads at once. Some come too late, and are told so."""

    async def request(thread_id: UUID) -> None:
        with suppress(Conflict, NotFound):
            await step(thread_id)

    await asyncio.gather(*map(request, reversed(scene.threads) if backwards else scene.threads))


def creates(strategy: MultitaskStrategy) -> Operation:
    async def operation(database: Database, scene: Scene, backwards: bool) -> None:
        await for_each_thread(scene, backwards, lambda one: create(database, one, multitask_strategy=strategy))

    return operation


def cancels(action: CancelAction) -> Operation:
    async def operation(database: Database, scene: Scene, backwards: bool) -> None:
        await for_each_thread(scene, backwards, lambda one: cancel_runs(database, one, None, action))

    return operation


async def deletes(database: Database, scene: Scene, backwards: bool) -> None:
    await for_each_thread(scene, backwards, lambda one: delete_thread(database, one, EVERYTHING))


def portions_of(scene: Scene, backwards: bool, outcomes: list[Outcome | None]) -> list[Portion]:
    runs = list(reversed(scene.running)) if backwards else scene.running
    return [portion_of_row(run, random.choice(outcomes)) for run in runs]


def writes(outcomes: list[Outcome | None]) -> Operation:
    """A batch of a journal, over many threads."""

    async def operation(database: Database, scene: Scene, backwards: bool) -> None:
        # Its worker is lost, so it may be refused; and two of them may give out the same number.
        with suppress(psycopg.errors.DivisionByZero, psycopg.errors.UniqueViolation):
            async with database.transaction() as connection, connection.pipeline():
                await write_portions(connection, portions_of(scene, backwards, outcomes), verify=True, repeat=False)

    return operation


async def writes_what_is_held(database: Database, scene: Scene, backwards: bool) -> None:
    """A batch after it was refused as a whole."""
    portions = portions_of(scene, backwards, [SUCCESS, None])
    threads = sorted({portion.thread_id for portion in portions if portion.outcome is not None})
    with suppress(psycopg.errors.UniqueViolation):
        async with database.transaction() as connection:
            await connection.execute(LOCK_THREADS, {"thread_ids": threads})
            cursor = await connection.execute(INSPECT, {"run_ids": [portion.run_id for portion in portions]})
            held = {row["run_id"] for row in await cursor.fetchall() if (row["status"], row["fence"]) == ("running", 1)}
            written = [portion for portion in portions if portion.run_id in held]
            if written:
                await write_portions(connection, written, verify=False, repeat=False)


async def releases(database: Database, scene: Scene, backwards: bool) -> None:
    await release_orphans(database, max_crashes=random.choice([1, 3]))


async def claims(database: Database, scene: Scene, backwards: bool) -> None:
    async with database.connection() as connection:
        await claim(connection, scene.online, THREADS, [GRAPH])


async def returns_unexecuted(database: Database, scene: Scene, backwards: bool) -> None:
    async with database.connection() as connection:
        found = await find_unexecuted(connection, scene.lost, [])
        await return_unexecuted(connection, scene.lost, [row["run_id"] for row in found])


OPERATIONS: dict[str, Operation] = {
    "enqueue": creates("enqueue"),
    "reject": creates("reject"),
    "interrupt": creates("interrupt"),
    "rollback": creates("rollback"),
    "cancel by interrupt": cancels("interrupt"),
    "cancel by rollback": cancels("rollback"),
    "delete": deletes,
    "events": writes([None]),
    "ends": writes([SUCCESS, INTERRUPTED, Released(), RolledBack(), None]),
    "held ends": writes_what_is_held,
    "release": releases,
    "claim": claims,
    "unexecuted runs": returns_unexecuted,
}
PAIRS = {name: list(OPERATIONS)[place:] for place, name in enumerate(OPERATIONS)}

# --- the test -----------------------------------------------------------------------------------------


async def meet(database: Database, first: Operation, second: Operation) -> None:
    scene = await set_scene(database)
    async with database.connection() as gate:
        await gate.execute("BEGIN")
        if random.random() < 0.5:
            held = scene.threads[random.randrange(1, THREADS - 1)]
            await gate.execute("SELECT FROM thread WHERE thread_id = %s FOR UPDATE", (held,))
        else:
            held = scene.running[random.randrange(len(scene.running))]["run_id"]
            await gate.execute("SELECT FROM run WHERE run_id = %s FOR UPDATE", (held,))
        meeting = asyncio.gather(first(database, scene, False), second(database, scene, True))
        await both_are_stuck(database, meeting)
        await gate.execute("COMMIT")
    await meeting
    assert not await query(database, BROKEN_QUEUES)


async def both_are_stuck(database: Database, meeting: asyncio.Future[Any]) -> None:
    """Wait until whoever can get no further waits. Some pairs do not wait at all, so this cannot be insisted on."""
    before = -1
    while not meeting.done():
        rows = await query(
            database,
            "SELECT count(*) FILTER (WHERE wait_event_type = 'Lock') AS stuck, "
            "count(*) FILTER (WHERE state = 'active' AND wait_event_type IS DISTINCT FROM 'Lock') AS moving "
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        if rows[0]["moving"] == 0 and rows[0]["stuck"] == before:
            return
        before = rows[0]["stuck"] if rows[0]["moving"] == 0 else -1
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("name", PAIRS)
async def test_no_pair_of_operations_deadlocks(settings: Settings, server_url: str, name: str) -> None:
    meetings = {other: partial(meet, first=OPERATIONS[name], second=OPERATIONS[other]) for other in PAIRS[name]}
    await meet_without_deadlock(settings, server_url, name, meetings, ROUNDS)


async def meet_without_deadlock(
    settings: Settings, server_url: str, name: str, meetings: Mapping[str, Meeting], rounds: int
) -> None:
    """Let an operation meet each of the others, and have the server say that none of them waited for the other."""
    database = Database(settings, "test")
    await database.open()
    try:
        for other, meeting in meetings.items():
            for _ in range(rounds):
                try:
                    await meeting(database)
                except psycopg.errors.DeadlockDetected as error:
                    pytest.fail(f"{name} and {other} wait for each other: {error}")
    finally:
        # The server counts a backend's deadlocks at the latest when its connection ends.
        await database.close()
    assert settings.database_url is not None
    assert await deadlocks(server_url, settings.database_url) == 0


async def deadlocks(server_url: str, database_url: str) -> int:
    """How many deadlocks the server has resolved in a database, once nobody is connected to it any more."""
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    async with await psycopg.AsyncConnection.connect(make_conninfo(server_url), autocommit=True) as connection:
        while True:
            cursor = await connection.execute(
                "SELECT deadlocks, EXISTS (SELECT 1 FROM pg_stat_activity WHERE pg_stat_activity.datname = %(name)s "
                "AND backend_type = 'client backend') FROM pg_stat_database WHERE datname = %(name)s",
                {"name": name},
            )
            row = await cursor.fetchone()
            assert row is not None
            if not row[1]:
                return int(row[0])
            # A pool that closes while a connection is on its way back to it may forget that one.
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %(name)s AND state = 'idle'",
                {"name": name},
            )
            await asyncio.sleep(0.02)

"""Whoever ends a child wants its parent's row as well: no two operations on a family wait for each other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.visibility import EVERYTHING
from holdfast.engine.cancel import cancel_runs
from holdfast.engine.dead_letters.graph_gone import end_graphless_runs
from holdfast.engine.outcome import Outcome, RolledBack, Waiting
from holdfast.engine.reap import release_orphans
from holdfast.engine.threads import delete_thread
from holdfast.errors import NotFound
from holdfast.journal.batch import write_portions
from holdfast.journal.entries import EndEffects
from holdfast.settings import Settings, load_settings
from tests.engine.scene import GRAPH, SUCCESS, create, online_worker, portion_of_row, somebody_waits
from tests.engine.test_lock_order import both_are_stuck, meet_without_deadlock
from tests.support.records import query

PARENTS = 4
ROUNDS = 4

# Parents, each with two children; every second run of all of them is the one worker's, the others are the other's. The
# last child waits to be claimed. Ids say nothing about who is whose parent.
SCENE = """
WITH home AS (
    INSERT INTO thread (thread_id, status) SELECT gen_random_uuid(), 'busy' FROM generate_series(1, %(parents)s)
    RETURNING thread_id
), parent AS (
    INSERT INTO run (run_id, thread_id, assistant_id, graph_id, status, created_at, ready_at, worker_id, fence,
                     children, kwargs)
    SELECT gen_random_uuid(), thread_id, gen_random_uuid(), %(graph)s, 'running', now(), now(),
           (%(workers)s::uuid[])[1 + (row_number() OVER ()) %% 2], 1, 2, '{}' FROM home
    RETURNING run_id
), below AS (
    INSERT INTO thread (thread_id, status, parent_run_id, depth)
    SELECT gen_random_uuid(), 'busy', run_id, 1 FROM parent, generate_series(1, 2) RETURNING thread_id, parent_run_id
), numbered AS (
    SELECT thread_id, parent_run_id, gen_random_uuid() AS run_id, row_number() OVER () AS number FROM below
), child_run AS (
    INSERT INTO run (run_id, thread_id, assistant_id, graph_id, status, created_at, ready_at, worker_id, fence, depth,
                     parent_run_id, kwargs)
    SELECT run_id, thread_id, gen_random_uuid(), %(graph)s, CASE WHEN number > 6 THEN 'pending' ELSE 'running' END,
           now(), now(), CASE WHEN number <= 6 THEN (%(workers)s::uuid[])[1 + number / 2 %% 2] END,
           CASE WHEN number > 6 THEN 0 ELSE 1 END, 1, parent_run_id, '{}' FROM numbered
)
INSERT INTO child (parent_run_id, key, run_id, thread_id, assistant_id, graph_id, digest, awaited)
SELECT parent_run_id, number::text, run_id, thread_id, run_id, %(graph)s, '', 1 FROM numbered
"""


@dataclass(frozen=True)
class Scene:
    workers: list[UUID]
    threads: list[UUID]
    runs: list[DictRow]
    keys: dict[UUID, list[str]]


async def set_scene(database: Database) -> Scene:
    workers = [await online_worker(database), await online_worker(database)]
    async with database.transaction() as connection:
        for table in ("child", "abandoned", "run", "thread", "event"):
            await connection.execute(f"TRUNCATE {table} CASCADE".encode())
        await connection.execute(SCENE, {"parents": PARENTS, "graph": GRAPH, "workers": workers})
    runs = await query(database, "SELECT *, 1 AS next_seq FROM run ORDER BY run_id")
    threads = await query(database, "SELECT thread_id FROM thread WHERE depth = 1 ORDER BY thread_id")
    keys: dict[UUID, list[str]] = {}
    for row in await query(database, "SELECT parent_run_id, key FROM child"):
        keys.setdefault(row["parent_run_id"], []).append(row["key"])
    return Scene(workers, [row["thread_id"] for row in threads], runs, keys)


Operation = Callable[[Database, Scene, bool], Awaitable[None]]


def batch(worker: int) -> Operation:
    """All that one worker's journal writes at once: its parents say something or go to wait, its children end."""

    async def operation(database: Database, scene: Scene, backwards: bool) -> None:
        portions = []
        # It may believe that it still has what is to be claimed; then all of it is refused, with the locks taken.
        held = {scene.workers[worker], *random.choice([(), (None,)])}
        for run in scene.runs:
            if run["worker_id"] not in held:
                continue
            outcome: Outcome | None
            if run["parent_run_id"] is not None:
                outcome = random.choice([SUCCESS, RolledBack(), None])
            else:
                outcome = random.choice([None, Waiting(awaited=dict.fromkeys(scene.keys[run["run_id"]], False))])
            portions.append(replace(portion_of_row(run, outcome), effects=EndEffects(parent=run["parent_run_id"])))
        if backwards:
            portions.reverse()
        with suppress(psycopg.errors.DivisionByZero, psycopg.errors.UniqueViolation):
            async with database.transaction() as connection, connection.pipeline():
                await write_portions(connection, portions, verify=True, repeat=False)

    return operation


def for_each_child(step: Callable[[Database, UUID], Awaitable[Any]]) -> Operation:
    async def operation(database: Database, scene: Scene, backwards: bool) -> None:
        async def request(thread_id: UUID) -> None:
            with suppress(NotFound):
                await step(database, thread_id)

        await asyncio.gather(*map(request, reversed(scene.threads) if backwards else scene.threads))

    return operation


async def poisons(database: Database, scene: Scene, backwards: bool) -> None:
    statement = "UPDATE worker SET status = 'lost' WHERE worker_id = %s RETURNING 1"
    await query(database, statement, scene.workers[int(backwards)])
    await release_orphans(database, max_crashes=1)


OPERATIONS: dict[str, Operation] = {
    "one journal": batch(0),
    "the other journal": batch(1),
    "cancel": for_each_child(lambda database, one: cancel_runs(database, one, None, "interrupt")),
    "roll back": for_each_child(lambda database, one: cancel_runs(database, one, None, "rollback")),
    "delete": for_each_child(lambda database, one: delete_thread(database, one, EVERYTHING)),
    "poison": poisons,
}
PAIRS = {name: list(OPERATIONS)[place:] for place, name in enumerate(OPERATIONS)}


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, pool_max=24)


async def meet(database: Database, first: Operation, second: Operation) -> None:
    scene = await set_scene(database)
    async with database.connection() as gate:
        await gate.execute("BEGIN")
        held = random.choice(scene.runs)["run_id"]
        await gate.execute("SELECT FROM run WHERE run_id = %s FOR UPDATE", (held,))
        meeting = asyncio.gather(first(database, scene, False), second(database, scene, True))
        await both_are_stuck(database, meeting)
        await gate.execute("COMMIT")
    await meeting


@pytest.mark.parametrize("name", PAIRS)
async def test_no_pair_of_operations_deadlocks(settings: Settings, server_url: str, name: str) -> None:
    meetings = {other: partial(meet, first=OPERATIONS[name], second=OPERATIONS[other]) for other in PAIRS[name]}
    await meet_without_deadlock(settings, server_url, name, meetings, ROUNDS)


async def test_runs_of_missing_graphs_lock_their_parents_in_id_order(database: Database) -> None:
    """The child in the first thread has the last parent."""
    parents = sorted([(await create(database, uuid4())).run["run_id"] for _ in range(2)])
    for thread_id, parent in zip(sorted(uuid4() for _ in parents), reversed(parents), strict=True):
        child = (await create(database, thread_id)).run["run_id"]
        await query(
            database,
            """WITH below AS (UPDATE thread SET parent_run_id = %s WHERE thread_id = %s),
               waiting AS (UPDATE run SET parent_run_id = %s, graph_id = 'gone', ready_at = now() - interval '1 day'
                           WHERE run_id = %s)
               INSERT INTO child (parent_run_id, key, run_id, thread_id, assistant_id, graph_id, digest)
               VALUES (%s, 'key', %s, %s, gen_random_uuid(), 'gone', '') RETURNING 1""",
            *(parent, thread_id, parent, child, parent, child, thread_id),
        )
    lock = "SELECT 1 FROM run WHERE run_id = %s FOR NO KEY UPDATE"
    async with database.transaction() as other:
        await other.execute(lock, (parents[0],))
        ending = asyncio.create_task(end_graphless_runs(database, ["gone"], after=60, batch=10))
        await somebody_waits(database)
        # Would be a deadlock if the last parent were locked already.
        await other.execute(f"{lock} NOWAIT".encode(), (parents[1],))
    assert len(await ending) == 2

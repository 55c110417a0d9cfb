"""What claiming 20 runs costs with a million queued, 100,000 of them behind one busy thread, against a thousand.

Both queues stand in one Postgres, a database each, of the same make: nine tenths of the runs are ready, one tenth waits
behind a run of its thread that is executing. The claims take turns. What is timed is the statement a worker executes,
on a connection like a worker's, inside a transaction that then commits: the dead entries that claims leave at the front
of the queue are part of the matter. Afterwards, not timed, the runs go back to the queue's end.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from uuid import UUID, uuid4

from bench.report import Finding, Measure
from bench.stage import Stage
from holdfast.db.connect import Database
from holdfast.db.kept_connection import KeptConnection
from holdfast.engine.claim import claim
from holdfast.settings import Settings

SLOTS = 20
SMALL, LARGE = 1_000, 1_000_000
REPETITIONS = 300
WARM_UP = 20
GRAPH = "steps"

REGISTER = """
INSERT INTO worker (worker_id, status, host, pid, version, capacity, graphs, lease_until)
VALUES (%(worker_id)s, 'online', 'bench', 0, '', 20, %(graphs)s, now() + interval '1 day')
"""
FILL_THREADS = """
INSERT INTO thread (thread_id, status) SELECT md5('thread' || number)::uuid, 'busy'
FROM generate_series(1, %(ready)s) AS number
"""
FILL_READY = """
INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, ready_at, kwargs)
SELECT md5('run' || number)::uuid, md5('thread' || number)::uuid, %(worker_id)s, %(graph)s, at, at, '{"input": {}}'
FROM generate_series(1, %(ready)s) AS number,
     LATERAL (SELECT now() - interval '1 day' + number * interval '1 ms') AS t(at)
"""
BUSY_THREAD = "INSERT INTO thread (thread_id, status) VALUES (%(busy)s, 'busy')"
BUSY_RUN = """
INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, ready_at, kwargs, status, worker_id, fence)
SELECT gen_random_uuid(), %(busy)s, %(worker_id)s, %(graph)s, at, at, '{"input": {}}', 'running', %(worker_id)s, 1
FROM (SELECT now() - interval '2 days') AS t(at)
"""
# Older than all others, so that whoever searches for a free thread from the front would meet them first.
FILL_WAITING = """
INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, kwargs)
SELECT md5('waiting' || number)::uuid, %(busy)s, %(worker_id)s, %(graph)s,
       now() - interval '2 days' + number * interval '1 ms', '{"input": {}}'
FROM generate_series(1, %(waiting)s) AS number
"""
REQUEUE = """
UPDATE run SET status = 'pending', worker_id = NULL, ready_at = clock_timestamp() WHERE run_id = ANY(%(run_ids)s)
"""


class Queue:
    """A filled queue, and a worker's connection to it."""

    def __init__(self, settings: Settings, queued: int) -> None:
        self.queued = queued
        self.times: list[float] = []
        self._database = Database(settings, "worker")
        self._claiming = KeptConnection(self._database, others=2, generic_plans=True)
        self._worker_id = uuid4()

    async def open(self) -> None:
        await self._database.open()
        waiting = self.queued // 10
        parameters = {
            "worker_id": self._worker_id,
            "graphs": [GRAPH],
            "graph": GRAPH,
            "busy": uuid4(),
            "ready": self.queued - waiting,
            "waiting": waiting,
        }
        async with self._database.transaction() as connection:
            # Checking each run's thread takes most of the time, and they have just been inserted.
            await connection.execute("SET LOCAL session_replication_role = replica")
            for statement in (REGISTER, FILL_THREADS, BUSY_THREAD, FILL_READY, BUSY_RUN, FILL_WAITING):
                await connection.execute(statement, parameters)
        async with self._database.connection() as connection:
            await connection.execute("VACUUM ANALYZE")

    async def close(self) -> None:
        await self._claiming.release()
        await self._database.close()

    async def claim(self) -> float:
        """Seconds to claim a worker's fill."""
        async with self._claiming.connection() as connection, connection.transaction():
            started = time.perf_counter()
            rows = await claim(connection, self._worker_id, SLOTS, [GRAPH])
            seconds = time.perf_counter() - started
        run_ids: list[UUID] = [row.run_id for row in rows]
        if len(run_ids) != SLOTS:
            raise RuntimeError(f"{len(run_ids)} runs were claimed instead of {SLOTS}")
        async with self._database.connection() as connection:
            await connection.execute(REQUEUE, {"run_ids": run_ids})
        return seconds


async def _measure(stage: Stage, large_size: int, repetitions: int) -> tuple[Queue, Queue]:
    small = Queue(stage.database("bench_claim_small"), SMALL)
    large = Queue(stage.database("bench_claim_large"), large_size)
    for queue in (small, large):
        stage.say(f"claim: queueing {queue.queued:,} runs")
        await queue.open()
    stage.admin.execute("CHECKPOINT")
    for number in range(WARM_UP + repetitions):
        for queue in (small, large):
            seconds = await queue.claim()
            if number >= WARM_UP:
                queue.times.append(seconds)
    await small.close()
    await large.close()
    return small, large


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    small, large = asyncio.run(_measure(stage, 100_000 if quick else LARGE, 50 if quick else REPETITIONS))
    for name in ("bench_claim_small", "bench_claim_large"):
        stage.drop(name)
    ours, base = median(large.times) * 1000, median(small.times) * 1000
    return Finding(
        figure="claim",
        measures=[
            Measure(
                name=f"{SLOTS} runs of {large.queued:,} queued, as a multiple of {small.queued:,}",
                target=2,
                rule="at most",
                measured=ours / base,
                note=f"{ours:.2f} against {base:.2f} ms",
            )
        ],
        details={f"{queue.queued}": [round(seconds * 1000, 4) for seconds in queue.times] for queue in (small, large)},
    )

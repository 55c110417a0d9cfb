"""Several workers over one database, driven step by step from synchronous code.

Everything goes through the engine's own functions and, for what a run writes, through a real journal. What a client,
a worker or upkeep would do at some moment is one call here; what nobody can do, such as letting time pass, is done
to the rows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar
from uuid import UUID, uuid4

import orjson
import psycopg
from psycopg import Connection
from psycopg.rows import DictRow
from uuid_utils.compat import uuid7

from holdfast.db.connect import Database, open_blocking_session
from holdfast.db.visibility import EVERYTHING
from holdfast.engine import lease, reap, unexecuted
from holdfast.engine.cancel import CancelledRuns, cancel_runs
from holdfast.engine.claim import claim
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.engine.lease import Registration, Renewal
from holdfast.engine.new_run import CreatedRun, NewRun
from holdfast.engine.outcome import Outcome
from holdfast.engine.states import CancelAction
from holdfast.engine.submit import create_run
from holdfast.engine.threads import delete_thread
from holdfast.errors import RunSignal
from holdfast.execution.starting_point import CHECKPOINT
from holdfast.journal.entries import CheckpointEntry
from holdfast.journal.journal import Journal
from holdfast.journal.run_writer import RunWriter
from holdfast.settings import load_settings
from holdfast.upkeep.sweeps import SWEEP_EVENTS

T = TypeVar("T")

GRAPH = "graph"
LEASE = 1000.0
# How far `pass_time` goes. Everything that is scheduled for later is due afterwards.
STEP = 500.0
MAX_CRASHES = 3


@dataclass(eq=False)
class Holding:
    """A run as the worker that claimed it knows it, whether it is still right about that or not."""

    run: ClaimedRun
    writer: RunWriter

    @property
    def run_id(self) -> UUID:
        return self.writer.run_id

    @property
    def fence(self) -> int:
        return self.writer.fence


@dataclass(eq=False)
class FleetWorker:
    """A worker process: its identity, its heartbeat's session, and the runs it believes it holds."""

    worker_id: UUID
    journal: Journal
    session: Connection[DictRow]
    holdings: list[Holding] = field(default_factory=list)


@dataclass(frozen=True)
class Write:
    """What one attempt hands to its journal at once."""

    holding: Holding
    events: int = 0
    checkpoint: str | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Snapshot:
    """The database as it is: rows of runs, threads and workers by id, the log by thread, checkpoints by thread."""

    runs: dict[UUID, DictRow]
    threads: dict[UUID, DictRow]
    workers: dict[UUID, DictRow]
    log: dict[UUID, list[tuple[int, UUID]]]
    checkpoints: dict[UUID, set[str]]
    blobs: dict[UUID, set[str]]

    def unfinished(self, thread_id: UUID) -> list[DictRow]:
        """A thread's unfinished runs in the order in which they have to start."""
        rows = [row for row in self.runs.values() if row["thread_id"] == thread_id and row["finished_at"] is None]
        return sorted(rows, key=lambda row: (row["created_at"], row["run_id"]))

    def holds(self, holding: Holding) -> bool:
        row = self.runs.get(holding.run_id)
        return row is not None and row["status"] == "running" and row["fence"] == holding.fence


class Fleet:
    """The driver. One event loop, a pool, one journal for each worker that may be alive at a time."""

    def __init__(self, url: str, journals: int) -> None:
        self._settings = load_settings({}, database_url=url, pool_max=2, lease=LEASE, heartbeat=10.0)
        self._runner = asyncio.Runner()
        self._database = Database(self._settings, "test")
        self._observer = open_blocking_session(self._settings, "observer")
        self._journals: list[Journal] = []
        self._run(self._open(journals))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._observer.close()
        self._runner.close()

    async def _open(self, journals: int) -> None:
        await self._database.open()
        for _ in range(journals):
            journal = Journal(self._settings, lambda visible, ready: None, lambda writer: None)
            self._journals.append(journal)
            await journal.start()

    async def _close(self) -> None:
        for journal in self._journals:
            await journal.stop()
        await self._database.close()

    def _run(self, step: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(step)

    def clear(self) -> None:
        """Forget everything, so that the next example starts from an empty database."""
        self._observer.execute(
            "TRUNCATE run, thread, worker, event, checkpoints, checkpoint_blobs, checkpoint_writes CASCADE"
        )

    # --- clients ----------------------------------------------------------------------------------

    def create(self, thread_id: UUID, **options: Any) -> CreatedRun:
        new = NewRun(
            thread_id=thread_id,
            assistant_id=UUID(int=1),
            graph_id=GRAPH,
            kwargs={"input": {}},
            create_thread=True,
            **options,
        )
        return self._run(create_run(self._database, new))

    def cancel(self, thread_id: UUID, run_ids: list[UUID] | None, action: CancelAction) -> CancelledRuns:
        return self._run(cancel_runs(self._database, thread_id, run_ids, action))

    def delete_thread(self, thread_id: UUID) -> list[DictRow]:
        return self._run(delete_thread(self._database, thread_id, EVERYTHING))

    # --- workers ----------------------------------------------------------------------------------

    def register(self, journal: int) -> FleetWorker:
        session = open_blocking_session(self._settings, "heartbeat")
        registration = Registration(uuid4(), "host", 1, "0", 10, (GRAPH,))
        lease.register(session, registration, LEASE, session=True)
        return FleetWorker(registration.worker_id, self._journals[journal], session)

    def renew(self, worker: FleetWorker) -> Renewal | None:
        """Renew the lease, over a new session if the old one is gone."""
        reconnected = worker.session.closed
        if reconnected:
            worker.session = open_blocking_session(self._settings, "heartbeat")
        return lease.renew(worker.session, worker.worker_id, LEASE, session=True, reconnected=reconnected)

    def drain(self, worker: FleetWorker) -> None:
        lease.drain(self._observer, worker.worker_id)

    def resign(self, worker: FleetWorker) -> None:
        lease.resign(self._observer, worker.worker_id)
        worker.session.close()

    def return_unexecuted(self, worker: FleetWorker) -> list[UUID]:
        async def step() -> list[UUID]:
            async with self._database.connection() as connection:
                held = [holding.run_id for holding in worker.holdings]
                found = await unexecuted.find_unexecuted(connection, worker.worker_id, held)
                return await unexecuted.return_unexecuted(
                    connection, worker.worker_id, [row["run_id"] for row in found]
                )

        return self._run(step())

    def claim(self, worker: FleetWorker, slots: int) -> list[Holding]:
        async def step() -> list[ClaimedRun]:
            async with self._database.connection() as connection:
                return await claim(connection, worker.worker_id, slots, [GRAPH])

        holdings = []
        for run in self._run(step()):
            writer = worker.journal.open_writer(run.run_id, run.thread_id, run.fence, run.next_seq)
            holdings.append(Holding(run, writer))
        worker.holdings += holdings
        return holdings

    def write(self, writes: Sequence[Write]) -> list[RunSignal | None]:
        """Hand everything to the journals at once, so that it is one batch of each, and wait for the answers."""

        async def step() -> list[RunSignal | None]:
            waiting = [_hand_in(write) for write in writes]
            answers = await asyncio.gather(*waiting, return_exceptions=True)
            for answer in answers:
                if answer is not None and not isinstance(answer, RunSignal):
                    raise answer
            return [answer for answer in answers if answer is None or isinstance(answer, RunSignal)]

        return self._run(step())

    def late(self, holding: Holding, journal: int) -> Holding:
        """The same claim in the hands of an attempt that has not noticed anything yet."""
        writer = holding.writer
        return Holding(
            holding.run,
            self._journals[journal].open_writer(writer.run_id, writer.thread_id, writer.fence, writer.next_seq),
        )

    # --- upkeep -----------------------------------------------------------------------------------

    def watch(self, grace: float) -> list[UUID]:
        """Look for lost workers and declare them so."""

        async def step() -> list[UUID]:
            async with self._database.connection() as connection:
                return [
                    row["worker_id"]
                    for row in (await reap.watch_workers(connection, grace=grace)).missing
                    if row["lost"] and await reap.mark_lost(connection, row["worker_id"], grace=row["grace"])
                ]

        return self._run(step())

    def release_orphans(self) -> list[DictRow]:
        return self._run(reap.release_orphans(self._database, max_crashes=MAX_CRASHES))

    def sweep_events(self) -> None:
        """Expire the events of everything that has finished."""
        self._observer.execute(SWEEP_EVENTS, {"ttl": 0.0, "batch": 1000, "aside": []})

    # --- what happens to them ---------------------------------------------------------------------

    def expire(self, worker: FleetWorker) -> None:
        """The lease runs out."""
        self._observer.execute(
            "UPDATE worker SET lease_until = now() - interval '1 second' WHERE worker_id = %s", (worker.worker_id,)
        )

    def lose_session(self, worker: FleetWorker) -> None:
        """The heartbeat's connection breaks. The server notices a moment later."""
        pid = worker.session.info.backend_pid
        worker.session.close()
        gone = "SELECT NOT EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = %s) AS gone"
        wait_until(lambda: bool(self._one(gone, pid)["gone"]))

    def pass_time(self) -> None:
        """Let `STEP` seconds pass for the queue."""
        self._observer.execute(
            "UPDATE run SET created_at = created_at - make_interval(secs => %(step)s), "
            "ready_at = ready_at - make_interval(secs => %(step)s) WHERE finished_at IS NULL",
            {"step": STEP},
        )

    # --- looking ----------------------------------------------------------------------------------

    def _one(self, query: str, *parameters: Any) -> DictRow:
        row = self._observer.execute(query.encode(), parameters).fetchone()
        assert row is not None
        return row

    def now(self) -> Any:
        return self._one("SELECT now() AS now")["now"]

    def snapshot(self) -> Snapshot:
        with self._observer.pipeline():
            runs = self._observer.execute("SELECT * FROM run")
            threads = self._observer.execute("SELECT * FROM thread")
            workers = self._observer.execute("SELECT * FROM worker")
            events = self._observer.execute("SELECT thread_id, seq, run_id FROM event ORDER BY thread_id, seq")
            checkpoints = self._observer.execute("SELECT thread_id::uuid, checkpoint_id AS id FROM checkpoints")
            blobs = self._observer.execute("SELECT thread_id::uuid, version AS id FROM checkpoint_blobs")
        log: dict[UUID, list[tuple[int, UUID]]] = {}
        for row in events:
            log.setdefault(row["thread_id"], []).append((row["seq"], row["run_id"]))
        return Snapshot(
            runs={row["run_id"]: row for row in runs},
            threads={row["thread_id"]: row for row in threads},
            workers={row["worker_id"]: row for row in workers},
            log=log,
            checkpoints=_by_thread(checkpoints),
            blobs=_by_thread(blobs),
        )


def _by_thread(rows: psycopg.Cursor[DictRow]) -> dict[UUID, set[str]]:
    found: dict[UUID, set[str]] = {}
    for row in rows:
        found.setdefault(row["thread_id"], set()).add(row["id"])
    return found


async def _hand_in(write: Write) -> None:
    writer = write.holding.writer
    for number in range(write.events):
        writer.add_event("values", orjson.dumps({"number": number}))
    if write.checkpoint is not None:
        writer.add_checkpoint(checkpoint_entry(writer.thread_id, writer.run_id, write.checkpoint))
    await (writer.flush() if write.outcome is None else writer.finish(write.outcome))


def checkpoint_entry(thread_id: UUID, run_id: UUID, checkpoint_id: str) -> CheckpointEntry:
    """A checkpoint with one channel whose value is a blob."""
    checkpoint = {"id": checkpoint_id, "channel_values": {}, "channel_versions": {"channel": checkpoint_id}}
    return CheckpointEntry(
        [(str(thread_id), "", "channel", checkpoint_id, "json", b"1")],
        (
            str(thread_id),
            "",
            checkpoint_id,
            None,
            orjson.dumps(checkpoint).decode(),
            orjson.dumps({"run_id": str(run_id)}).decode(),
        ),
        CHECKPOINT,
    )


def new_checkpoint_id() -> str:
    """Ids rise with time, as LangGraph's do."""
    return str(uuid7())


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true in time")
        time.sleep(0.001)

"""One commit of the journal: what many runs handed in, as a handful of array statements.

Here a stale write is refused: `VERIFY` makes the whole transaction fail unless each run is held under its fence. Then
`Transactions.write_held` (`journal/transactions.py`) finds the stale runs and writes the others. Only the spawning of a
child is outside of the journal; it checks the fence itself (`engine/children/spawn.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import DictRow

from holdfast.db.arrays import Array, bigints, booleans, byteas, integers, smallints, texts, uuids
from holdfast.engine.children.families import AWAIT_CHILDREN, WAIT_RUNS
from holdfast.engine.children.parents import READY_PARENTS, lock_with_parents
from holdfast.engine.interrupts.rows import RunEnd, update_interrupts
from holdfast.engine.outbox import QUEUE_WEBHOOKS
from holdfast.engine.outcome import END_RUNS, END_THREADS, RELEASE_RUNS, Ended, Released, RolledBack, Waiting
from holdfast.engine.queue import LOCK_THREADS, PROMOTE_NEXT, SET_THREAD_STATUS
from holdfast.engine.ready import ReadyRun
from holdfast.engine.rollback import erase_runs
from holdfast.engine.states import RunStatus
from holdfast.engine.usage import SharedUsage, record_usage
from holdfast.journal.entries import (
    CheckpointEntry,
    CheckpointRow,
    EventEntry,
    Portion,
    ProgressEntry,
    UsageEntry,
    WriteKey,
    WriteRow,
    WritesEntry,
)
from holdfast.resources.checkpoints import BlobRow
from holdfast.streams.serialize import to_json, to_jsonb

# Locks the runs, and divides by zero unless each is held under the given fence. The error makes the whole pipelined
# transaction fail without a round trip in its middle. If another transaction is just taking a run over, this statement
# waits for it and reads the row again, so the run counts as not held. `final` runs end in this transaction, which a
# rollback requested meanwhile must prevent. `written_at` is the time of the transaction's events.
VERIFY = """
WITH held AS (
    SELECT run.run_id FROM run
    JOIN unnest(%(run_ids)b::uuid[], %(fences)b::bigint[], %(finals)b::boolean[]) AS claim(run_id, fence, final)
      ON run.run_id = claim.run_id AND run.fence = claim.fence AND run.status = 'running'
     AND NOT (claim.final AND run.cancel_action IS NOT DISTINCT FROM 'rollback')
    ORDER BY run.run_id FOR NO KEY UPDATE OF run
)
SELECT 1 / (CASE WHEN count(*) = %(count)s THEN 1 ELSE 0 END), now() AS written_at FROM held
"""

# Locks the same runs and returns their states instead of failing.
INSPECT = """
SELECT run_id, fence, status, cancel_action FROM run
WHERE run_id = ANY(%(run_ids)s) ORDER BY run_id FOR NO KEY UPDATE
"""

LAST_EVENT = "SELECT seq FROM event WHERE thread_id = %(thread_id)s ORDER BY seq DESC LIMIT 1"

INSERT_EVENTS = """
INSERT INTO event (thread_id, seq, run_id, kind, namespace, data)
SELECT * FROM unnest(%(thread_ids)b::uuid[], %(seqs)b::bigint[], %(run_ids)b::uuid[], %(kinds)b::text[],
                     %(namespaces)b::text[], %(datas)b::bytea[])
"""

# For a repeated commit whose answer was lost. If it has happened, the events are there, written under this fence.
REPEAT_EVENTS = INSERT_EVENTS + "ON CONFLICT (thread_id, seq) DO NOTHING"

PUT_BLOBS = """
INSERT INTO checkpoint_blobs (thread_id, checkpoint_ns, channel, version, type, blob)
SELECT * FROM unnest(%(thread_ids)b::text[], %(namespaces)b::text[], %(channels)b::text[], %(versions)b::text[],
                     %(types)b::text[], %(blobs)b::bytea[])
ON CONFLICT (thread_id, checkpoint_ns, channel, version) DO NOTHING
"""

PUT_CHECKPOINTS = """
INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata)
SELECT c.thread_id, c.checkpoint_ns, c.checkpoint_id, c.parent, c.checkpoint::jsonb, c.metadata::jsonb
FROM unnest(%(thread_ids)b::text[], %(namespaces)b::text[], %(ids)b::text[], %(parents)b::text[],
            %(checkpoints)b::text[], %(metadatas)b::text[])
     AS c(thread_id, checkpoint_ns, checkpoint_id, parent, checkpoint, metadata)
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id)
DO UPDATE SET checkpoint = EXCLUDED.checkpoint, metadata = EXCLUDED.metadata
"""

INSERT_WRITES = """
INSERT INTO checkpoint_writes (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, blob)
SELECT * FROM unnest(%(thread_ids)b::text[], %(namespaces)b::text[], %(ids)b::text[], %(tasks)b::text[],
                     %(paths)b::text[], %(indexes)b::integer[], %(channels)b::text[], %(types)b::text[],
                     %(blobs)b::bytea[])
ON CONFLICT (thread_id, checkpoint_ns, checkpoint_id, task_id, idx)
"""
PUT_WRITES = INSERT_WRITES + "DO NOTHING"
REPLACE_WRITES = INSERT_WRITES + "DO UPDATE SET channel = EXCLUDED.channel, type = EXCLUDED.type, blob = EXCLUDED.blob"

# Deletes an answer that a node has used. LangGraph drops it in memory only, so the next attempt would use the same
# answer for the next interrupt.
TAKE_ANSWERS = """
DELETE FROM checkpoint_writes USING unnest(%(thread_ids)b::text[], %(namespaces)b::text[], %(ids)b::text[],
                                           %(tasks)b::text[], %(indexes)b::integer[])
    AS taken(thread_id, checkpoint_ns, checkpoint_id, task_id, idx)
WHERE checkpoint_writes.thread_id = taken.thread_id AND checkpoint_writes.checkpoint_ns = taken.checkpoint_ns
  AND checkpoint_writes.checkpoint_id = taken.checkpoint_id AND checkpoint_writes.task_id = taken.task_id
  AND checkpoint_writes.idx = taken.idx
"""

MARK_PROGRESS = """
UPDATE run SET progress = p.progress FROM unnest(%(run_ids)b::uuid[], %(progress)b::smallint[]) AS p(run_id, progress)
WHERE run.run_id = p.run_id AND run.progress < p.progress
"""

# For a suspect that has made progress: the next crash of its worker counts as its first.
CLEAR_SUSPICION = "UPDATE run SET crashes_in_a_row = 0 WHERE run_id = ANY(%(run_ids)s) AND crashes_in_a_row > 0"


class RunState(NamedTuple):
    """A run's row, as far as it decides who may write."""

    fence: int
    status: str
    cancel_action: str | None


async def lock_and_read(connection: AsyncConnection[DictRow], run_ids: Iterable[UUID]) -> dict[UUID, RunState]:
    """Lock runs and return their states. Deleted runs are missing."""
    rows = await (await connection.execute(INSPECT, {"run_ids": list(run_ids)})).fetchall()
    return {row["run_id"]: RunState(row["fence"], row["status"], row["cancel_action"]) for row in rows}


async def last_event_number(connection: AsyncConnection[DictRow], thread_id: UUID) -> int:
    """The number of the thread's last event; 0 if it has none."""
    row = await (await connection.execute(LAST_EVENT, {"thread_id": thread_id})).fetchone()
    return 0 if row is None else int(row["seq"])


@dataclass(frozen=True, slots=True)
class Written:
    """Cursors whose rows can be read once the pipeline has been sent."""

    # Runs that became ready, by several statements. A row may have a column `ready` that says otherwise.
    promoted: list[AsyncCursor[DictRow]]
    verified: AsyncCursor[DictRow] | None
    used: AsyncCursor[DictRow] | None = None

    async def shared_usage(self) -> dict[UUID, list[SharedUsage]]:
        """For runs that share budgets and have used some: what the other runs have used of each budget."""
        found: dict[UUID, list[SharedUsage]] = {}
        for row in [] if self.used is None else await self.used.fetchall():
            found.setdefault(row["run_id"], []).append(SharedUsage.of(row))
        return found

    async def ready(self) -> list[ReadyRun]:
        """The waiting runs that became ready."""
        rows = [row for cursor in self.promoted for row in await cursor.fetchall()]
        return [ReadyRun(row["run_id"], row["graph_id"]) for row in rows if row.get("ready", True)]

    async def written_at(self) -> datetime | None:
        """The time of the transaction's events. None if an earlier try may have written them."""
        if self.verified is None:
            return None
        row = await self.verified.fetchone()
        return None if row is None else row["written_at"]


Columns = dict[str, Callable[[Any], Array]]
PLACE: Columns = {"thread_ids": texts, "namespaces": texts}
EVENTS: Columns = {
    "thread_ids": uuids,
    "seqs": bigints,
    "run_ids": uuids,
    "kinds": texts,
    "namespaces": texts,
    "datas": byteas,
}
BLOBS: Columns = {**PLACE, "channels": texts, "versions": texts, "types": texts, "blobs": byteas}
CHECKPOINTS: Columns = {**PLACE, "ids": texts, "parents": texts, "checkpoints": texts, "metadatas": texts}
WRITE_KEYS: Columns = {**PLACE, "ids": texts, "tasks": texts, "indexes": integers}
WRITES: Columns = {**WRITE_KEYS, "paths": texts, "channels": texts, "types": texts, "blobs": byteas}


def _arrays(rows: Iterable[Any], columns: Columns) -> dict[str, Array]:
    turned = zip(*rows, strict=True)
    return {name: encode(values) for (name, encode), values in zip(columns.items(), turned, strict=True)}


async def write_portions(
    connection: AsyncConnection[DictRow], portions: list[Portion], *, verify: bool, repeat: bool
) -> Written:
    """Write everything in the transaction that the caller has begun; in a pipeline, without a round trip.

    With `verify` the transaction fails if any run is not held under its fence. Without it, the caller has locked the
    runs and checked that. `repeat`: an earlier try may have been committed.
    """
    verified = None
    outcomes = [portion for portion in portions if portion.outcome is not None]
    thread_ids = sorted({portion.thread_id for portion in outcomes})
    if verify:
        if touched := sorted({portion.thread_id for portion in portions if portion.touches_thread}):
            await connection.execute(LOCK_THREADS, {"thread_ids": touched})
        if outcomes:
            parents = [portion.parent_to_wake for portion in outcomes]
            await lock_with_parents(connection, [portion.run_id for portion in portions], parents)
        verified = await connection.execute(VERIFY, _claims(portions))
    used = await _write_entries(connection, portions, repeat=repeat)
    return Written(await _write_outcomes(connection, outcomes, thread_ids), None if repeat else verified, used)


def _claims(portions: list[Portion]) -> dict[str, Any]:
    return {
        "run_ids": uuids([portion.run_id for portion in portions]),
        "fences": bigints([portion.fence for portion in portions]),
        "finals": booleans([isinstance(portion.outcome, Ended) for portion in portions]),
        "count": len(portions),
    }


async def _write_entries(
    connection: AsyncConnection[DictRow], portions: list[Portion], *, repeat: bool
) -> AsyncCursor[DictRow] | None:
    events: list[tuple[UUID, int, UUID, str, str, bytes]] = []
    blobs: dict[tuple[str, str, str, str], BlobRow] = {}
    checkpoints: dict[tuple[str, str, str], CheckpointRow] = {}
    # A statement may not change one row twice. So of all writes to one place, keep only the one that would remain.
    kept: dict[WriteKey, WriteRow] = {}
    replaced: dict[WriteKey, WriteRow] = {}
    taken: set[WriteKey] = set()
    used: dict[UUID, str] = {}
    cleared: list[UUID] = []
    for portion in portions:
        seq = portion.first_seq
        for entry in portion.entries:
            if type(entry) is EventEntry:
                events.append((portion.thread_id, seq, portion.run_id, entry.kind, entry.namespace, entry.data))
                seq += 1
            elif type(entry) is CheckpointEntry:
                for blob in entry.blobs:
                    blobs.setdefault(blob[:4], blob)
                checkpoints[entry.row[:3]] = entry.row
                portion.progress = max(entry.progress, portion.progress)
            elif type(entry) is WritesEntry:
                for key, row in entry.rows:
                    taken.discard(key)
                    if entry.replace:
                        replaced[key] = row
                    else:
                        kept.setdefault(key, row)
                if entry.takes is not None:
                    replaced.pop(entry.takes, None)
                    kept.pop(entry.takes, None)
                    taken.add(entry.takes)
                portion.progress = max(entry.progress, portion.progress)
            elif type(entry) is UsageEntry:
                used[portion.run_id] = entry.usage
            elif type(entry) is ProgressEntry:
                cleared.append(portion.run_id)
    for key in replaced:
        kept.pop(key, None)
    if events:
        await connection.execute(REPEAT_EVENTS if repeat else INSERT_EVENTS, _arrays(events, EVENTS))
    if blobs:
        await connection.execute(PUT_BLOBS, _arrays(blobs.values(), BLOBS))
    if checkpoints:
        await connection.execute(PUT_CHECKPOINTS, _arrays(checkpoints.values(), CHECKPOINTS))
    for statement, writes in ((PUT_WRITES, kept), (REPLACE_WRITES, replaced)):
        if writes:
            rows = [(*key, *row) for key, row in writes.items()]
            await connection.execute(statement, _arrays(rows, WRITES))
    if taken:
        await connection.execute(TAKE_ANSWERS, _arrays(taken, WRITE_KEYS))
    # END_RUNS records the progress of the others.
    if advanced := [portion for portion in portions if portion.progress and not isinstance(portion.outcome, Ended)]:
        run_ids, progress = zip(*((portion.run_id, portion.progress) for portion in advanced), strict=True)
        await connection.execute(MARK_PROGRESS, {"run_ids": uuids(run_ids), "progress": smallints(progress)})
    if cleared:
        await connection.execute(CLEAR_SUSPICION, {"run_ids": cleared})
    return await record_usage(connection, used) if used else None


async def _write_outcomes(
    connection: AsyncConnection[DictRow], outcomes: list[Portion], thread_ids: list[UUID]
) -> list[AsyncCursor[DictRow]]:
    ended = [(portion, portion.outcome) for portion in outcomes if isinstance(portion.outcome, Ended)]
    released = [(portion, portion.outcome) for portion in outcomes if isinstance(portion.outcome, Released)]
    rolled_back = [portion for portion in outcomes if isinstance(portion.outcome, RolledBack)]
    if ended:
        errors = texts([None if end.error is None else to_jsonb(to_json(end.error)) for _, end in ended])
        await connection.execute(
            END_RUNS,
            {
                "run_ids": uuids([portion.run_id for portion, _ in ended]),
                "statuses": texts([str(end.status) for _, end in ended]),
                "errors": errors,
                "tracebacks": texts([end.traceback and end.traceback.replace("\0", "") for _, end in ended]),
                "dead_letters": texts([end.dead_letter for _, end in ended]),
                "progress": smallints([portion.progress for portion, _ in ended]),
            },
        )
        await connection.execute(
            END_THREADS,
            {
                "thread_ids": uuids([portion.thread_id for portion, _ in ended]),
                "statuses": texts([end.thread_status for _, end in ended]),
                "values": texts([None if end.values is None else to_jsonb(end.values) for _, end in ended]),
                "interrupts": texts(
                    [None if end.interrupts is None else to_jsonb(to_json(end.interrupts)) for _, end in ended]
                ),
                "errors": errors,
                "last_seqs": bigints([portion.last_seq for portion, _ in ended]),
            },
        )
        if with_webhooks := [portion.run_id for portion, _ in ended if portion.effects.webhook]:
            await connection.execute(QUEUE_WEBHOOKS, {"run_ids": with_webhooks})
        if asking := [
            _run_end(portion, end) for portion, end in ended if portion.effects.touches_interrupts or end.interrupts
        ]:
            await update_interrupts(connection, asking)
    promoted = await _write_waits(connection, outcomes)
    if released:
        promoted.append(
            await connection.execute(
                RELEASE_RUNS,
                {
                    "run_ids": [portion.run_id for portion, _ in released],
                    "afters": [release.after for _, release in released],
                },
            )
        )
    for portion in rolled_back:
        await erase_runs(connection, portion.thread_id, [portion.run_id])
    if not ended and not rolled_back:
        return promoted
    promoted.append(await connection.execute(PROMOTE_NEXT, {"thread_ids": thread_ids}))
    if rolled_back:
        await connection.execute(SET_THREAD_STATUS, {"thread_ids": [portion.thread_id for portion in rolled_back]})
    if parents := [parent for portion in outcomes if (parent := portion.parent_to_wake) is not None]:
        promoted.append(await connection.execute(READY_PARENTS, {"run_ids": parents}))
    return promoted


async def _write_waits(connection: AsyncConnection[DictRow], outcomes: list[Portion]) -> list[AsyncCursor[DictRow]]:
    """Let parents wait for their children. A parent whose children have ended meanwhile becomes ready at once."""
    waiting = {portion.run_id: portion.outcome for portion in outcomes if isinstance(portion.outcome, Waiting)}
    if not waiting:
        return []
    awaited = [(run_id, *one) for run_id, outcome in waiting.items() for one in outcome.awaited.items()]
    await connection.execute(
        AWAIT_CHILDREN,
        {
            "parents": list(waiting),
            "run_ids": [run_id for run_id, _, _ in awaited],
            "keys": [key for _, key, _ in awaited],
            "hows": [2 if failure_is_enough else 1 for _, _, failure_is_enough in awaited],
        },
    )
    return [await connection.execute(WAIT_RUNS, {"run_ids": list(waiting)})]


def _run_end(portion: Portion, end: Ended) -> RunEnd:
    waiting = None if end.thread_status is None else end.interrupts
    success = end.status == RunStatus.SUCCESS
    return RunEnd(portion.thread_id, portion.run_id, success, waiting, branches=portion.effects.branches)

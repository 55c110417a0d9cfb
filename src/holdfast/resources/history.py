"""Delete past states of threads by their age.

A thread keeps what it needs, at any age: the latest checkpoint of each namespace with its writes, which include pending
interrupts. The checkpoints of a subgraph's call are deleted with the checkpoint that the call was made from. A thread
with an unfinished run is not pruned, because the run may resume from any checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.row_by_row import RowsSetAside
from holdfast.db.stored_json import object_fields
from holdfast.db.time_limit import TooSlow, time_limit

# Requests that create a run in the thread wait for the transaction that prunes it, so it must be short.
MAX_CHECKPOINTS_PER_TRANSACTION = 500
# A thread that is always active would be due each time one of its checkpoints expires. It is checked at most this often
# in one time to live.
CHECKS_PER_TTL = 20


# The index `thread_history` contains these threads in this order.
DUE = """
status <> 'busy' AND hidden_at IS NULL AND has_state AND state_updated_at > coalesce(history_from, created_at)
AND coalesce(history_from, created_at) < now() - make_interval(secs => %(ttl)s)
"""

# While the thread is locked, no checkpoint can be added: creating a run and updating the state lock the thread too.
LOCK_DUE = f"""
SELECT thread_id, now() AS now FROM thread WHERE {DUE} AND thread_id <> ALL(%(aside)s)
ORDER BY coalesce(history_from, created_at) LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
"""

LIST_DUE = f"""
SELECT thread_id, now() AS now FROM thread WHERE {DUE} AND thread_id > %(after)s::uuid ORDER BY thread_id LIMIT 100
"""

# A value that is stored as a series of changes is in no single checkpoint, so all of them are needed. LangGraph's
# DeltaChannel marks such values by counters in the metadata, or by `true` in place of a value that has a blob.
USES_DELTAS = f"""
SELECT EXISTS (
    SELECT 1 FROM checkpoints
    WHERE thread_id = %(thread_id)s::uuid::text
      AND metadata ?| ARRAY['counters_since_delta_snapshot', 'delta_writes_versioned']
) OR EXISTS (
    SELECT 1 FROM checkpoints c
    CROSS JOIN LATERAL jsonb_each({object_fields("c.checkpoint -> 'channel_values'")}) AS inline
    JOIN checkpoint_blobs b ON b.thread_id = c.thread_id AND b.checkpoint_ns = c.checkpoint_ns
      AND b.channel = inline.key AND b.version = c.checkpoint -> 'channel_versions' ->> inline.key
    WHERE c.thread_id = %(thread_id)s::uuid::text AND inline.value = 'true'::jsonb
) AS deltas
"""

# LangGraph's ids are UUIDs that sort by their time (version 6), so the age of a checkpoint is in its key. Checkpoints
# with other ids are kept, because their age is unknown. `head`: the latest checkpoint of a namespace. `sender`: the
# checkpoint from which a head in an old format reads the tasks sent to it. `over`: true for a call of a subgraph (its
# namespace ends in a task id) when the checkpoint of the root graph that made the call is neither young nor the latest.
OLD_CHECKPOINTS = """
WITH heads AS (
    SELECT DISTINCT ON (checkpoint_ns) checkpoint_ns, checkpoint_id AS head,
           CASE WHEN jsonb_typeof(checkpoint -> 'v') = 'number' AND checkpoint -> 'v' < '4'
                THEN parent_checkpoint_id END AS sender,
           metadata -> 'parents' ->> '' AS root
    FROM checkpoints WHERE thread_id = %(thread_id)s::uuid::text
    ORDER BY checkpoint_ns, checkpoint_id DESC
), spaces AS (
    SELECT heads.*,
           coalesce(checkpoint_ns LIKE '%%:%%' AND head < %(before)s AND root < %(before)s
                    AND root <> (SELECT latest.head FROM heads latest WHERE latest.checkpoint_ns = ''), false) AS over
    FROM heads
)
SELECT c.checkpoint_ns, c.checkpoint_id, c.checkpoint_id < %(before)s AS old
FROM spaces JOIN checkpoints c ON c.thread_id = %(thread_id)s::uuid::text AND c.checkpoint_ns = spaces.checkpoint_ns
WHERE substr(c.checkpoint_id, 15, 1) = '6'
  AND (spaces.over OR c.checkpoint_id <> spaces.head AND c.checkpoint_id IS DISTINCT FROM spaces.sender)
ORDER BY c.checkpoint_id LIMIT %(limit)s
"""

# The statements below take the keys of checkpoints and find rows by them.
DELETE_CHECKPOINTS = f"""
WITH deleted AS (
    DELETE FROM checkpoints USING unnest(%(namespaces)s::text[], %(ids)s::text[])
        AS doomed(checkpoint_ns, checkpoint_id)
    WHERE checkpoints.thread_id = %(thread_id)s::uuid::text AND checkpoints.checkpoint_ns = doomed.checkpoint_ns
      AND checkpoints.checkpoint_id = doomed.checkpoint_id
    RETURNING checkpoints.checkpoint_ns, checkpoint -> 'channel_versions' AS versions
)
SELECT DISTINCT checkpoint_ns, version.key AS channel, version.value AS version
FROM deleted CROSS JOIN LATERAL jsonb_each_text({object_fields("versions")}) AS version
"""

DELETE_WRITES = """
DELETE FROM checkpoint_writes USING unnest(%(namespaces)s::text[], %(ids)s::text[])
    AS doomed(checkpoint_ns, checkpoint_id)
WHERE checkpoint_writes.thread_id = %(thread_id)s::uuid::text
  AND checkpoint_writes.checkpoint_ns = doomed.checkpoint_ns
  AND checkpoint_writes.checkpoint_id = doomed.checkpoint_id
"""

# Blobs that a remaining checkpoint also refers to are excluded. They are subtracted as one set, because looking them up
# one by one would be slower.
DELETE_BLOBS = f"""
DELETE FROM checkpoint_blobs USING (
    SELECT * FROM unnest(%(namespaces)s::text[], %(channels)s::text[], %(versions)s::text[])
    EXCEPT
    SELECT c.checkpoint_ns, version.key, version.value
    FROM checkpoints c
    CROSS JOIN LATERAL jsonb_each_text({object_fields("c.checkpoint -> 'channel_versions'")}) AS version
    WHERE c.thread_id = %(thread_id)s::uuid::text AND c.checkpoint_ns = ANY(%(namespaces)s::text[])
) AS unused(checkpoint_ns, channel, version)
WHERE checkpoint_blobs.thread_id = %(thread_id)s::uuid::text
  AND checkpoint_blobs.checkpoint_ns = unused.checkpoint_ns AND checkpoint_blobs.channel = unused.channel
  AND checkpoint_blobs.version = unused.version
"""

# The parent of the oldest remaining checkpoint has been deleted.
FORGET_PARENTS = """
UPDATE checkpoints SET parent_checkpoint_id = NULL
FROM unnest(%(namespaces)s::text[], %(ids)s::text[]) AS doomed(checkpoint_ns, checkpoint_id)
WHERE checkpoints.thread_id = %(thread_id)s::uuid::text AND checkpoints.checkpoint_ns = doomed.checkpoint_ns
  AND checkpoints.parent_checkpoint_id = doomed.checkpoint_id
"""

# A thread without checkpoints that can expire, or one that may not be pruned, is not due again until its state is
# written. Any other thread is due again when its oldest remaining checkpoint expires, or somewhat later, but it must
# stay due. (A state can be older than its checkpoints if it was written by a host with a wrong clock.)
MARK_PRUNED = """
UPDATE thread SET history_from = CASE
    WHEN %(next)s::timestamptz IS NULL OR state_updated_at <= %(before)s::timestamptz THEN state_updated_at
    ELSE least(%(next)s::timestamptz, state_updated_at - interval '1 microsecond') END
WHERE thread_id = %(thread_id)s
"""

# A client may want to return to the state at the beginning of the run.
HAS_DEAD_LETTER = """
SELECT 1 FROM run WHERE thread_id = %(thread_id)s AND dead_letter IS NOT NULL LIMIT 1
"""

# These UUIDs count units of 100 ns since the Gregorian reform.
_BEGINNING = datetime(1582, 10, 15, tzinfo=UTC)


@dataclass(frozen=True)
class Pruned:
    """The result of pruning one thread. `more`: the thread has more expired checkpoints and is still due."""

    thread_id: UUID
    checkpoints: int
    more: bool


def first_id(at: datetime) -> str:
    """An id that is greater than the ids of all checkpoints written before this time."""
    past = at - _BEGINNING
    ticks = (past.days * 86_400 + past.seconds) * 10_000_000 + past.microseconds * 10
    digits = f"{ticks:015x}"
    return f"{digits[:8]}-{digits[8:12]}-6{digits[12:]}"


def written_at(checkpoint_id: str) -> datetime:
    """When a checkpoint was written, by its id."""
    digits = checkpoint_id[:8] + checkpoint_id[9:13] + checkpoint_id[15:18]
    return _BEGINNING + timedelta(microseconds=int(digits, 16) // 10)


async def prune_next(
    database: Database,
    ttl: float,
    aside: RowsSetAside | None = None,
    *,
    at_once: int = MAX_CHECKPOINTS_PER_TRANSACTION,
    seconds: float | None = None,
) -> Pruned | None:
    """Prune the thread that has waited longest, in one transaction; None when none is due. A thread that cannot be
    pruned is skipped from then on.

    `at_once`: the maximum number of checkpoints to delete. `seconds`: the time limit; None: no limit. Raises TooSlow
    when the limit is exceeded and a smaller `at_once` may be faster.
    """
    parameters = {"ttl": ttl, "aside": [] if aside is None else aside.ids()}
    due: DictRow | None = None
    try:
        async with time_limit(database, seconds), database.transaction() as connection:
            due = await (await connection.execute(LOCK_DUE, parameters)).fetchone()
            return None if due is None else await _prune(connection, due["thread_id"], due["now"], ttl, at_once)
    except Exception as error:
        if due is None or aside is None or is_outage(error) or (isinstance(error, TooSlow) and at_once > 1):
            raise
        aside.put(due, error)
        return Pruned(due["thread_id"], 0, more=False)


async def count_old(database: Database, ttl: float) -> int:
    """Count the checkpoints that are due for deletion. Reads one thread after the other and locks none."""
    counted, after = 0, UUID(int=0)
    async with database.connection() as connection:
        while due := await (await connection.execute(LIST_DUE, {"ttl": ttl, "after": after})).fetchall():
            for row in due:
                old, _ = await _old(connection, row["thread_id"], row["now"] - timedelta(seconds=ttl), limit=None)
                counted += len(old)
            after = due[-1]["thread_id"]
    return counted


async def _old(
    connection: AsyncConnection[DictRow], thread_id: UUID, before: datetime, limit: int | None
) -> tuple[list[DictRow], datetime | None]:
    """The keys of the expired checkpoints, oldest first, and the time when the oldest of those that can expire later
    was written. Returns no keys for a thread that needs all its checkpoints."""
    deltas = await (await connection.execute(USES_DELTAS, {"thread_id": thread_id})).fetchone()
    if deltas is None or deltas["deltas"]:
        return [], None
    if await (await connection.execute(HAS_DEAD_LETTER, {"thread_id": thread_id})).fetchone() is not None:
        return [], None
    parameters = {"thread_id": thread_id, "before": first_id(before), "limit": limit}
    # Planned anew for each thread: a generic plan would be chosen for short threads and be slow for long ones.
    rows = await (await connection.execute(OLD_CHECKPOINTS, parameters, prepare=False)).fetchall()
    young = next((written_at(row["checkpoint_id"]) for row in rows if not row["old"]), None)
    return [row for row in rows if row["old"]], young


async def _prune(
    connection: AsyncConnection[DictRow],
    thread_id: UUID,
    now: datetime,
    ttl: float,
    at_once: int = MAX_CHECKPOINTS_PER_TRANSACTION,
) -> Pruned:
    life = timedelta(seconds=ttl)
    before = now - life
    old, young = await _old(connection, thread_id, before, limit=at_once + 1)
    more = len(old) > at_once
    if doomed := old[:at_once]:
        await _delete(connection, thread_id, doomed)
    if not more:
        following = None if young is None else max(young, before + life / CHECKS_PER_TTL)
        await connection.execute(MARK_PRUNED, {"thread_id": thread_id, "next": following, "before": before})
    return Pruned(thread_id, len(doomed), more)


async def _delete(connection: AsyncConnection[DictRow], thread_id: UUID, doomed: list[DictRow]) -> None:
    keys = {
        "thread_id": thread_id,
        "namespaces": [row["checkpoint_ns"] for row in doomed],
        "ids": [row["checkpoint_id"] for row in doomed],
    }
    freed = await (await connection.execute(DELETE_CHECKPOINTS, keys, prepare=False)).fetchall()
    await connection.execute(DELETE_WRITES, keys, prepare=False)
    await connection.execute(FORGET_PARENTS, keys, prepare=False)
    await connection.execute(
        DELETE_BLOBS,
        {
            "thread_id": thread_id,
            "namespaces": [row["checkpoint_ns"] for row in freed],
            "channels": [row["channel"] for row in freed],
            "versions": [row["version"] for row in freed],
        },
        prepare=False,
    )

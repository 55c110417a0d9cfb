"""Reading the event log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

# What the creation of a run says of it, if it says something: the attempt that will be its first.
ACCEPTANCE = b'{"attempt":1}'

# Bytes of events that are read at once. A reader holds about one portion for as long as its client does not take it.
PORTION_BYTES = 1024 * 1024

# Read by primary key, so that a reader costs what it is sent, whatever the log holds. `octet_length` reads the length
# of a value that is stored apart, not the value: what does not fit into the portion is neither fetched nor sent.
READ_AFTER = """
SELECT seq, run_id, kind, namespace, data, created_at, more FROM (
    SELECT following.*, row_number() OVER so_far AS number, lead(true, 1, false) OVER so_far AS more,
           sum(octet_length(data)) OVER so_far AS bytes
    FROM (SELECT seq, run_id, kind, namespace, data, created_at FROM event
          WHERE thread_id = %(thread_id)s AND seq > %(after)s ORDER BY seq LIMIT %(limit)s + 1) AS following
    WINDOW so_far AS (ORDER BY seq ROWS UNBOUNDED PRECEDING)
) AS portion WHERE number = 1 OR (number <= %(limit)s AND bytes <= %(bytes)s) ORDER BY seq
"""

# Only of logs that have grown: of thousands of watched threads next to none have, and what does not come need not be
# read.
HEADS = """
SELECT watched.thread_id, newest.seq
FROM unnest(%(thread_ids)s::uuid[], %(seqs)s::bigint[]) AS watched(thread_id, seq),
     LATERAL (SELECT seq FROM event WHERE event.thread_id = watched.thread_id ORDER BY seq DESC LIMIT 1) AS newest
WHERE newest.seq > watched.seq
"""

# What the runs that have ended left behind: the thread's row learns of it at the end of each.
ENDED_THROUGH = "SELECT last_seq FROM thread WHERE thread_id = %(thread_id)s"

# A run that is gone (rolled back, deleted) has ended too.
ENDED_RUNS = """
SELECT watched.run_id FROM unnest(%(run_ids)s::uuid[]) AS watched(run_id)
LEFT JOIN run USING (run_id) WHERE run.run_id IS NULL OR run.finished_at IS NOT NULL
"""

LAST_OUTPUT = """
SELECT data FROM event
WHERE thread_id = %(thread_id)s AND seq >= %(first_seq)s AND run_id = %(run_id)s
  AND kind IN ('values', 'output') AND namespace = ''
ORDER BY seq DESC LIMIT 1
"""

# What the run that is under way has asked so far. Its thread's row says so only when the run has ended.
REQUESTED_INPUTS = """
SELECT event.data FROM run JOIN event ON event.thread_id = run.thread_id AND event.seq >= run.first_seq
WHERE run.thread_id = %(thread_id)s AND run.status = 'running'
  AND event.run_id = run.run_id AND event.kind = 'input.requested'
"""

# Of a thread's run, or of the last that has begun: where it and its subgraphs began and ended.
LIFE = """
SELECT event.seq, event.run_id, event.kind, event.namespace, event.data, event.created_at
FROM (SELECT run_id, first_seq FROM run
      WHERE thread_id = %(thread_id)s AND first_seq IS NOT NULL AND started_at IS NOT NULL
        AND (%(run_id)s::uuid IS NULL OR run_id = %(run_id)s)
      ORDER BY created_at DESC, run_id DESC LIMIT 1) AS told
JOIN event ON event.thread_id = %(thread_id)s AND event.seq >= told.first_seq AND event.run_id = told.run_id
WHERE event.kind IN ('metadata', 'lifecycle', 'end') ORDER BY event.seq
"""

HAS_EVENT = "SELECT 1 FROM event WHERE thread_id = %(thread_id)s AND seq = %(seq)s AND run_id = %(run_id)s"

# `next` is the first event after a cursor that the log still has; `last` the highest number ever given out.
GAP = """
SELECT (SELECT seq FROM event WHERE event.thread_id = %(thread_id)s AND seq > %(since)s ORDER BY seq LIMIT 1) AS next,
       greatest((SELECT last_seq FROM thread WHERE thread.thread_id = %(thread_id)s),
                (SELECT seq FROM event WHERE event.thread_id = %(thread_id)s ORDER BY seq DESC LIMIT 1), 0) AS last
"""


class LogEvent(NamedTuple):
    """One row of the log. `namespace` is empty for the root graph.

    A tuple: of nothing else are there so many, and it is made in half the time."""

    seq: int
    run_id: UUID
    kind: str
    namespace: str
    data: bytes
    created_at: datetime


class Portion(NamedTuple):
    """Consecutive events. `more`: the log has others behind them."""

    events: list[LogEvent]
    more: bool


async def read_after(connection: AsyncConnection[DictRow], thread_id: UUID, after: int, limit: int = 500) -> Portion:
    """A thread's events with a number above `after`, in order: at most `limit`, and at most PORTION_BYTES unless the
    first alone is larger."""
    parameters = {"thread_id": thread_id, "after": after, "limit": limit, "bytes": PORTION_BYTES}
    cursor = await connection.execute(READ_AFTER, parameters, binary=True)
    more = False
    events = []
    for row in await cursor.fetchall():
        more = row.pop("more")
        events.append(LogEvent(**row))
    return Portion(events, more)


async def has_event(connection: AsyncConnection[DictRow], thread_id: UUID, event: LogEvent) -> bool:
    """Whether a thread's log has this event. It has not when the event has expired, and when the thread was deleted:
    then another thread may have its id."""
    parameters = {"thread_id": thread_id, "seq": event.seq, "run_id": event.run_id}
    return await (await connection.execute(HAS_EVENT, parameters)).fetchone() is not None


async def heads(connection: AsyncConnection[DictRow], known: Mapping[UUID, int]) -> dict[UUID, int]:
    """The highest number in the log of each thread that has one above the one known."""
    cursor = await connection.execute(HEADS, {"thread_ids": list(known), "seqs": list(known.values())})
    return {row["thread_id"]: row["seq"] for row in await cursor.fetchall()}


async def ended_through(connection: AsyncConnection[DictRow], thread_id: UUID) -> int:
    """The number of the last event of the thread's runs that have ended, 0 for none. A run that is under way, or one
    that begins later, has only higher ones."""
    row = await (await connection.execute(ENDED_THROUGH, {"thread_id": thread_id})).fetchone()
    return 0 if row is None else int(row["last_seq"])


async def ended_runs(connection: AsyncConnection[DictRow], run_ids: Sequence[UUID]) -> list[UUID]:
    """Those of the runs that have ended or do not exist."""
    cursor = await connection.execute(ENDED_RUNS, {"run_ids": list(run_ids)})
    return [row["run_id"] for row in await cursor.fetchall()]


async def last_output(
    connection: AsyncConnection[DictRow], thread_id: UUID, run_id: UUID, first_seq: int
) -> bytes | None:
    """The last values of a run, as JSON."""
    cursor = await connection.execute(
        LAST_OUTPUT, {"thread_id": thread_id, "run_id": run_id, "first_seq": first_seq}, binary=True
    )
    row = await cursor.fetchone()
    return None if row is None else row["data"]


async def requested_inputs(connection: AsyncConnection[DictRow], thread_id: UUID) -> set[str]:
    """The interrupts that the thread's running run has told its watchers of."""
    cursor = await connection.execute(REQUESTED_INPUTS, {"thread_id": thread_id}, binary=True)
    return {orjson.loads(row["data"])["interrupt_id"] for row in await cursor.fetchall()}


async def life_of_run(
    connection: AsyncConnection[DictRow], thread_id: UUID, run_id: UUID | None = None
) -> list[LogEvent]:
    """The beginnings and ends, of the graph and its subgraphs, in a run; None: in the last that has begun."""
    cursor = await connection.execute(LIFE, {"thread_id": thread_id, "run_id": run_id}, binary=True)
    return [LogEvent(**row) for row in await cursor.fetchall()]


class Place(NamedTuple):
    """Where a client's cursor is in a thread's log. `after`: where to read on. `available`: the lowest number that can
    still be had, if the one right after the cursor cannot."""

    after: int
    available: int | None


async def place_in_log(connection: AsyncConnection[DictRow], thread_id: UUID, cursor: int) -> Place:
    """Find a client's cursor in a thread's log.

    A cursor beyond the last number that the thread has ever given out is of another server, or of an earlier thread
    with the same id: reading begins at the beginning. The hub must not be given such a cursor, for it would believe
    that the log has come so far, and tell no watcher of the thread what is new.
    """
    row = await (await connection.execute(GAP, {"thread_id": thread_id, "since": cursor})).fetchone()
    assert row is not None
    if row["last"] < cursor:
        return Place(0, None)
    if row["last"] == cursor or row["next"] == cursor + 1:
        return Place(cursor, None)
    return Place(cursor, int(row["next"] or row["last"] + 1))

"""Reads the event log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import orjson
from psycopg import AsyncConnection
from psycopg.rows import DictRow

# The data of an `accepted` event, which the creation of a watched run writes: the number of its first attempt.
ACCEPTED_DATA = b'{"attempt":1}'

# The size limit of one read. While its client does not read, a stream holds about one page in memory.
EVENT_PAGE_BYTES = 1024 * 1024

# Reads by primary key, so the cost depends on the rows that are sent and not on the size of the log. For a TOASTed
# value, `octet_length` reads only the length: rows that do not fit into the page are neither fetched nor sent.
READ_AFTER = """
SELECT seq, run_id, kind, namespace, data, created_at, more FROM (
    SELECT following.*, row_number() OVER so_far AS number, lead(true, 1, false) OVER so_far AS more,
           sum(octet_length(data)) OVER so_far AS bytes
    FROM (SELECT seq, run_id, kind, namespace, data, created_at FROM event
          WHERE thread_id = %(thread_id)s AND seq > %(after)s ORDER BY seq LIMIT %(limit)s + 1) AS following
    WINDOW so_far AS (ORDER BY seq ROWS UNBOUNDED PRECEDING)
) AS page WHERE number = 1 OR (number <= %(limit)s AND bytes <= %(bytes)s) ORDER BY seq
"""

# Returns only logs that have grown. Of thousands of watched threads almost none have, and each row returned costs time.
NEWEST_SEQS = """
SELECT watched.thread_id, newest.seq
FROM unnest(%(thread_ids)s::uuid[], %(seqs)s::bigint[]) AS watched(thread_id, seq),
     LATERAL (SELECT seq FROM event WHERE event.thread_id = watched.thread_id ORDER BY seq DESC LIMIT 1) AS newest
WHERE newest.seq > watched.seq
"""

# The last event of the runs that have ended. The end of each run updates the thread's row.
LAST_ENDED_SEQ = "SELECT last_seq FROM thread WHERE thread_id = %(thread_id)s"

# A run that does not exist (rolled back, deleted) has ended, too.
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

# The interrupts that the executing run has published so far. They are in the thread's row only after the run has ended.
REQUESTED_INPUTS = """
SELECT event.data FROM run JOIN event ON event.thread_id = run.thread_id AND event.seq >= run.first_seq
WHERE run.thread_id = %(thread_id)s AND run.status = 'running'
  AND event.run_id = run.run_id AND event.kind = 'input.requested'
"""

# The events at which a run and its subgraphs began and ended: of the given run, or of the last one that has started.
LIFECYCLE_EVENTS = """
SELECT event.seq, event.run_id, event.kind, event.namespace, event.data, event.created_at
FROM (SELECT run_id, first_seq FROM run
      WHERE thread_id = %(thread_id)s AND first_seq IS NOT NULL AND started_at IS NOT NULL
        AND (%(run_id)s::uuid IS NULL OR run_id = %(run_id)s)
      ORDER BY created_at DESC, run_id DESC LIMIT 1) AS chosen
JOIN event ON event.thread_id = %(thread_id)s AND event.seq >= chosen.first_seq AND event.run_id = chosen.run_id
WHERE event.kind IN ('metadata', 'lifecycle', 'end') ORDER BY event.seq
"""

HAS_EVENT = "SELECT 1 FROM event WHERE thread_id = %(thread_id)s AND seq = %(seq)s AND run_id = %(run_id)s"

# `next` is the first event after a cursor that still exists; `last` the highest number that the thread has assigned.
FIND_POSITION = """
SELECT (SELECT seq FROM event WHERE event.thread_id = %(thread_id)s AND seq > %(since)s ORDER BY seq LIMIT 1) AS next,
       greatest((SELECT last_seq FROM thread WHERE thread.thread_id = %(thread_id)s),
                (SELECT seq FROM event WHERE event.thread_id = %(thread_id)s ORDER BY seq DESC LIMIT 1), 0) AS last
"""


class LogEvent(NamedTuple):
    """One row of the log. `namespace` is empty for the root graph.

    It is a tuple because it is the most frequent object, and a tuple is created in half the time."""

    seq: int
    run_id: UUID
    kind: str
    namespace: str
    data: bytes
    created_at: datetime


class EventPage(NamedTuple):
    """Consecutive events. `more`: the log has events after them."""

    events: list[LogEvent]
    more: bool


async def read_after(connection: AsyncConnection[DictRow], thread_id: UUID, after: int, limit: int = 500) -> EventPage:
    """Read a thread's events with a number above `after`, in order: at most `limit` events, and at most
    EVENT_PAGE_BYTES unless the first one alone is larger."""
    parameters = {"thread_id": thread_id, "after": after, "limit": limit, "bytes": EVENT_PAGE_BYTES}
    cursor = await connection.execute(READ_AFTER, parameters, binary=True)
    more = False
    events = []
    for row in await cursor.fetchall():
        more = row.pop("more")
        events.append(LogEvent(**row))
    return EventPage(events, more)


async def has_event(connection: AsyncConnection[DictRow], thread_id: UUID, event: LogEvent) -> bool:
    """Whether the log of a thread contains this event. It does not if the event has expired, or if the thread was
    deleted: another thread may have its id now."""
    parameters = {"thread_id": thread_id, "seq": event.seq, "run_id": event.run_id}
    return await (await connection.execute(HAS_EVENT, parameters)).fetchone() is not None


async def newest_seqs(connection: AsyncConnection[DictRow], known: Mapping[UUID, int]) -> dict[UUID, int]:
    """The highest number in the log of each thread, if it is above the known one."""
    cursor = await connection.execute(NEWEST_SEQS, {"thread_ids": list(known), "seqs": list(known.values())})
    return {row["thread_id"]: row["seq"] for row in await cursor.fetchall()}


async def last_ended_seq(connection: AsyncConnection[DictRow], thread_id: UUID) -> int:
    """The number of the last event of the thread's ended runs; 0 if there is none. Events of an executing or a later
    run have higher numbers."""
    row = await (await connection.execute(LAST_ENDED_SEQ, {"thread_id": thread_id})).fetchone()
    return 0 if row is None else int(row["last_seq"])


async def ended_runs(connection: AsyncConnection[DictRow], run_ids: Sequence[UUID]) -> list[UUID]:
    """The runs among these that have ended or do not exist."""
    cursor = await connection.execute(ENDED_RUNS, {"run_ids": list(run_ids)})
    return [row["run_id"] for row in await cursor.fetchall()]


async def last_output(
    connection: AsyncConnection[DictRow], thread_id: UUID, run_id: UUID, first_seq: int
) -> bytes | None:
    """The last output values of a run, as JSON."""
    cursor = await connection.execute(
        LAST_OUTPUT, {"thread_id": thread_id, "run_id": run_id, "first_seq": first_seq}, binary=True
    )
    row = await cursor.fetchone()
    return None if row is None else row["data"]


async def requested_inputs(connection: AsyncConnection[DictRow], thread_id: UUID) -> set[str]:
    """The ids of the interrupts that the thread's executing run has published."""
    cursor = await connection.execute(REQUESTED_INPUTS, {"thread_id": thread_id}, binary=True)
    return {orjson.loads(row["data"])["interrupt_id"] for row in await cursor.fetchall()}


async def lifecycle_events(
    connection: AsyncConnection[DictRow], thread_id: UUID, run_id: UUID | None = None
) -> list[LogEvent]:
    """The events at which the graph of a run and its subgraphs began and ended. None: of the last run that has
    started."""
    cursor = await connection.execute(LIFECYCLE_EVENTS, {"thread_id": thread_id, "run_id": run_id}, binary=True)
    return [LogEvent(**row) for row in await cursor.fetchall()]


class LogPosition(NamedTuple):
    """The position of a client's cursor in a thread's log. `after`: read on after this number. `available`: the lowest
    number that still exists, if the one after the cursor has expired."""

    after: int
    available: int | None


async def find_position(connection: AsyncConnection[DictRow], thread_id: UUID, cursor: int) -> LogPosition:
    """Find a client's cursor in a thread's log.

    A cursor above the last number that the thread has assigned is from another server, or from an earlier thread with
    the same id: reading starts at the beginning. Such a cursor must not reach the hub. The hub would assume that the
    log ends there, and would not send new events to any watcher of the thread.
    """
    row = await (await connection.execute(FIND_POSITION, {"thread_id": thread_id, "since": cursor})).fetchone()
    assert row is not None
    if row["last"] < cursor:
        return LogPosition(0, None)
    if row["last"] == cursor or row["next"] == cursor + 1:
        return LogPosition(cursor, None)
    return LogPosition(cursor, int(row["next"] or row["last"] + 1))

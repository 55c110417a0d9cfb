"""Claiming: a worker takes as many ready runs as it has free slots, from each tenant in turn.

The cost does not depend on the backlog. Runs that wait behind another run of their thread are not in the index at
all. The others are stepped through by "loose" index scans, one probe for each priority and for each tenant that has
something queued there; of a tenant, only what is due and of a graph that the worker has is read. One scan over priority
and time would wade through every high-priority run that is due tomorrow, through all of a graph that no worker has, and
through the ten thousand runs of one tenant before it came to the first of another.

Priority comes first. Within a priority tenants take turns, beginning after the one that this worker served last, and
share the free slots; within a tenant the longest ready run is first. While nothing is queued that is a tenant's, there
are no turns to take and no limits to keep, and a much shorter statement does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.engine.ready import ReadyRun
from holdfast.engine.waking import NEVER

# What is claimable, at the priority of `level`.
_QUEUED = "run.status = 'pending' AND run.ready_at IS NOT NULL AND run.priority = level.priority"
# What is due of a tenant, at a priority: the first of each graph that the worker has. As a range of rows, and in the
# order of `run_turn`: with equalities, and by time alone, the planner may take `run_ready` for as good an index, and
# read all that is due of everybody to find what is one tenant's.
_DUE = """
    SELECT due.run_id, due.ready_at FROM unnest((SELECT %(graphs)s::text[])) AS known(graph_id) CROSS JOIN LATERAL (
        SELECT run.run_id, run.ready_at FROM run
        WHERE run.status = 'pending' AND run.ready_at IS NOT NULL AND run.priority = {of}.priority
          AND (run.tenant_id, run.graph_id, run.ready_at) >= ({tenant}, known.graph_id, '-infinity'::timestamptz)
          AND (run.tenant_id, run.graph_id, run.ready_at) <= ({tenant}, known.graph_id, now())
        ORDER BY run.tenant_id, run.graph_id, run.ready_at {part}
    ) AS due
"""
# What a tenant may be given, with a margin for what others are taking at this moment, and whether there is more.
_REACH = "offered.share + (SELECT %(margin)s::bigint)"
_CANDIDATES = _DUE.format(of="offered", tenant="offered.tenant_id", part=f"LIMIT {_REACH}")
_BEYOND = _DUE.format(of="offered", tenant="offered.tenant_id", part=f"OFFSET {_REACH} - 1 LIMIT 1")

# The priorities at which something is queued, highest first.
_LEVELS = """
    (SELECT priority FROM run WHERE status = 'pending' AND ready_at IS NOT NULL ORDER BY priority DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT lower.priority FROM run lower
            WHERE lower.status = 'pending' AND lower.ready_at IS NOT NULL AND lower.priority < level.priority
            ORDER BY lower.priority DESC LIMIT 1)
    FROM level WHERE level.priority IS NOT NULL
"""
_ONLINE = "EXISTS (SELECT 1 FROM worker WHERE worker_id = %(worker_id)s AND status = 'online')"
# Rows are locked one by one, in order, until there are enough: what nobody takes is not locked.
_TAKEN = """
    SELECT run.run_id, run.thread_id, run.updated_at FROM run
    WHERE run.run_id = candidate.run_id AND run.status = 'pending' AND run.ready_at <= now()
    FOR NO KEY UPDATE SKIP LOCKED
"""
# What is few for sure is not known to be so by the planner: it must not come to read a whole table instead.
# `next_seq` continues the thread's numbering: the log may be ahead of the thread row (a run is being taken over)
# or behind it (its events have expired).
_CLAIMED = """
    UPDATE run SET status = 'running', worker_id = %(worker_id)s, fence = run.fence + 1, attempt = run.attempt + 1,
                   started_at = coalesce(run.started_at, now()), updated_at = now(),
                   first_seq = coalesce(run.first_seq, numbered.next_seq)
    FROM picked
    CROSS JOIN LATERAL (
        SELECT has_state, interrupts, last_seq FROM thread WHERE thread.thread_id = picked.thread_id OFFSET 0
    ) AS thread
    CROSS JOIN LATERAL (
        SELECT greatest(thread.last_seq, (SELECT seq FROM event WHERE event.thread_id = picked.thread_id
                                          ORDER BY seq DESC LIMIT 1)) + 1 AS next_seq
    ) AS numbered
    WHERE run.run_id = ANY(ARRAY(SELECT run_id FROM picked)) AND run.run_id = picked.run_id
    RETURNING run.run_id, run.thread_id, run.assistant_id, run.graph_id, run.tenant_id, run.fence, run.attempt,
              run.retries, run.progress, run.kwargs, run.metadata, run.cancel_action, run.usage, run.parent_run_id,
              run.crashes, run.worker_id,
              numbered.next_seq AS announced_seq, NOT thread.has_state AND run.fence = 1 AS fresh,
              thread.interrupts <> '{}'::jsonb AS asking,
              extract(epoch FROM now() - run.started_at)::float8 AS elapsed,
              extract(epoch FROM now() - run.ready_at)::float8 AS waited,
              extract(epoch FROM now() - picked.updated_at)::float8 AS untouched, picked.position,
              now() AS claimed_at,
              convert_to(json_build_object(
                  'run_id', run.run_id, 'attempt', run.attempt, 'graph_id', run.graph_id, 'worker_id', run.worker_id,
                  'retries', run.retries, 'crashes', run.crashes,
                  'accepted', run.fence = 1 AND run.first_seq < numbered.next_seq
              )::text, 'UTF8') AS announcement
"""
# A run is announced by the transaction that takes it, so nobody who watches has to wait for another commit.
# Who has it, and what the attempts before came to, is for the run's timeline; `accepted`: its creation has told of
# this attempt already, as far as clients of v1 are concerned.
_ANNOUNCED = """
    INSERT INTO event (thread_id, seq, run_id, kind, data)
    SELECT thread_id, announced_seq, run_id, 'metadata', announcement FROM claimed
"""

# `turn`: the tenants that have something due, priority by priority, no more than there are slots. Whatever is above a
# LIMIT asks for no more rows than that, so the scans below it end there.
# `held`: a tenant whose running runs are limited is claimed from by one worker at a time. The count of a worker that
# waited would be that of its snapshot, before the other's claim; so nobody waits, and whoever sees that `claims` is not
# what it was when they counted leaves the tenant for the next look.
# `offered`: what each may have. A lower priority has to wait for the next look while tenants share a higher one, for
# one of them may have more than its share.
# `more`: whether another look may find something, although this one did not fill the slots.
# Parameters stand in subqueries, where the planner does not look at them. To plan this takes longer than to do it, and
# Postgres keeps a plan for all parameters only if one for those at hand does not look better.
# A worker that was declared lost between two renewals must not take new runs.
CLAIM_FAIRLY = f"""
WITH RECURSIVE level(priority) AS ({_LEVELS}), turn AS MATERIALIZED (
    SELECT row_number() OVER () AS place, level.priority, queued.tenant_id, room.left, room.claims
    FROM level
    CROSS JOIN LATERAL (
        WITH RECURSIVE next(tenant_id, wrapped) AS (
            SELECT * FROM (
                (SELECT run.tenant_id, false AS wrapped FROM run
                 WHERE {_QUEUED} AND run.tenant_id > (SELECT %(after)s::text) ORDER BY run.tenant_id LIMIT 1)
                UNION ALL
                (SELECT run.tenant_id, true FROM run
                 WHERE {_QUEUED} AND run.tenant_id <= (SELECT %(after)s::text) ORDER BY run.tenant_id LIMIT 1)
                LIMIT 1
            ) AS first
            UNION ALL
            SELECT following.* FROM next CROSS JOIN LATERAL (
                (SELECT run.tenant_id, next.wrapped FROM run
                 WHERE {_QUEUED} AND run.tenant_id > next.tenant_id
                   AND run.tenant_id <= CASE WHEN next.wrapped THEN (SELECT %(after)s::text) ELSE '~' END
                 ORDER BY run.tenant_id LIMIT 1)
                UNION ALL
                (SELECT run.tenant_id, true FROM run
                 WHERE NOT next.wrapped AND {_QUEUED} AND run.tenant_id <= (SELECT %(after)s::text)
                 ORDER BY run.tenant_id LIMIT 1)
                LIMIT 1
            ) AS following
        )
        SELECT tenant_id, level.priority FROM next
    ) AS queued
    LEFT JOIN LATERAL (
        SELECT tenant.claims, limited.most - (
            SELECT count(*) FROM run
            WHERE run.tenant_id = tenant.tenant_id AND run.status = 'running' AND run.tenant_id <> ''
        ) AS left
        FROM tenant CROSS JOIN LATERAL (
            SELECT coalesce(tenant.max_running, %(max_running)s::integer) AS most
        ) AS limited
        WHERE tenant.tenant_id = queued.tenant_id AND limited.most < 2147483647
    ) AS room ON true
    WHERE {_ONLINE}
      AND EXISTS ({_DUE.format(of="queued", tenant="queued.tenant_id", part="LIMIT 1")})
      AND (room.left IS NULL OR room.left > 0)
    LIMIT (SELECT %(slots)s::bigint)
), held AS MATERIALIZED (
    SELECT tenant.tenant_id FROM (SELECT DISTINCT tenant_id, claims FROM turn WHERE turn.left IS NOT NULL) AS counted
    JOIN tenant ON tenant.tenant_id = counted.tenant_id AND tenant.claims = counted.claims
    FOR NO KEY UPDATE OF tenant SKIP LOCKED
), shared AS (
    SELECT turn.*, count(*) OVER (PARTITION BY priority) AS tenants,
           row_number() OVER (PARTITION BY tenant_id ORDER BY place) AS time
    FROM turn
), offered AS MATERIALIZED (
    SELECT place, priority, tenant_id, least(ceil(%(slots)s::float8 / tenants)::bigint, shared.left) AS share
    FROM shared
    WHERE NOT EXISTS (SELECT 1 FROM shared above WHERE above.tenants > 1 AND above.priority > shared.priority)
      AND (shared.left IS NULL OR time = 1 AND tenant_id IN (SELECT tenant_id FROM held))
), picked AS MATERIALIZED (
    SELECT due.run_id, due.thread_id, due.updated_at, offered.place, row_number() OVER () AS position
    FROM (SELECT * FROM offered ORDER BY place) AS offered CROSS JOIN LATERAL (
        SELECT taken.run_id, taken.thread_id, taken.updated_at
        FROM (
            SELECT * FROM ({_CANDIDATES}) AS first
            ORDER BY ready_at
        ) AS candidate
        CROSS JOIN LATERAL ({_TAKEN}) AS taken
        LIMIT offered.share
    ) AS due
    LIMIT (SELECT %(slots)s::bigint)
), claimed AS ({_CLAIMED}), announced AS ({_ANNOUNCED}), counted AS (
    UPDATE tenant SET claims = tenant.claims + 1
    FROM held WHERE tenant.tenant_id = held.tenant_id
), outcome AS (
    SELECT CASE WHEN (SELECT count(*) FROM picked) >= %(slots)s THEN false ELSE
        (SELECT count(*) FROM offered) < (SELECT count(*) FROM turn) OR EXISTS (
            SELECT 1 FROM offered
            CROSS JOIN LATERAL (SELECT count(*) AS runs FROM picked WHERE picked.place = offered.place) AS taken
            WHERE CASE WHEN taken.runs >= offered.share THEN true ELSE
                EXISTS ({_BEYOND}) END
        ) END AS more
)
SELECT claimed.*, outcome.more, true AS fairly FROM outcome LEFT JOIN claimed ON true ORDER BY claimed.position
"""

# The same without tenants. It takes nothing when something is queued that is a tenant's, and says so.
_HERE = "(SELECT %(slots)s::bigint + %(margin)s::bigint)"
CLAIM = f"""
WITH RECURSIVE level(priority) AS ({_LEVELS}), company AS MATERIALIZED (
    SELECT coalesce(bool_or((
        SELECT run.tenant_id FROM run WHERE {_QUEUED} ORDER BY run.tenant_id DESC LIMIT 1
    ) > ''), false) AS any FROM level
), picked AS MATERIALIZED (
    SELECT due.run_id, due.thread_id, due.updated_at, row_number() OVER () AS position
    FROM level CROSS JOIN LATERAL (
        SELECT taken.run_id, taken.thread_id, taken.updated_at
        FROM (
            SELECT * FROM ({_DUE.format(of="level", tenant="''", part=f"LIMIT {_HERE}")}) AS first ORDER BY ready_at
        ) AS candidate
        CROSS JOIN LATERAL ({_TAKEN}) AS taken
    ) AS due
    WHERE {_ONLINE} AND NOT (SELECT company.any FROM company)
    LIMIT (SELECT %(slots)s::bigint)
), claimed AS ({_CLAIMED}), announced AS ({_ANNOUNCED}), outcome AS (
    SELECT company.any AS fairly,
        CASE WHEN company.any OR (SELECT count(*) FROM picked) >= %(slots)s THEN false ELSE
        EXISTS (SELECT 1 FROM level
                WHERE EXISTS ({_DUE.format(of="level", tenant="''", part=f"OFFSET {_HERE} - 1 LIMIT 1")})) END AS more
    FROM company
)
SELECT claimed.*, outcome.more, outcome.fairly FROM outcome LEFT JOIN claimed ON true ORDER BY claimed.position
"""

# How far to look in each tenant past the runs that other workers are claiming at this moment: further with every look,
# when others were in the way or a tenant had less than its share.
BOOKKEEPING = ("position", "more", "fairly")
MARGINS = (20, 20, 200, 2_000, 20_000)

# A claim whose answer was lost on the way may have been made all the same. Its worker lives and renews its lease, so
# nobody else would ever look for such a run. Nothing has been executed: that costs the run neither its place nor a
# crash. The fence rises, as whenever a run changes hands.
RETURN_STRAYS = """
WITH stray AS (
    SELECT run_id FROM run
    WHERE worker_id = %(worker_id)s AND status = 'running' AND run_id <> ALL(%(held)s::uuid[])
    ORDER BY run_id FOR NO KEY UPDATE
)
UPDATE run SET status = 'pending', worker_id = NULL, fence = run.fence + 1, updated_at = now()
FROM stray WHERE run.run_id = stray.run_id
RETURNING run.run_id
"""

# Nothing is due now: how long until something is? Bounds a worker's sleep. What waits for its children is not due at
# any time.
NEXT_DUE = f"""
SELECT run_id, graph_id, extract(epoch FROM ready_at - now())::float8 AS seconds FROM run
WHERE status = 'pending' AND ready_at IS NOT NULL AND ready_at > now() AND ready_at < {NEVER}
ORDER BY priority DESC, ready_at LIMIT 1
"""


# Whose turn it is: what has been ready longest, of the highest priority at which something is.
FRONT = f"""
WITH RECURSIVE level(priority) AS ({_LEVELS})
SELECT first.run_id, first.seconds FROM level CROSS JOIN LATERAL (
    SELECT run.run_id, extract(epoch FROM now() - run.ready_at)::float8 AS seconds FROM run
    WHERE {_QUEUED} AND run.ready_at <= now() ORDER BY run.ready_at LIMIT 1
) AS first
ORDER BY level.priority DESC LIMIT 1
"""


class Front(NamedTuple):
    """The run at the front of the queue, and for how many seconds it has been ready."""

    run_id: UUID
    seconds: float


async def claim(
    connection: AsyncConnection[DictRow],
    worker_id: UUID,
    slots: int,
    graphs: Sequence[str],
    *,
    after: str = "",
    max_running: int | None = None,
) -> list[DictRow]:
    """Take up to `slots` due runs of the given graphs: highest priority first, tenants in turn beginning after the one
    that is named, longest ready first. `max_running` is the limit of tenants that have none of their own.

    Each is now `running`, owned by this worker, under a fence higher than any it had before, and announced in its
    thread's log; what it says itself begins at `next_seq`. Fewer than asked for are all there were.
    """
    asked: dict[str, Any] = {
        "worker_id": worker_id,
        "graphs": list(graphs),
        "after": after,
        "max_running": max_running,
    }
    claimed: list[DictRow] = []
    # Of the tenant that was served last there may be more.
    statement = CLAIM_FAIRLY if after else CLAIM
    looks = iter(MARGINS)
    margin: int | None = next(looks)
    while margin is not None:
        cursor = await connection.execute(statement, {**asked, "margin": margin, "slots": slots - len(claimed)})
        rows = await cursor.fetchall()
        more, fairly = rows[0]["more"], rows[0]["fairly"]
        claimed += [_without_bookkeeping(row) for row in rows if row["run_id"] is not None]
        if statement is CLAIM and fairly:
            statement = CLAIM_FAIRLY
            continue
        if not more or len(claimed) >= slots:
            break
        if claimed:
            asked["after"] = claimed[-1]["tenant_id"]
        margin = next(looks, None)
    return claimed


def _without_bookkeeping(row: DictRow) -> DictRow:
    for name in BOOKKEEPING:
        del row[name]
    row["next_seq"] = row["announced_seq"] + 1
    return row


async def return_strays(connection: AsyncConnection[DictRow], worker_id: UUID, held: Sequence[UUID]) -> list[UUID]:
    """Give back the runs this worker owns without knowing it: all but those it holds. Not while it is claiming."""
    cursor = await connection.execute(RETURN_STRAYS, {"worker_id": worker_id, "held": list(held)})
    return [row["run_id"] for row in await cursor.fetchall()]


async def next_due(connection: AsyncConnection[DictRow]) -> ReadyRun | None:
    """The scheduled run that is due next, or None. Approximate across priorities; the slow poll corrects it."""
    row = await (await connection.execute(NEXT_DUE)).fetchone()
    return None if row is None else ReadyRun(row["run_id"], row["graph_id"], max(0.0, row["seconds"]))


async def front(connection: AsyncConnection[DictRow]) -> Front | None:
    """Approximate: it may be one that nobody may take, being of a tenant at its limit, or of a graph nobody has."""
    row = await (await connection.execute(FRONT)).fetchone()
    return None if row is None else Front(**row)

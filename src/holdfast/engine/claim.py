"""Claiming: a worker takes as many ready runs as it has free slots, from each tenant in turn.

Between tenants, turns decide: a tenant's turn is as many runs as its weight, which only the operator can set. Priority
orders a tenant's own runs and no others; within a priority the run that has been ready longest is first.

The cost does not depend on the backlog. Runs that wait behind another run of their thread are not in the index at
all. The others are stepped through by "loose" index scans: one probe for each tenant that has something queued, and
for each priority that it uses; of these only what is due and of a graph that the worker has is read. A plain scan
would read every high-priority run that is due tomorrow, all runs of a graph that no worker has, and the ten thousand
runs of one tenant before it came to the first run of another.

While nothing that belongs to a tenant is queued, there are no turns and no limits, and a much shorter statement does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.engine.ready import ReadyRun
from holdfast.engine.waking import NEVER

# The largest weight that a tenant may have.
MAX_WEIGHT = 1_000
# So many runs in a row end any turn; more are not counted. Small, because psycopg gives numbers beyond 32,767 another
# type, and Postgres would prepare the statement once for each.
TURN_OVER = 10_000

_QUEUED = "run.status = 'pending' AND run.ready_at IS NOT NULL"
# The second column of the index `run_turn`. As an expression no other index has, in the direction of the other columns:
# rows of these columns can be compared, and the planner cannot take `run_ready` for as good an index and read
# everybody's runs to find one tenant's.
_URGENCY = "(-run.priority::bigint)"
_BEFORE_ALL, _AFTER_ALL = "(-9223372036854775807)::bigint", "9223372036854775807::bigint"
# The priorities at which a tenant has something queued, highest first; the last row is NULL.
_LEVELS = f"""
    (SELECT {_URGENCY} FROM run WHERE {_QUEUED} AND run.tenant_id = {{tenant}} ORDER BY {_URGENCY} LIMIT 1)
    UNION ALL
    SELECT (SELECT {_URGENCY} FROM run
            WHERE {_QUEUED} AND run.tenant_id = {{tenant}} AND {_URGENCY} > level.urgency
            ORDER BY {_URGENCY} LIMIT 1)
    FROM level WHERE level.urgency IS NOT NULL
"""
# What is due of a tenant at one priority: the first runs of each graph that the worker has.
_DUE_AT_LEVEL = f"""
    SELECT due.run_id, due.ready_at FROM unnest((SELECT %(graphs)s::text[])) AS known(graph_id) CROSS JOIN LATERAL (
        SELECT run.run_id, run.ready_at FROM run
        WHERE {_QUEUED}
          AND (run.tenant_id, {_URGENCY}, run.graph_id, run.ready_at)
              >= ({{tenant}}, level.urgency, known.graph_id, '-infinity'::timestamptz)
          AND (run.tenant_id, {_URGENCY}, run.graph_id, run.ready_at)
              <= ({{tenant}}, level.urgency, known.graph_id, now())
        ORDER BY run.tenant_id, {_URGENCY}, run.graph_id, run.ready_at {{part}}
    ) AS due
"""
# The same at all of its priorities, in the order in which its runs are claimed.
_DUE = f"""
    WITH RECURSIVE level(urgency) AS ({_LEVELS})
    SELECT ordered.run_id FROM level CROSS JOIN LATERAL (
        SELECT first.run_id FROM ({_DUE_AT_LEVEL}) AS first ORDER BY first.ready_at
    ) AS ordered
"""
# What a tenant may be given, with a margin for what others are taking at this moment, and whether there is more.
_REACH = "offered.share + (SELECT %(margin)s::bigint)"
_CANDIDATES = _DUE.format(tenant="offered.tenant_id", part=f"LIMIT {_REACH}")
_BEYOND = _DUE.format(tenant="offered.tenant_id", part=f"OFFSET {_REACH} - 1 LIMIT 1")

# A worker whose lease has expired takes nothing: its runs are about to be given to others, as a crash of its own.
_ONLINE = """
    EXISTS (SELECT 1 FROM worker WHERE worker_id = %(worker_id)s AND status = 'online' AND lease_until > now())
"""
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

# `start`: where the round begins: with the tenant that was served last, if its turn is not over, else after it. As the
# place in the index just before or just after all of its runs.
# `turn`: the tenants that have something due, in the order of their turns, no more than there are slots. Whatever is
# above a LIMIT asks for no more rows than that, so the scans below it end there.
# `shared`: how many of the slots each gets when every tenant has enough: whole rounds first, then what is left of the
# slots in order. `served`: what the tenant whose turn goes on has had of it already.
# `held`: a tenant whose running runs are limited is claimed from by one worker at a time. The count of a worker that
# waited would be that of its snapshot, before the other's claim; so nobody waits, and whoever sees that `claims` is not
# what it was when they counted leaves the tenant for the next look.
# `picked`: `position` is the order of the turns, so that the last row says whose turn it was.
# `more`: whether another look may find something, although this one did not fill the slots.
# Parameters stand in subqueries, where the planner does not look at them. To plan this takes longer than to do it, and
# Postgres keeps a plan for all parameters only if one for those at hand does not look better.
# A worker that was declared lost between two renewals must not take new runs.
_PLACE = f"(run.tenant_id, {_URGENCY})"
_START = "((SELECT start.tenant_id FROM start), (SELECT start.edge FROM start))"
CLAIM_FAIRLY = f"""
WITH RECURSIVE start AS MATERIALIZED (
    SELECT %(after)s::text AS tenant_id, %(served)s::bigint AS served, CASE
        WHEN %(served)s::bigint < coalesce((SELECT weight FROM tenant WHERE tenant_id = %(after)s::text), 1)
        THEN {_BEFORE_ALL} ELSE {_AFTER_ALL} END AS edge
), turn AS MATERIALIZED (
    SELECT row_number() OVER () AS place, queued.tenant_id, coalesce(allowed.weight, 1) AS weight, allowed.left,
           allowed.claims
    FROM (
        WITH RECURSIVE next(tenant_id, wrapped) AS (
            SELECT * FROM (
                (SELECT run.tenant_id, false AS wrapped FROM run
                 WHERE {_QUEUED} AND {_PLACE} > {_START} ORDER BY run.tenant_id, {_URGENCY} LIMIT 1)
                UNION ALL
                (SELECT run.tenant_id, true FROM run
                 WHERE {_QUEUED} AND {_PLACE} <= {_START} ORDER BY run.tenant_id, {_URGENCY} LIMIT 1)
                LIMIT 1
            ) AS first
            UNION ALL
            SELECT following.* FROM next CROSS JOIN LATERAL (
                (SELECT run.tenant_id, next.wrapped FROM run
                 WHERE {_QUEUED} AND {_PLACE} > (next.tenant_id, {_AFTER_ALL})
                   AND {_PLACE} <= (CASE WHEN next.wrapped THEN (SELECT start.tenant_id FROM start) ELSE '~' END,
                                    (SELECT start.edge FROM start))
                 ORDER BY run.tenant_id, {_URGENCY} LIMIT 1)
                UNION ALL
                (SELECT run.tenant_id, true FROM run
                 WHERE NOT next.wrapped AND {_QUEUED} AND {_PLACE} <= {_START}
                 ORDER BY run.tenant_id, {_URGENCY} LIMIT 1)
                LIMIT 1
            ) AS following
        )
        SELECT tenant_id FROM next
    ) AS queued
    LEFT JOIN LATERAL (
        SELECT tenant.weight, tenant.claims, CASE WHEN limited.most < 2147483647 THEN limited.most - (
            SELECT count(*) FROM run
            WHERE run.tenant_id = tenant.tenant_id AND run.status = 'running' AND run.tenant_id <> ''
        ) END AS left
        FROM tenant CROSS JOIN LATERAL (
            SELECT coalesce(tenant.max_running, %(max_running)s::integer) AS most
        ) AS limited
        WHERE tenant.tenant_id = queued.tenant_id
    ) AS allowed ON true
    WHERE {_ONLINE}
      AND (allowed.left IS NULL OR allowed.left > 0)
      AND EXISTS ({_DUE.format(tenant="queued.tenant_id", part="LIMIT 1")})
    LIMIT (SELECT %(slots)s::bigint)
), counted AS (
    SELECT turn.*, sum(weight) OVER ()::bigint AS round, (sum(weight) OVER (ORDER BY place))::bigint - weight AS before,
           CASE WHEN turn.tenant_id = start.tenant_id AND start.edge < 0 THEN start.served ELSE 0 END AS served
    FROM turn CROSS JOIN start
), shared AS MATERIALIZED (
    SELECT counted.*, least(
        slots.asked / round * weight + greatest(0, least(mod(slots.asked, round) - before, weight)) - served,
        counted.left
    ) AS share
    FROM counted CROSS JOIN (
        SELECT %(slots)s::bigint + coalesce(sum(served), 0)::bigint AS asked FROM counted
    ) AS slots
), held AS MATERIALIZED (
    SELECT tenant.tenant_id FROM (
        SELECT tenant_id, claims FROM shared WHERE shared.left IS NOT NULL AND share > 0
    ) AS limited
    JOIN tenant ON tenant.tenant_id = limited.tenant_id AND tenant.claims = limited.claims
    FOR NO KEY UPDATE OF tenant SKIP LOCKED
), offered AS MATERIALIZED (
    SELECT place, tenant_id, weight, served, share FROM shared
    WHERE shared.left IS NULL OR tenant_id IN (SELECT tenant_id FROM held)
), taken AS MATERIALIZED (
    SELECT due.run_id, due.thread_id, due.updated_at, offered.place, offered.weight, offered.served,
           row_number() OVER () AS found
    FROM (SELECT * FROM offered ORDER BY place) AS offered CROSS JOIN LATERAL (
        SELECT taken.run_id, taken.thread_id, taken.updated_at
        FROM ({_CANDIDATES}) AS candidate
        CROSS JOIN LATERAL ({_TAKEN}) AS taken
        LIMIT offered.share
    ) AS due
), picked AS MATERIALIZED (
    SELECT run_id, thread_id, updated_at, place, row_number() OVER (ORDER BY round, place, found) AS position
    FROM (
        SELECT taken.*, (served + row_number() OVER (PARTITION BY place ORDER BY found) - 1) / weight AS round
        FROM taken
    ) AS in_rounds
), claimed AS ({_CLAIMED}), announced AS ({_ANNOUNCED}), noted AS (
    UPDATE tenant SET claims = tenant.claims + 1
    FROM held WHERE tenant.tenant_id = held.tenant_id
), outcome AS (
    SELECT CASE WHEN (SELECT count(*) FROM picked) >= %(slots)s THEN false ELSE
        (SELECT count(*) FROM offered) < (SELECT count(*) FROM turn) OR EXISTS (
            SELECT 1 FROM offered
            CROSS JOIN LATERAL (SELECT count(*) AS runs FROM picked WHERE picked.place = offered.place) AS given
            WHERE CASE WHEN given.runs >= offered.share THEN true ELSE
                EXISTS ({_BEYOND}) END
        ) END AS more
)
SELECT claimed.*, outcome.more, true AS fairly FROM outcome LEFT JOIN claimed ON true ORDER BY claimed.position
"""

# The same without tenants. It takes nothing when something is queued that is a tenant's, and says so.
_HERE = "(SELECT %(slots)s::bigint + %(margin)s::bigint)"
CLAIM = f"""
WITH company AS MATERIALIZED (
    SELECT coalesce((
        SELECT run.tenant_id FROM run WHERE {_QUEUED} ORDER BY run.tenant_id DESC, {_URGENCY} DESC LIMIT 1
    ) > '', false) AS any
), picked AS MATERIALIZED (
    SELECT due.run_id, due.thread_id, due.updated_at, row_number() OVER () AS position FROM (
        SELECT taken.run_id, taken.thread_id, taken.updated_at
        FROM ({_DUE.format(tenant="''", part=f"LIMIT {_HERE}")}) AS candidate
        CROSS JOIN LATERAL ({_TAKEN}) AS taken
        WHERE {_ONLINE} AND NOT (SELECT company.any FROM company)
        LIMIT (SELECT %(slots)s::bigint)
    ) AS due
), claimed AS ({_CLAIMED}), announced AS ({_ANNOUNCED}), outcome AS (
    SELECT company.any AS fairly,
        CASE WHEN company.any OR (SELECT count(*) FROM picked) >= %(slots)s THEN false ELSE
        EXISTS ({_DUE.format(tenant="''", part=f"OFFSET {_HERE} - 1 LIMIT 1")}) END AS more
    FROM company
)
SELECT claimed.*, outcome.more, outcome.fairly FROM outcome LEFT JOIN claimed ON true ORDER BY claimed.position
"""

BOOKKEEPING = ("position", "more", "fairly")
# How far to look in each tenant past the runs that other workers are claiming at this moment: further with every look
# that finds nothing although there is something. A look that finds less than there are slots is repeated as it is: a
# tenant with a large weight may have been offered slots that it has no runs for.
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

# The priorities at which anybody has something queued, highest first, by `run_ready`. Not for claiming.
_ALL_LEVELS = f"""
    (SELECT run.priority FROM run WHERE {_QUEUED} ORDER BY run.priority DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT run.priority FROM run WHERE {_QUEUED} AND run.priority < level.priority
            ORDER BY run.priority DESC LIMIT 1)
    FROM level WHERE level.priority IS NOT NULL
"""

# Nothing is due now: how long until something is? Bounds a worker's sleep. Looked for at every priority, for what is
# urgent tomorrow must not hide what is due in a moment. What waits for its children is not due at any time.
NEXT_DUE = f"""
WITH RECURSIVE level(priority) AS ({_ALL_LEVELS})
SELECT first.run_id, first.graph_id, extract(epoch FROM first.ready_at - now())::float8 AS seconds
FROM level CROSS JOIN LATERAL (
    SELECT run.run_id, run.graph_id, run.ready_at FROM run
    WHERE {_QUEUED} AND run.priority = level.priority AND run.ready_at > now() AND run.ready_at < {NEVER}
    ORDER BY run.ready_at LIMIT 1
) AS first
ORDER BY first.ready_at LIMIT 1
"""

# The run that has been ready longest, of the highest priority at which one is.
FRONT = f"""
WITH RECURSIVE level(priority) AS ({_ALL_LEVELS})
SELECT first.run_id, first.seconds FROM level CROSS JOIN LATERAL (
    SELECT run.run_id, extract(epoch FROM now() - run.ready_at)::float8 AS seconds FROM run
    WHERE {_QUEUED} AND run.priority = level.priority AND run.ready_at <= now() ORDER BY run.ready_at LIMIT 1
) AS first
ORDER BY level.priority DESC LIMIT 1
"""


class Turn(NamedTuple):
    """The tenant that a worker served last, and how many runs in a row. Its turn is over when these are as many as its
    weight."""

    tenant_id: str = ""
    served: int = TURN_OVER

    def after(self, claimed: Iterable[DictRow]) -> Turn:
        """The turn when these have been claimed too, in this order."""
        tenant_id, served = self
        for row in claimed:
            served = served + 1 if row["tenant_id"] == tenant_id else 1
            tenant_id = row["tenant_id"]
        return Turn(tenant_id, min(served, TURN_OVER))


NO_TURN = Turn()


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
    turn: Turn = NO_TURN,
    max_running: int | None = None,
) -> list[DictRow]:
    """Take up to `slots` due runs of the given graphs, from each tenant in turn, going on from `turn`; of a tenant the
    highest priority first, then the longest ready. `max_running` is the limit of tenants that have none of their own.

    Each is now `running`, owned by this worker, under a fence higher than any it had before, and announced in its
    thread's log; what it says itself begins at `next_seq`. Fewer than asked for are all there were.
    """
    asked: dict[str, Any] = {
        "worker_id": worker_id,
        "graphs": list(graphs),
        "max_running": max_running,
    }
    claimed: list[DictRow] = []
    # Of the tenant that was served last there may be more.
    statement = CLAIM_FAIRLY if turn.tenant_id else CLAIM
    looks = iter(MARGINS)
    margin: int | None = next(looks)
    while margin is not None:
        asked |= {"margin": margin, "slots": slots - len(claimed), "after": turn.tenant_id, "served": turn.served}
        cursor = await connection.execute(statement, asked)
        rows = await cursor.fetchall()
        more, fairly = rows[0]["more"], rows[0]["fairly"]
        found = [_without_bookkeeping(row) for row in rows if row["run_id"] is not None]
        claimed += found
        if statement is CLAIM and fairly:
            statement = CLAIM_FAIRLY
            continue
        if not more or len(claimed) >= slots:
            break
        turn = turn.after(found)
        if not found:
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
    """The scheduled run that is due next, or None."""
    row = await (await connection.execute(NEXT_DUE)).fetchone()
    return None if row is None else ReadyRun(row["run_id"], row["graph_id"], max(0.0, row["seconds"]))


async def front(connection: AsyncConnection[DictRow]) -> Front | None:
    """Approximate: it may be one that nobody may take, being of a tenant at its limit, or of a graph nobody has."""
    row = await (await connection.execute(FRONT)).fetchone()
    return None if row is None else Front(**row)

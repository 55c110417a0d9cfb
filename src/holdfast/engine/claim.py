"""Claiming: a worker takes as many ready runs as it has free slots, from each tenant in turn.

Between tenants, turns decide: a tenant's turn is as many runs as its weight, which only the operator can set. Priority
orders a tenant's own runs and no others; within a priority the run that has been ready longest is first.

The cost does not depend on the backlog. Runs that wait behind another run of their thread are not in the index at
all. The others are stepped through by "loose" index scans: one probe for each tenant that has something queued, and
for each priority that it uses; of these only what is due and of a graph that the worker has is read. A plain scan
would read every high-priority run that is due tomorrow, all runs of a graph that no worker has, and the ten thousand
runs of one tenant before it came to the first run of another.

While nothing that belongs to a tenant is queued, there are no turns and no limits, and a much shorter statement does.

Suspects are runs that were on a worker when it died, and have made no progress since. One of them may have killed it,
so they are executed apart: a worker takes one, and the next when that one has made progress, has ended, or has been
executed for `SUSPECT_SECONDS`. A suspect of two crashes in a row shares its worker with no other suspect, however long
it takes: one that kills slowly takes no innocent run with it each time. A worker keeps a slot for a suspect that waits,
so they are not overtaken for long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

# So many runs in a row end any turn; more are not counted. Small, because psycopg gives numbers beyond 32,767 another
# type, and Postgres would prepare the statement once for each.
TURN_OVER = 10_000
# What kills its worker does so soon, as a rule. Without this a run whose first step takes an hour would keep all other
# suspects waiting for as long, after a host has failed through no fault of any run.
SUSPECT_SECONDS = 30
# Tenants with something queued that one look visits at most, however many are at their limit.
MOST_VISITED = 100

# A run that may be claimed when it is due.
QUEUED = "run.status = 'pending' AND run.ready_at IS NOT NULL"
# The second column of the index `run_claim_order`. As an expression no other index has, in the direction of the other
# columns: rows of these columns can be compared, and the planner cannot take `run_ready` for as good an index and read
# everybody's runs to find one tenant's.
_URGENCY = "(-run.priority::bigint)"
_BEFORE_ALL, _AFTER_ALL = "(-9223372036854775807)::bigint", "9223372036854775807::bigint"
# What is queued and no suspect; and the suspects, by the index `run_suspect`, which nearly always is empty.
_TRUSTED = f"{QUEUED} AND run.crashes_in_a_row = 0"
_SUSPECT = f"{QUEUED} AND run.crashes_in_a_row > 0"
# Runs that this worker cannot claim, and passes over for a while (`claiming/refused_runs.py`). Nearly always none.
_NOT_ASIDE = "run.run_id <> ALL((SELECT %(aside)s::uuid[])::uuid[])"
_SUSPECT_DUE = f"""
    {_SUSPECT} AND run.ready_at <= now() AND run.graph_id = ANY((SELECT %(graphs)s::text[])::text[]) AND {_NOT_ASIDE}
    AND NOT EXISTS (SELECT 1 FROM run AS held
                    WHERE held.worker_id = %(worker_id)s AND held.status = 'running' AND held.crashes_in_a_row > 0
                      AND greatest(held.crashes_in_a_row, run.crashes_in_a_row) > 1)
"""
# The priorities at which a tenant has something queued, highest first; the last row is NULL.
_LEVELS = f"""
    (SELECT {_URGENCY} FROM run WHERE {QUEUED} AND run.tenant_id = {{tenant}} ORDER BY {_URGENCY} LIMIT 1)
    UNION ALL
    SELECT (SELECT {_URGENCY} FROM run
            WHERE {QUEUED} AND run.tenant_id = {{tenant}} AND {_URGENCY} > level.urgency
            ORDER BY {_URGENCY} LIMIT 1)
    FROM level WHERE level.urgency IS NOT NULL
"""
# What is due of a tenant at one priority: the first runs of each graph that the worker has.
_DUE_AT_LEVEL = f"""
    SELECT due.run_id, due.ready_at FROM unnest((SELECT %(graphs)s::text[])) AS known(graph_id) CROSS JOIN LATERAL (
        SELECT run.run_id, run.ready_at FROM run
        WHERE {_TRUSTED}
          AND (run.tenant_id, {_URGENCY}, run.graph_id, run.ready_at)
              >= ({{tenant}}, level.urgency, known.graph_id, '-infinity'::timestamptz)
          AND (run.tenant_id, {_URGENCY}, run.graph_id, run.ready_at)
              <= ({{tenant}}, level.urgency, known.graph_id, now())
          AND {_NOT_ASIDE}
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
# A tenant's suspects, in turns: one that was released again waits behind the others.
_DUE_SUSPECTS = f"""
    SELECT run.run_id FROM run WHERE {_SUSPECT_DUE} AND run.tenant_id = {{tenant}}
    ORDER BY run.updated_at, run.run_id {{part}}
"""
# What a tenant may be given, with a margin for what others are taking at this moment, and whether there is more.
_REACH = "offered.share + (SELECT %(margin)s::bigint)"

# How many runs a look may take, and whether one slot is kept for a suspect.
_ROOM = f"""
    SELECT %(slots)s::bigint - suspect.waits::integer AS slots, suspect.waits FROM (
        SELECT (SELECT %(suspect)s::boolean)
           AND EXISTS (SELECT 1 FROM run WHERE {_SUSPECT_DUE})
           AND NOT EXISTS (SELECT 1 FROM run
                           WHERE run.worker_id = %(worker_id)s AND run.status = 'running' AND run.crashes_in_a_row > 0
                             AND run.updated_at > now() - interval '{SUSPECT_SECONDS} s') AS waits
    ) AS suspect
"""

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
              run.crashes, run.crashes_in_a_row > 0 AS suspect, run.worker_id,
              CASE WHEN run.pots IS NOT NULL THEN (
                  SELECT jsonb_agg(jsonb_build_object(
                      'limits', pot.limits, 'cost_usd', pot.cost_usd, 'total_tokens', pot.total_tokens,
                      'steps', pot.steps, 'seconds', (
                          SELECT coalesce(sum(extract(epoch FROM earlier.finished_at - earlier.started_at)), 0)::float8
                          FROM run earlier WHERE earlier.thread_id = run.thread_id AND pot.pot_id = ANY(earlier.pots)
                      )) ORDER BY drawn.place)
                  FROM unnest(run.pots) WITH ORDINALITY AS drawn(pot_id, place) JOIN budget_pot pot USING (pot_id)
              ) END AS pots,
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
# The tenants that have something queued, from the start of the round on, but no more than `MOST_VISITED`: thousands may
# be at their limit. The walk goes no further than its readers need.
_QUEUED_TENANTS = f"""
        SELECT first.*, 1 FROM (
            (SELECT run.tenant_id, false AS wrapped FROM run
             WHERE {QUEUED} AND {_PLACE} > {_START} ORDER BY run.tenant_id, {_URGENCY} LIMIT 1)
            UNION ALL
            (SELECT run.tenant_id, true FROM run
             WHERE {QUEUED} AND {_PLACE} <= {_START} ORDER BY run.tenant_id, {_URGENCY} LIMIT 1)
            LIMIT 1
        ) AS first
        UNION ALL
        SELECT following.*, walk.visited + 1 FROM walk CROSS JOIN LATERAL (
            (SELECT run.tenant_id, walk.wrapped FROM run
             WHERE {QUEUED} AND {_PLACE} > (walk.tenant_id, {_AFTER_ALL})
               AND {_PLACE} <= (CASE WHEN walk.wrapped THEN (SELECT start.tenant_id FROM start) ELSE '~' END,
                                (SELECT start.edge FROM start))
             ORDER BY run.tenant_id, {_URGENCY} LIMIT 1)
            UNION ALL
            (SELECT run.tenant_id, true FROM run
             WHERE NOT walk.wrapped AND {QUEUED} AND {_PLACE} <= {_START}
             ORDER BY run.tenant_id, {_URGENCY} LIMIT 1)
            LIMIT 1
        ) AS following
        WHERE walk.visited < {MOST_VISITED}
"""
# Tenants that are known to have a run that may be claimed: wherever the walk stands, they are looked at.
_NAMED_TENANTS = f"""
        UNION ALL
        SELECT named.tenant_id FROM (
            SELECT unnest((SELECT %(tenants)s::text[])) AS tenant_id
            UNION
            SELECT run.tenant_id FROM run WHERE run.run_id = ANY((SELECT %(hinted)s::uuid[])::uuid[]) AND {QUEUED}
        ) AS named
        WHERE NOT EXISTS (SELECT 1 FROM walk WHERE walk.tenant_id = named.tenant_id)
"""
_SUSPECTED_TENANTS = f"""
        SELECT * FROM (
            SELECT run.tenant_id, false, 1 FROM run WHERE {_SUSPECT_DUE} GROUP BY run.tenant_id
            ORDER BY (run.tenant_id, 0) < {_START}, run.tenant_id
        ) AS suspected
"""


def _fairly(walk: str, named: str, due: str, room: str) -> str:
    """The statement that claims from these tenants in turn, of each what is due, as many as there is room for."""
    candidates = due.format(tenant="offered.tenant_id", part=f"LIMIT {_REACH}")
    beyond = due.format(tenant="offered.tenant_id", part=f"OFFSET {_REACH} - 1 LIMIT 1")
    return f"""
WITH RECURSIVE room AS MATERIALIZED ({room}), start AS MATERIALIZED (
    SELECT %(after)s::text AS tenant_id, %(served)s::bigint AS served, CASE
        WHEN %(served)s::bigint < coalesce((SELECT weight FROM tenant WHERE tenant_id = %(after)s::text), 1)
        THEN {_BEFORE_ALL} ELSE {_AFTER_ALL} END AS edge
), walk(tenant_id, wrapped, visited) AS ({walk}), turn AS MATERIALIZED (
    SELECT row_number() OVER () AS place, queued.tenant_id, coalesce(allowed.weight, 1) AS weight, allowed.left,
           allowed.claims
    FROM (
        SELECT walk.tenant_id FROM walk {named}
    ) AS queued
    LEFT JOIN LATERAL (
        SELECT tenant.weight, tenant.claims, CASE WHEN limited.most < 2147483647 THEN limited.most - (
            SELECT count(*) FROM run
            WHERE run.tenant_id = tenant.tenant_id AND run.status = 'running' AND run.tenant_id <> ''
        ) - CASE WHEN (SELECT waits FROM room)
                  AND EXISTS (SELECT 1 FROM run WHERE {_SUSPECT_DUE} AND run.tenant_id = tenant.tenant_id)
            THEN 1 ELSE 0 END END AS left
        FROM tenant CROSS JOIN LATERAL (
            SELECT coalesce(tenant.max_running, %(max_running)s::integer) AS most
        ) AS limited
        WHERE tenant.tenant_id = queued.tenant_id
    ) AS allowed ON true
    WHERE {_ONLINE}
      AND (allowed.left IS NULL OR allowed.left > 0)
      AND EXISTS ({due.format(tenant="queued.tenant_id", part="LIMIT 1")})
    LIMIT (SELECT slots FROM room)
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
        SELECT (SELECT slots FROM room) + coalesce(sum(served), 0)::bigint AS asked FROM counted
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
        FROM ({candidates}) AS candidate
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
    SELECT CASE WHEN (SELECT count(*) FROM picked) >= (SELECT slots FROM room) THEN false ELSE
        (SELECT count(*) FROM offered) < (SELECT count(*) FROM turn) OR EXISTS (
            SELECT 1 FROM offered
            CROSS JOIN LATERAL (SELECT count(*) AS runs FROM picked WHERE picked.place = offered.place) AS given
            WHERE CASE WHEN given.runs >= offered.share THEN true ELSE
                EXISTS ({beyond}) END
        ) END AS more,
        CASE WHEN (SELECT count(*) FROM picked) < (SELECT slots FROM room)
        THEN (SELECT walk.tenant_id FROM walk WHERE walk.visited = {MOST_VISITED}) END AS stopped_at
)
SELECT claimed.*, outcome.more, outcome.stopped_at, true AS fairly, room.waits AS suspect_waits
FROM outcome CROSS JOIN room LEFT JOIN claimed ON true ORDER BY claimed.position
"""


CLAIM_FAIRLY = _fairly(_QUEUED_TENANTS, _NAMED_TENANTS, _DUE, _ROOM)
CLAIM_SUSPECT = _fairly(_SUSPECTED_TENANTS, "", _DUE_SUSPECTS, "SELECT %(slots)s::bigint AS slots, false AS waits")

# The same without tenants. It takes nothing when something is queued that is a tenant's, and says so.
_HERE = "(SELECT %(slots)s::bigint + %(margin)s::bigint)"
CLAIM = f"""
WITH room AS MATERIALIZED ({_ROOM}), company AS MATERIALIZED (
    SELECT coalesce((
        SELECT run.tenant_id FROM run WHERE {QUEUED} ORDER BY run.tenant_id DESC, {_URGENCY} DESC LIMIT 1
    ) > '', false) AS any
), picked AS MATERIALIZED (
    SELECT due.run_id, due.thread_id, due.updated_at, row_number() OVER () AS position FROM (
        SELECT taken.run_id, taken.thread_id, taken.updated_at
        FROM ({_DUE.format(tenant="''", part=f"LIMIT {_HERE}")}) AS candidate
        CROSS JOIN LATERAL ({_TAKEN}) AS taken
        WHERE {_ONLINE} AND NOT (SELECT company.any FROM company)
        LIMIT (SELECT slots FROM room)
    ) AS due
), claimed AS ({_CLAIMED}), announced AS ({_ANNOUNCED}), outcome AS (
    SELECT company.any AS fairly,
        CASE WHEN company.any OR (SELECT count(*) FROM picked) >= (SELECT slots FROM room) THEN false ELSE
        EXISTS ({_DUE.format(tenant="''", part=f"OFFSET {_HERE} - 1 LIMIT 1")}) END AS more
    FROM company
)
SELECT claimed.*, outcome.more, NULL AS stopped_at, outcome.fairly, room.waits AS suspect_waits
FROM outcome CROSS JOIN room LEFT JOIN claimed ON true ORDER BY claimed.position
"""

BOOKKEEPING = ("position", "more", "stopped_at", "fairly", "suspect_waits")
# How far to look in each tenant past the runs that other workers are claiming at this moment: further with every look
# that finds nothing although there is something. A look that finds less than there are slots is repeated as it is: a
# tenant with a large weight may have been offered slots that it has no runs for.
MARGINS = (20, 20, 200, 2_000, 20_000)

# Claiming one by one, in a transaction: what a claim would take is only picked and locked, and taken by itself. See
# `careful_claim.py`.
_PICKED = "SELECT picked.run_id, picked.thread_id, picked.updated_at, picked.position FROM picked"
TAKE = f"""
WITH picked AS MATERIALIZED (
    SELECT %(run_id)s::uuid AS run_id, %(thread_id)s::uuid AS thread_id, %(updated_at)s::timestamptz AS updated_at,
           %(position)s::bigint AS position
), claimed AS ({_CLAIMED}), announced AS ({_ANNOUNCED})
SELECT claimed.* FROM claimed
"""


def without_taking(statement: str) -> str:
    """One of the statements that claim, as one that only picks and locks what it would take."""
    return statement.replace(_CLAIMED, _PICKED).replace(_ANNOUNCED, "SELECT 1")


class Turn(NamedTuple):
    """The tenant that a worker served last, and how many runs in a row. Its turn is over when these are as many as its
    weight."""

    tenant_id: str = ""
    served: int = TURN_OVER
    # Where the walk from tenant to tenant began that has found nothing yet. None: it has come round, or has found some.
    walking_since: str | None = None

    def after(self, claimed: Iterable[DictRow]) -> Turn:
        """The turn when these have been claimed too, in this order."""
        tenant_id, served, _ = self
        for row in claimed:
            served = served + 1 if row["tenant_id"] == tenant_id else 1
            tenant_id = row["tenant_id"]
        return Turn(tenant_id, min(served, TURN_OVER))

    def stopped(self, at: str) -> Turn:
        """The turn when a look has visited as many tenants as it may, the last of them `at`, and slots are free."""
        began = self.tenant_id if self.walking_since is None else self.walking_since
        passed = self.tenant_id < began <= at if self.tenant_id < at else self.tenant_id < began or began <= at
        return Turn(at, TURN_OVER, None if passed else began)


NO_TURN = Turn()


class Claims(list[DictRow]):
    """What was claimed, and whose turn is next. While that is `walking_since` some tenant, there may be more: another
    claim goes on from there."""

    turn: Turn = NO_TURN


# Executes one of the statements that claim.
Look = Callable[[AsyncConnection[DictRow], str, dict[str, Any]], Awaitable[list[DictRow]]]


async def take_all(connection: AsyncConnection[DictRow], statement: str, asked: dict[str, Any]) -> list[DictRow]:
    """Take whatever the statement finds at once: if one run is refused, none is claimed."""
    return await (await connection.execute(statement, asked)).fetchall()


async def claim(
    connection: AsyncConnection[DictRow],
    worker_id: UUID,
    slots: int,
    graphs: Sequence[str],
    *,
    turn: Turn = NO_TURN,
    max_running: int | None = None,
    tenants: Sequence[str] = (),
    hinted: Sequence[UUID] = (),
    aside: Sequence[UUID] = (),
    look: Look = take_all,
) -> Claims:
    """Take up to `slots` due runs of the given graphs, from each tenant in turn, going on from `turn`; of a tenant the
    highest priority first, then the longest ready. `max_running` is the limit of tenants that have none of their own.
    At most one of them is a suspect, and none if the worker executes one already.

    Tenants at their limit are passed over, `MOST_VISITED` at a time. So these are looked at in any case: `tenants`, of
    which a run has ended, and those of `hinted` runs. Runs that are set `aside` are passed over.

    Each is now `running`, owned by this worker, under a fence higher than any it had before, and announced in its
    thread's log; what it says itself begins at `next_seq`. Fewer than asked for are all there were.
    """
    asked: dict[str, Any] = {
        "worker_id": worker_id,
        "graphs": list(graphs),
        "max_running": max_running,
        "suspect": True,
        "tenants": list(tenants),
        "hinted": [str(run_id) for run_id in hinted],
        "aside": list(aside),
    }
    claimed = Claims()
    # Of the tenant that was served last there may be more.
    statement = CLAIM_FAIRLY if turn.tenant_id else CLAIM
    looks = iter(MARGINS)
    margin: int | None = next(looks)
    while margin is not None:
        asked |= {"margin": margin, "slots": slots - len(claimed), "after": turn.tenant_id, "served": turn.served}
        rows = await look(connection, statement, asked)
        more, fairly, suspect = rows[0]["more"], rows[0]["fairly"], rows[0]["suspect_waits"]
        stopped_at = rows[0]["stopped_at"]
        if statement is CLAIM and fairly:
            statement = CLAIM_FAIRLY
            continue
        if suspect:
            others = [row for row in rows if row["run_id"] is not None]
            rows = await look(connection, CLAIM_SUSPECT, asked | {"slots": 1})
            # The slot that was kept for it is free after all, if another worker was quicker.
            more = more or rows[0]["run_id"] is None
            rows += others
            asked["suspect"] = False
        found = [_without_bookkeeping(row) for row in rows if row["run_id"] is not None]
        claimed += found
        began = turn
        turn = turn.after(found) if found else turn
        if not found:
            margin = next(looks, None)
        full = len(claimed) >= slots
        if stopped_at is not None and not full:
            # From where this look began: what was found may be of a tenant that was named, or of the last one.
            turn = Turn(began.tenant_id, began.served, None if found else began.walking_since)
            if more and margin is not None:
                # Tenants that this look has passed have more. The walk comes round to them late: look again.
                continue
            # What else waits is found by the next claim, which goes on from there.
            turn = turn.stopped(stopped_at)
            break
        turn = Turn(turn.tenant_id, turn.served)
        if full or not more:
            break
    claimed.turn = turn
    return claimed


def _without_bookkeeping(row: DictRow) -> DictRow:
    for name in BOOKKEEPING:
        del row[name]
    row["next_seq"] = row["announced_seq"] + 1
    return row

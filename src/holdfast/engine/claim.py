"""Claiming: a worker takes as many ready runs as it has free slots, from each tenant in turn.

Tenants take turns. A turn is as many runs as the tenant's weight, which only the operator can set. Priority orders the
runs within one tenant; among runs of equal priority, the one that has been ready longest is first.

The cost does not depend on the backlog. Runs that wait behind another run of their thread are not in the index. The
others are found by loose index scans: one probe for each tenant with queued runs and each priority it uses, which reads
only runs that are due and whose graph the worker has. A plain scan would read every high-priority run that is due
tomorrow, all runs of a graph that no worker has, and ten thousand runs of one tenant before the first of another.

While no queued run belongs to a tenant, a much shorter statement without turns and limits is used.

Suspects are runs that were executing when their worker died, and have made no progress since. One of them may have
killed the worker, so they are kept apart: a worker takes one, and the next when that one has made progress, has ended,
or has been executing for `SUSPECT_SECONDS`. A suspect of two crashes in a row never shares its worker with another
suspect, so that a run which kills slowly does not turn innocent runs into poison. A worker keeps a slot for a waiting
suspect, so that other runs do not overtake it for long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.engine.claimed_run import ClaimedRun

# A turn of any weight is over after this many runs. Below 32,768, because psycopg sends larger numbers as another type,
# for which Postgres would prepare the statement again.
TURN_OVER = 10_000
# A run that kills its worker usually does so early. Without this limit a suspect whose first step takes an hour would
# delay all others for an hour, although the host may have failed without any run being the cause.
SUSPECT_SECONDS = 30
# How many tenants with queued runs one statement visits, even if all of them are at their limit.
MAX_TENANTS_VISITED = 100

# A head: a run that may be claimed when it is due.
QUEUED = "run.status = 'pending' AND run.ready_at IS NOT NULL"
# The second column of the index `run_claim_order`. It is negated so that all columns ascend and rows can be compared.
# As an expression that no other index has, it keeps the planner from choosing `run_ready` and reading the runs of all
# tenants to find those of one.
_URGENCY = "(-run.priority::bigint)"
_BEFORE_ALL, _AFTER_ALL = "(-9223372036854775807)::bigint", "9223372036854775807::bigint"
# Queued runs that are no suspects, and suspects, by the index `run_suspect`, which is nearly always empty.
_TRUSTED = f"{QUEUED} AND run.crashes_in_a_row = 0"
_SUSPECT = f"{QUEUED} AND run.crashes_in_a_row > 0"
# Leaves out runs that the database has refused to this worker (`claiming/refused_runs.py`). Nearly always none.
_NOT_ASIDE = "run.run_id <> ALL((SELECT %(aside)s::uuid[])::uuid[])"
_SUSPECT_DUE = f"""
    {_SUSPECT} AND run.ready_at <= now() AND run.graph_id = ANY((SELECT %(graphs)s::text[])::text[]) AND {_NOT_ASIDE}
    AND NOT EXISTS (SELECT 1 FROM run AS held
                    WHERE held.worker_id = %(worker_id)s AND held.status = 'running' AND held.crashes_in_a_row > 0
                      AND greatest(held.crashes_in_a_row, run.crashes_in_a_row) > 1)
"""
# The priorities of a tenant's queued runs, highest first; the last row is NULL.
_LEVELS = f"""
    (SELECT {_URGENCY} FROM run WHERE {QUEUED} AND run.tenant_id = {{tenant}} ORDER BY {_URGENCY} LIMIT 1)
    UNION ALL
    SELECT (SELECT {_URGENCY} FROM run
            WHERE {QUEUED} AND run.tenant_id = {{tenant}} AND {_URGENCY} > level.urgency
            ORDER BY {_URGENCY} LIMIT 1)
    FROM level WHERE level.urgency IS NOT NULL
"""
# A tenant's due runs of one priority: the first ones of each graph that the worker has.
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
# A tenant's due runs of all priorities, in the order in which they are claimed.
_DUE = f"""
    WITH RECURSIVE level(urgency) AS ({_LEVELS})
    SELECT ordered.run_id FROM level CROSS JOIN LATERAL (
        SELECT first.run_id FROM ({_DUE_AT_LEVEL}) AS first ORDER BY first.ready_at
    ) AS ordered
"""
# A tenant's suspects. The one that was released last is last.
_DUE_SUSPECTS = f"""
    SELECT run.run_id FROM run WHERE {_SUSPECT_DUE} AND run.tenant_id = {{tenant}}
    ORDER BY run.updated_at, run.run_id {{part}}
"""
# How many of a tenant's runs to look at: its share, and a margin for runs that other workers are claiming now.
_REACH = "offered.share + (SELECT %(margin)s::bigint)"

# How many runs the statement may take, and whether it keeps one slot for a waiting suspect.
_ROOM = f"""
    SELECT %(slots)s::bigint - suspect.waits::integer AS slots, suspect.waits FROM (
        SELECT (SELECT %(suspect)s::boolean)
           AND EXISTS (SELECT 1 FROM run WHERE {_SUSPECT_DUE})
           AND NOT EXISTS (SELECT 1 FROM run
                           WHERE run.worker_id = %(worker_id)s AND run.status = 'running' AND run.crashes_in_a_row > 0
                             AND run.updated_at > now() - interval '{SUSPECT_SECONDS} s') AS waits
    ) AS suspect
"""

# A worker whose lease has expired takes nothing: its runs are about to be taken over and counted as a crash.
_ONLINE = """
    EXISTS (SELECT 1 FROM worker WHERE worker_id = %(worker_id)s AND status = 'online' AND lease_until > now())
"""
# Locks rows one by one, in order, until there are enough. Other rows stay unlocked.
_TAKEN = """
    SELECT run.run_id, run.thread_id, run.updated_at FROM run
    WHERE run.run_id = candidate.run_id AND run.status = 'pending' AND run.ready_at <= now()
    FOR NO KEY UPDATE SKIP LOCKED
"""
# The planner does not know that `picked` is small. The ARRAY keeps it from reading the whole table `run` instead.
# `next_seq` continues the event numbers of the thread: the log may be ahead of the thread's row (during take-over) or
# behind it (when events have expired).
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
# The claim also inserts the `metadata` event of the attempt, so that watchers need not wait for another commit. The
# timeline uses its worker and the counts of earlier attempts. `accepted`: the transaction that created the run has
# already announced this attempt to clients of v1.
_ANNOUNCED = """
    INSERT INTO event (thread_id, seq, run_id, kind, data)
    SELECT thread_id, announced_seq, run_id, 'metadata', announcement FROM claimed
"""

# The parts of the statement below:
# - `start`: where the round begins: at the tenant that was served last if its turn is not over, else after it. It is a
#   place in the index just before or just after all of that tenant's runs.
# - `turn`: the tenants with due runs, in the order of their turns, at most as many as there are slots. The LIMIT ends
#   the scans below it early.
# - `shared`: how many slots each tenant gets if every tenant has enough runs: whole rounds first, then the remaining
#   slots in order. `served`: how much of its turn the first tenant has used already.
# - `held`: a tenant with a limit of running runs is claimed from by one worker at a time. A worker that waited would
#   count with a snapshot from before the other's claim, so it does not wait: if `claims` has changed since it counted,
#   it leaves the tenant for the next statement.
# - `picked`: `position` is the order of the turns, so the last row is of the tenant that was served last.
# - `more`: whether another statement may find runs although this one did not fill the slots.
# Parameters stand in subqueries, where the planner ignores their values. Planning takes longer than executing, and
# Postgres keeps a generic plan only if a plan for the given values does not look better.
# A worker that was declared lost between two renewals takes nothing (`_ONLINE`).
_PLACE = f"(run.tenant_id, {_URGENCY})"
_START = "((SELECT start.tenant_id FROM start), (SELECT start.edge FROM start))"
# The tenants with queued runs, from the start of the round on, at most `MAX_TENANTS_VISITED`: thousands of them may be
# at their limit. The recursion stops when its readers have enough rows.
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
        WHERE walk.visited < {MAX_TENANTS_VISITED}
"""
# Tenants of hinted runs and of runs that have just ended. They are visited even if the walk is elsewhere.
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
    """The statement that claims due runs from these tenants in turn, as many as there are slots."""
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
        THEN (SELECT walk.tenant_id FROM walk WHERE walk.visited = {MAX_TENANTS_VISITED}) END AS stopped_at
)
SELECT claimed.*, outcome.more, outcome.stopped_at, true AS fairly, room.waits AS suspect_waits
FROM outcome CROSS JOIN room LEFT JOIN claimed ON true ORDER BY claimed.position
"""


CLAIM_FAIRLY = _fairly(_QUEUED_TENANTS, _NAMED_TENANTS, _DUE, _ROOM)
CLAIM_SUSPECT = _fairly(_SUSPECTED_TENANTS, "", _DUE_SUSPECTS, "SELECT %(slots)s::bigint AS slots, false AS waits")

# Claiming while no queued run belongs to a tenant. If one does, it takes nothing and returns `fairly` as true.
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
# How far to look in each tenant past runs that other workers are claiming now. The margin grows with each statement
# that finds nothing although there is more. A statement that finds too few runs is repeated with the same margin,
# because a tenant with a large weight may have been given slots that it has no runs for.
MARGINS = (20, 20, 200, 2_000, 20_000)

# For claiming run by run (`careful_claim.py`): the claim only picks and locks runs, and each is taken by itself.
_PICKED = "SELECT picked.run_id, picked.thread_id, picked.updated_at, picked.position FROM picked"
TAKE = f"""
WITH picked AS MATERIALIZED (
    SELECT %(run_id)s::uuid AS run_id, %(thread_id)s::uuid AS thread_id, %(updated_at)s::timestamptz AS updated_at,
           %(position)s::bigint AS position
), claimed AS ({_CLAIMED}), announced AS ({_ANNOUNCED})
SELECT claimed.* FROM claimed
"""


def without_taking(statement: str) -> str:
    """Turn a claiming statement into one that only picks and locks the runs that it would take."""
    return statement.replace(_CLAIMED, _PICKED).replace(_ANNOUNCED, "SELECT 1")


class Turn(NamedTuple):
    """The tenant that a worker served last, and how many runs in a row. Its turn is over when that is its weight."""

    tenant_id: str = ""
    served: int = TURN_OVER
    # Where a walk over the tenants began that has found nothing yet. None: it found runs or has visited all tenants.
    walking_since: str | None = None

    def after(self, claimed: Iterable[ClaimedRun]) -> Turn:
        """The turn after these runs were claimed in this order."""
        tenant_id, served, _ = self
        for run in claimed:
            served = served + 1 if run.tenant_id == tenant_id else 1
            tenant_id = run.tenant_id
        return Turn(tenant_id, min(served, TURN_OVER))

    def stopped(self, at: str) -> Turn:
        """The turn after a statement visited as many tenants as it may, `at` being the last, and left slots free."""
        began = self.tenant_id if self.walking_since is None else self.walking_since
        passed = self.tenant_id < began <= at if self.tenant_id < at else self.tenant_id < began or began <= at
        return Turn(at, TURN_OVER, None if passed else began)


NO_TURN = Turn()


class Claims(list[ClaimedRun]):
    """The claimed runs, and the turn for the next claim. While `turn.walking_since` is set there may be more runs, and
    the next claim continues the walk."""

    turn: Turn = NO_TURN


# Executes one of the statements that claim.
Look = Callable[[AsyncConnection[DictRow], str, dict[str, Any]], Awaitable[list[DictRow]]]


async def take_all(connection: AsyncConnection[DictRow], statement: str, asked: dict[str, Any]) -> list[DictRow]:
    """Execute the statement as it is: if the database refuses one run, none is claimed."""
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
    """Claim up to `slots` due runs of the given graphs, from each tenant in turn, starting from `turn`.

    Within a tenant, higher priority comes first, then the longest ready. `max_running` limits tenants without a limit
    of their own. At most one of the runs is a suspect, and none if the worker is executing one already.

    One statement visits at most `MAX_TENANTS_VISITED` tenants, and many may be at their limit. So `tenants`, of which
    a run has just ended, and the tenants of `hinted` runs are visited in any case. Runs in `aside` are left out.

    Each claimed run is `running`, owned by this worker, under a higher fence than ever before, and its attempt is in
    the event log; its own events begin at `next_seq`. If fewer runs are returned than asked for, there were no more,
    unless the returned turn is `walking_since` a tenant or the margins are used up; the next claim then finds the
    others."""
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
    # The tenant that was served last may have more runs.
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
            # If another worker took the suspect first, the slot that was kept for it is free.
            more = more or rows[0]["run_id"] is None
            rows += others
            asked["suspect"] = False
        found = [_run_of(row) for row in rows if row["run_id"] is not None]
        claimed += found
        began = turn
        turn = turn.after(found) if found else turn
        if not found:
            margin = next(looks, None)
        full = len(claimed) >= slots
        if stopped_at is not None and not full:
            # Continue from where this statement began: the runs may be those of a named tenant, or of the last one.
            turn = Turn(began.tenant_id, began.served, None if found else began.walking_since)
            if more and margin is not None:
                # Tenants that were already visited have more runs, and the walk would return to them late. Look again.
                continue
            # The next claim continues the walk from there.
            turn = turn.stopped(stopped_at)
            break
        turn = Turn(turn.tenant_id, turn.served)
        if full or not more:
            break
    claimed.turn = turn
    return claimed


def _run_of(row: DictRow) -> ClaimedRun:
    for name in BOOKKEEPING:
        del row[name]
    return ClaimedRun.of(row)

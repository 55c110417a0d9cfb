"""Tenants take turns: however much one has queued, and at whatever priority, the first run of another waits for one
slot's work at most. Priority orders the runs of one tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from holdfast.db.connect import Database
from holdfast.engine.claim import MAX_TENANTS_VISITED, NO_TURN, Claims, Turn, claim
from holdfast.engine.claimed_run import ClaimedRun
from holdfast.errors import InvalidRequest
from holdfast.resources.tenants import MAX_WEIGHT, set_limits
from tests.engine.scene import GRAPH, create, online_worker
from tests.support.records import query

FLOOD = """
WITH waiting AS (
    INSERT INTO thread (thread_id, tenant_id) SELECT gen_random_uuid(), %s FROM generate_series(1, %s)
    RETURNING thread_id, tenant_id
)
INSERT INTO run (run_id, thread_id, tenant_id, assistant_id, graph_id, created_at, ready_at, priority, kwargs)
SELECT gen_random_uuid(), thread_id, tenant_id, gen_random_uuid(), %s, now() - interval '1 hour',
       now() - interval '1 hour' + row_number() OVER () * interval '1 millisecond', %s, '{}' FROM waiting
RETURNING run_id
"""
LIMIT = "INSERT INTO tenant (tenant_id, max_running) VALUES (%s, %s) RETURNING tenant_id"
WEIGHT = "INSERT INTO tenant (tenant_id, weight) VALUES (%s, %s) RETURNING tenant_id"


async def flood(database: Database, tenant: str, runs: int, *, graph: str = GRAPH, priority: int = 0) -> None:
    await query(database, FLOOD, tenant, runs, graph, priority)


async def take(database: Database, worker: UUID, slots: int, **options: Any) -> Claims:
    async with database.connection() as connection:
        return await claim(connection, worker, slots, options.pop("graphs", [GRAPH]), **options)


async def end(database: Database, rows: Sequence[ClaimedRun]) -> None:
    await query(
        database,
        "UPDATE run SET status = 'success', worker_id = NULL, ready_at = NULL, finished_at = now() "
        "WHERE run_id = ANY(%s) RETURNING run_id",
        [row.run_id for row in rows],
    )


def tenants(rows: Sequence[ClaimedRun]) -> Counter[str]:
    return Counter(row.tenant_id for row in rows)


async def test_the_first_run_of_another_waits_for_one_slot_at_most(database: Database) -> None:
    """A worker with four slots, all of them busy with one of a tenant's ten thousand."""
    worker = await online_worker(database)
    await flood(database, "acme", 10_000)
    busy = await take(database, worker, 4)
    assert tenants(busy) == {"acme": 4}
    late = await create(database, uuid4(), tenant_id="zeta")
    await end(database, busy[:1])
    [next_one] = await take(database, worker, 1, turn=NO_TURN.after(busy))
    assert next_one.run_id == late.run["run_id"]


@pytest.mark.parametrize("after", ["", "acme", "middle", "zeta", "zzz"])
async def test_whoever_was_last_the_turn_comes_round(database: Database, after: str) -> None:
    worker = await online_worker(database)
    for tenant in ("acme", "zeta", ""):
        await flood(database, tenant, 50)
    served = await served_one_by_one(database, worker, 6, Turn(after))
    assert Counter(served) == {"acme": 2, "zeta": 2, "": 2}
    assert served[:3] == served[3:]


async def test_slots_are_shared_and_none_stays_empty(database: Database) -> None:
    worker = await online_worker(database)
    await flood(database, "acme", 1_000)
    await flood(database, "mini", 1)
    await flood(database, "zeta", 2)
    assert tenants(await take(database, worker, 10)) == {"acme": 7, "mini": 1, "zeta": 2}
    assert tenants(await take(database, worker, 10)) == {"acme": 10}


async def test_more_tenants_than_slots(database: Database) -> None:
    worker = await online_worker(database)
    for number in range(12):
        await flood(database, f"tenant{number:02}", 5)
    first = await take(database, worker, 5)
    second = await take(database, worker, 7, turn=NO_TURN.after(first))
    assert sorted(tenants(first + second)) == [f"tenant{number:02}" for number in range(12)]


async def test_flood_of_high_priority_does_not_delay_another_tenant(database: Database) -> None:
    """A worker with four slots, all of them busy with one of a tenant's thousand urgent runs."""
    worker = await online_worker(database)
    await flood(database, "acme", 1_000, priority=1_000_000)
    busy = await take(database, worker, 4)
    late = await create(database, uuid4(), tenant_id="zeta", priority=-1_000_000)
    await end(database, busy[:1])
    [next_one] = await take(database, worker, 1, turn=NO_TURN.after(busy))
    assert next_one.run_id == late.run["run_id"]


async def test_runs_of_no_tenant_do_not_delay_a_tenant_by_their_priority(database: Database) -> None:
    worker = await online_worker(database)
    await flood(database, "", 100, priority=7)
    await flood(database, "acme", 100)
    assert tenants(await take(database, worker, 10)) == {"": 5, "acme": 5}


async def test_priorities_of_other_tenants_do_not_change_a_tenants_share(database: Database) -> None:
    worker = await online_worker(database)
    await flood(database, "acme", 20, priority=5)
    await flood(database, "mini", 1, priority=9)
    await flood(database, "zeta", 20)
    assert tenants(await take(database, worker, 11)) == {"acme": 5, "mini": 1, "zeta": 5}


async def test_priority_orders_the_runs_of_one_tenant(database: Database) -> None:
    worker = await online_worker(database)
    for priority in (0, -3, 1_000_000, 2):
        await flood(database, "acme", 3, priority=priority)
        await flood(database, "acme", 3, graph="other", priority=priority)
    await flood(database, "zeta", 3, priority=1)
    claimed = await take(database, worker, 20, graphs=[GRAPH, "other"])
    rows = await query(database, "SELECT run_id, priority, ready_at FROM run WHERE tenant_id = 'acme'")
    expected = sorted(rows, key=lambda row: (-row["priority"], row["ready_at"]))[:17]
    found = [row.run_id for row in claimed if row.tenant_id == "acme"]
    # Of each priority; runs of two graphs may have been made in the same moment.
    priorities = {row["run_id"]: row["priority"] for row in rows}
    assert [priorities[run_id] for run_id in found] == [row["priority"] for row in expected]


# --- weights ----------------------------------------------------------------------------------------------------------


async def served_one_by_one(database: Database, worker: UUID, times: int, turn: Turn = NO_TURN) -> list[str]:
    """Whose runs a worker claims that has one free slot at a time."""
    served = []
    for _ in range(times):
        rows = await take(database, worker, 1, turn=turn)
        turn = turn.after(rows)
        served += [row.tenant_id for row in rows]
    return served


async def test_weight_two_gets_two_turns_for_one(database: Database) -> None:
    worker = await online_worker(database)
    await query(database, WEIGHT, "heavy", 2)
    for tenant in ("acme", "heavy", "zeta"):
        await flood(database, tenant, 30)
    served = await served_one_by_one(database, worker, 8)
    assert served == ["acme", "heavy", "heavy", "zeta"] * 2


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7, 10])
async def test_weights_hold_however_many_slots_are_free(database: Database, slots: int) -> None:
    """The order is that of single slots: a claim continues the turn in which the one before it ended."""
    worker = await online_worker(database)
    await query(database, WEIGHT, "heavy", 3)
    for tenant in ("acme", "heavy", "zeta"):
        await flood(database, tenant, 100)
    turn, served = NO_TURN, list[str]()
    while len(served) < 100:
        rows = await take(database, worker, slots, turn=turn)
        turn = turn.after(rows)
        served += [row.tenant_id for row in rows]
    expected = ["acme", "heavy", "heavy", "heavy", "zeta"] * 25
    assert served[:100] == expected[:100]


async def test_weight_does_not_keep_slots_empty(database: Database) -> None:
    worker = await online_worker(database)
    await query(database, WEIGHT, "heavy", MAX_WEIGHT)
    await flood(database, "heavy", 3)
    await flood(database, "zeta", 20)
    rows = await take(database, worker, 10)
    assert tenants(rows) == {"heavy": 3, "zeta": 7}


async def test_large_weights_do_not_leave_due_runs_behind(database: Database) -> None:
    """Each look offers all slots to one tenant, which has one run."""
    worker = await online_worker(database)
    names = [f"tenant{number}" for number in range(8)]
    for name in names:
        await query(database, WEIGHT, name, MAX_WEIGHT)
        await flood(database, name, 1)
    rows = await take(database, worker, 10)
    assert tenants(rows) == dict.fromkeys(names, 1)


async def test_weight_does_not_exceed_the_limit_of_running_runs(database: Database) -> None:
    worker = await online_worker(database)
    await query(database, LIMIT, "heavy", 2)
    await query(database, "UPDATE tenant SET weight = 5 RETURNING tenant_id")
    await flood(database, "heavy", 20)
    await flood(database, "zeta", 20)
    assert tenants(await take(database, worker, 10)) == {"heavy": 2, "zeta": 8}


async def test_turn_that_a_lower_weight_ended_is_over(database: Database) -> None:
    worker = await online_worker(database)
    await query(database, WEIGHT, "acme", 10)
    for tenant in ("acme", "zeta"):
        await flood(database, tenant, 20)
    first = await take(database, worker, 4)
    assert tenants(first) == {"acme": 4}
    await query(database, "UPDATE tenant SET weight = 2 RETURNING tenant_id")
    assert await served_one_by_one(database, worker, 4, NO_TURN.after(first)) == ["zeta", "acme", "acme", "zeta"]


@pytest.mark.parametrize("weight", [0, -1, MAX_WEIGHT + 1])
async def test_weight_outside_the_range_is_refused(database: Database, weight: int) -> None:
    """By the function that the command line calls, and by the table itself."""
    async with database.transaction() as connection:
        with pytest.raises(InvalidRequest, match=f"weight: {weight} is not a number from 1 to 1,000"):
            await set_limits(connection, "acme", {}, [], weight=weight)
    with pytest.raises(psycopg.errors.CheckViolation):
        await query(database, WEIGHT, "acme", weight)


async def test_many_workers_at_once_share_by_weight(database: Database) -> None:
    """Each counts its own turns, so together they are as fair as each of them."""
    workers = [await online_worker(database) for _ in range(6)]
    await query(database, WEIGHT, "heavy", 2)
    for tenant in ("acme", "heavy"):
        await flood(database, tenant, 300)

    async def work(worker: UUID) -> list[str]:
        return await served_one_by_one(database, worker, 30)

    served = Counter(tenant for part in await asyncio.gather(*map(work, workers)) for tenant in part)
    assert served == {"heavy": 120, "acme": 60}


# --- order ------------------------------------------------------------------------------------------------------------


async def test_runs_of_a_tenant_are_claimed_oldest_first_across_graphs(database: Database) -> None:
    worker = await online_worker(database)
    await query(database, FLOOD, "acme", 30, "one", 0)
    await query(database, FLOOD, "acme", 30, "two", 0)
    rows = await query(database, "SELECT run_id, ready_at FROM run ORDER BY ready_at")
    claimed = await take(database, worker, 20, graphs=["one", "two"])
    # By the times, because two runs may be ready at the same microsecond, and either of them may come first then.
    ready_at = {row["run_id"]: row["ready_at"] for row in rows}
    assert [ready_at[row.run_id] for row in claimed] == [row["ready_at"] for row in rows[:20]]


async def test_what_others_are_claiming_is_passed_over(database: Database) -> None:
    """However many they hold at this moment, and although they have not committed."""
    mine, other = await online_worker(database), await online_worker(database)
    await flood(database, "acme", 100)
    async with database.transaction() as connection:
        held = await claim(connection, other, 60, [GRAPH])
        assert len(held) == 60
        looking = asyncio.create_task(take(database, mine, 10))
        done, _ = await asyncio.wait({looking}, timeout=60)
        assert done, "a claim waits for another"
    assert len(looking.result()) == 10


async def test_many_workers_at_once_take_everything_once(database: Database) -> None:
    workers = [await online_worker(database) for _ in range(8)]
    for tenant, runs in (("acme", 200), ("mini", 3), ("", 40), ("zeta", 60)):
        await flood(database, tenant, runs)

    async def work(worker: UUID) -> list[ClaimedRun]:
        found: list[ClaimedRun] = []
        while rows := await take(database, worker, 7, turn=NO_TURN.after(found)):
            found += rows
        return found

    claimed = [row.run_id for rows in await asyncio.gather(*map(work, workers)) for row in rows]
    assert len(claimed) == len(set(claimed)) == 303


# --- running limits ---------------------------------------------------------------------------------------------------


async def test_a_limit_is_kept_by_many_workers_at_once(database: Database) -> None:
    workers = [await online_worker(database) for _ in range(8)]
    await query(database, LIMIT, "acme", 5)
    for _ in range(10):
        await query(database, "DELETE FROM run RETURNING run_id")
        await flood(database, "acme", 40)
        await flood(database, "acme", 10, priority=3)
        await flood(database, "zeta", 4)
        rows = await asyncio.gather(*(take(database, worker, 4) for worker in workers))
        served = tenants([row for part in rows for row in part])
        assert served["acme"] <= 5
        assert served["zeta"] == 4
        assert tenants([row for part in rows for row in part] + await take(database, workers[0], 40)) == {
            "acme": 5,
            "zeta": 4,
        }


async def test_a_place_that_is_free_again_is_taken(database: Database) -> None:
    worker = await online_worker(database)
    await query(database, LIMIT, "acme", 2)
    await flood(database, "acme", 5)
    first = await take(database, worker, 10)
    assert len(first) == 2
    assert await take(database, worker, 10) == []
    await end(database, first[:1])
    assert len(await take(database, worker, 10)) == 1


async def test_the_settings_limit_those_who_have_no_limit_of_their_own(database: Database) -> None:
    worker = await online_worker(database)
    for tenant, own in (("acme", None), ("large", 3), ("free", 2**31 - 1)):
        await query(database, LIMIT, tenant, own)
        await flood(database, tenant, 5)
    await flood(database, "", 5)
    assert tenants(await take(database, worker, 30, max_running=1)) == {"acme": 1, "large": 3, "free": 5, "": 5}


FULL = """
WITH tenants AS (
    INSERT INTO tenant (tenant_id, max_running)
    SELECT 'full-' || lpad(n::text, 4, '0'), 0 FROM generate_series(1, %s) AS n RETURNING tenant_id
), waiting AS (
    INSERT INTO thread (thread_id, tenant_id) SELECT gen_random_uuid(), tenant_id FROM tenants
    RETURNING thread_id, tenant_id
)
INSERT INTO run (run_id, thread_id, tenant_id, assistant_id, graph_id, created_at, ready_at, kwargs)
SELECT gen_random_uuid(), thread_id, tenant_id, gen_random_uuid(), %s, now(), now(), '{}' FROM waiting RETURNING run_id
"""


@pytest.mark.parametrize("where", ["aaa", "full-0150-between", "zzz"])
async def test_tenant_behind_many_at_their_limit_is_found_by_the_next_claims(database: Database, where: str) -> None:
    worker = await online_worker(database)
    await query(database, FULL, 350, GRAPH)
    await flood(database, where, 1)
    turn, looks = Turn("full-0300"), 0
    found: list[ClaimedRun] = []
    while not found:
        claims = await take(database, worker, 5, turn=turn)
        found, turn, looks = list(claims), claims.turn, looks + 1
        assert found or turn.walking_since is not None, "the walk goes on until it has come round"
    assert [row.tenant_id for row in found] == [where]
    assert looks <= 350 // MAX_TENANTS_VISITED + 2


async def test_walk_past_tenants_at_their_limit_ends_when_it_has_come_round(database: Database) -> None:
    worker = await online_worker(database)
    await query(database, FULL, 350, GRAPH)
    turn, looks = NO_TURN, 0
    while True:
        claims = await take(database, worker, 5, turn=turn)
        turn, looks = claims.turn, looks + 1
        assert claims == []
        if turn.walking_since is None:
            break
    assert looks <= 350 // MAX_TENANTS_VISITED + 2


@pytest.mark.parametrize("named", ["tenant", "run"])
async def test_tenant_that_is_known_to_have_room_is_found_at_once(database: Database, named: str) -> None:
    worker = await online_worker(database)
    await query(database, FULL, 350, GRAPH)
    late = await create(database, uuid4(), tenant_id="zeta")
    known = {"tenants": ["zeta"]} if named == "tenant" else {"hinted": [late.run["run_id"]]}
    [claimed] = await take(database, worker, 5, **known)
    assert claimed.run_id == late.run["run_id"]
    # One that the walk comes to anyway is not served twice.
    await flood(database, "aaa", 5)
    await query(database, "INSERT INTO tenant (tenant_id, max_running) VALUES ('aaa', 2) RETURNING 1")
    assert len(await take(database, worker, 5, tenants=["aaa", "aaa"])) == 2


@pytest.mark.parametrize(
    ("room", "named"), [("full-0100", []), ("full-0150", ["full-0150"])], ids=["last visited", "named"]
)
async def test_walk_goes_on_after_a_tenant_was_served(database: Database, room: str, named: list[str]) -> None:
    worker = await online_worker(database)
    await query(database, FULL, 350, GRAPH)
    await query(database, "UPDATE tenant SET max_running = 1 WHERE tenant_id = %s RETURNING 1", room)
    await flood(database, "zzz", 1)
    claims = await take(database, worker, 5, turn=Turn("aaaa"), tenants=named)
    found = [row.tenant_id for row in claims]
    while claims.turn.walking_since is not None:
        claims = await take(database, worker, 5, turn=claims.turn)
        found += [row.tenant_id for row in claims]
    assert found == [room, "zzz"]


async def test_tenant_with_more_is_looked_at_again_although_the_walk_has_not_come_round(database: Database) -> None:
    """A tenant with a large weight and one run is offered slots that it has no runs for."""
    worker = await online_worker(database)
    await query(database, FULL, 350, GRAPH)
    await query(database, "INSERT INTO tenant (tenant_id, weight) VALUES ('bbb-heavy', 100) RETURNING 1")
    await flood(database, "bbb-heavy", 1)
    await flood(database, "bbb-many", 20)
    claims = await take(database, worker, 5, turn=Turn("aaaa"))
    assert tenants(claims) == {"bbb-heavy": 1, "bbb-many": 4}

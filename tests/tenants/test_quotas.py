"""What a tenant may use: beyond it 429, a time to try again, and nothing half-done."""

from __future__ import annotations

import asyncio
import os
import subprocess
from datetime import timedelta
from decimal import Decimal
from uuid import uuid4

import httpx
import pytest

from holdfast.engine.usage import Tally, record_usage
from holdfast.resources.crons import upcoming_crons
from holdfast.resources.tenants import adopt, list_tenants
from holdfast.upkeep.crons import fire
from tests.cli.processes import holdfast
from tests.support.waiting import until
from tests.tenants.conftest import House
from tests.tenants.test_keys import becomes

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = {"assistant_id": "echo", "input": {}}
LEFT = """
SELECT (SELECT count(*) FROM run WHERE tenant_id = %s) AS runs,
       (SELECT count(*) FROM thread WHERE tenant_id = %s) AS threads
"""


async def somebody(house: House, tenant: str) -> httpx.AsyncClient:
    client = await house.tenant(tenant)
    await becomes(client, 200)
    return client


async def left_by(house: House, tenant: str) -> tuple[int, int]:
    [row] = await house.query(LEFT, tenant, tenant)
    return row["runs"], row["threads"]


async def refused(client: httpx.AsyncClient) -> httpx.Response:
    """The answer to a run, once the limit is known to the server."""

    async def over() -> httpx.Response | None:
        answer = await client.post("/runs", json=RUN)
        return answer if answer.status_code == 429 else None

    found = await until(over, "runs are refused")
    assert found is not None
    return found


async def test_the_queue_is_exact_under_a_hundred_requests_at_once(house: House) -> None:
    await house.limit("queue", max_queued=5)
    client = await somebody(house, "queue")
    answers = await asyncio.gather(*(client.post("/runs", json=RUN) for _ in range(40)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 35
    over = next(answer for answer in answers if answer.status_code == 429)
    assert int(over.headers["retry-after"]) >= 1
    assert "'queue'" in over.json()["detail"]
    assert "TENANT_MAX_QUEUED" in over.json()["detail"]
    # Neither a run nor the thread that was to be made for it.
    assert await left_by(house, "queue") == (5, 5)
    # A place that is free is free again; others were never in the way.
    first = next(answer for answer in answers if answer.status_code == 200).json()
    await client.post(f"/threads/{first['thread_id']}/runs/{first['run_id']}/cancel")
    assert (await client.post("/runs", json=RUN)).status_code == 200
    assert (await (await somebody(house, "elsewhere")).post("/runs", json=RUN)).status_code == 200


async def test_a_batch_is_all_or_nothing(house: House) -> None:
    await house.limit("batch", max_queued=3)
    client = await somebody(house, "batch")
    assert (await client.post("/runs/batch", json=[RUN] * 4)).status_code == 429
    assert await left_by(house, "batch") == (0, 0)
    assert (await client.post("/runs/batch", json=[RUN] * 3)).status_code == 200


async def test_refused_run_does_not_cancel_the_run_before_it(house: House) -> None:
    """A strategy that makes room for itself is not over the limit; one that does not leaves everything as it was."""
    await house.limit("strategy", max_queued=1)
    client = await somebody(house, "strategy")
    thread = str(uuid4())
    given = {**RUN, "if_not_exists": "create"}
    first = (await client.post(f"/threads/{thread}/runs", json=given)).json()
    assert (await client.post(f"/threads/{thread}/runs", json=given)).status_code == 429
    other = await client.post(f"/threads/{uuid4()}/runs", json={**given, "multitask_strategy": "rollback"})
    assert other.status_code == 429
    assert (await client.get(f"/threads/{thread}/runs/{first['run_id']}")).json()["status"] == "pending"
    replaced = await client.post(f"/threads/{thread}/runs", json={**given, "multitask_strategy": "rollback"})
    assert replaced.status_code == 200
    assert await left_by(house, "strategy") == (1, 1)


async def test_requests_a_second(house: House) -> None:
    client, other = await somebody(house, "quick"), await somebody(house, "calm")
    await house.limit("quick", requests_per_second=0.5)

    async def over() -> httpx.Response | None:
        answer = await client.post("/threads", json={})
        return answer if answer.status_code == 429 else None

    answer = await until(over, "requests are refused")
    assert answer is not None
    assert 1 <= int(answer.headers["retry-after"]) <= 2
    assert "0.5 requests a second" in answer.json()["detail"]
    assert "TENANT_REQUESTS_PER_SECOND" in answer.json()["detail"]
    for _ in range(5):
        assert (await other.get("/runs")).status_code == 200
    await house.limit("quick", requests_per_second=float("inf"))

    async def free() -> bool:
        return all([(await client.get("/runs")).status_code == 200 for _ in range(5)])

    await until(free, "the limit is gone")


async def test_spend_a_day(house: House) -> None:
    client = await somebody(house, "spender")
    await house.limit("spender", spend_per_day_usd=2.0)
    run = (await client.post("/runs", json=RUN)).json()
    tally = Tally()
    for _ in range(2):
        tally.add_call("priced", {"total_tokens": 10}, Decimal("1.25"))
        # Whoever is not sure that it was written writes it again, and it counts once.
        for _ in range(2):
            async with house.database.transaction() as connection:
                await record_usage(connection, {run["run_id"]: tally.stored()})
    answer = await refused(client)
    assert "$2.50 today" in answer.json()["detail"]
    assert "TENANT_SPEND_PER_DAY_USD" in answer.json()["detail"]
    assert 1 <= int(answer.headers["retry-after"]) <= timedelta(days=1).total_seconds()
    async with house.database.connection() as connection:
        [shown] = await list_tenants(connection, "spender")
    assert (shown["spent_today_usd"], shown["queued"]) == (2.5, (await left_by(house, "spender"))[0])
    use = (await client.get("/tenant")).json()
    assert use == {
        "tenant_id": "spender",
        "queued": shown["queued"],
        "running": 0,
        "weight": 1,
        "spent_today_usd": 2.5,
        "max_queued": None,
        "max_running": None,
        "requests_per_second": None,
        "spend_per_day_usd": 2.0,
    }
    await house.query("UPDATE tenant_spend SET day = day - 1 RETURNING day")
    assert (await client.post("/runs", json=RUN)).status_code == 200


async def test_a_cron_over_the_limit_is_skipped(house: House) -> None:
    client = await somebody(house, "cron")
    cron = (await client.post("/runs/crons", json={**RUN, "schedule": "* * * * * *"})).json()
    for limit, created in ((1, True), (1, False)):
        await house.limit("cron", max_queued=limit)

        async def due() -> object:
            async with house.database.connection() as connection:
                rows = await upcoming_crons(connection, 10)
            return next((row for row in rows if str(row["cron_id"]) == cron["cron_id"] and row["due_in"] <= 0), None)

        # The server's own upkeep fires it as well; whoever comes first, the limit holds.
        found = await until(due, "the cron is due")
        firing = await fire(house.database, found)  # type: ignore[arg-type]
        if firing is not None and not created:
            assert firing.created is None
            assert "queued" in firing.skipped
    await client.delete(f"/runs/crons/{cron['cron_id']}")
    assert (await left_by(house, "cron"))[0] == 1


async def test_tenant_adopts_rows_without_a_tenant(house: House) -> None:
    """From before there were tenants: no key sees it until it is somebody's."""
    client = await somebody(house, "heir")
    thread = (await house.query("INSERT INTO thread (thread_id) VALUES (gen_random_uuid()) RETURNING thread_id"))[0]
    await house.query("INSERT INTO store (prefix, key, value) VALUES ('old.notes', 'k', '{\"a\": 1}') RETURNING key")
    path = f"/threads/{thread['thread_id']}"
    assert (await client.get(path)).status_code == 404
    async with house.database.transaction() as connection:
        moved = await adopt(connection, "heir")
    assert (moved["threads"], moved["items"]) == (1, 1)
    assert (await client.get(path)).status_code == 200
    item = await client.get("/store/items", params={"namespace": "old.notes", "key": "k"})
    assert item.json()["value"] == {"a": 1}
    async with house.database.transaction() as connection:
        assert set((await adopt(connection, "other")).values()) == {0}


# --- checkpoints from before there was Holdfast -----------------------------------------------------------------------

CHECKPOINT = """
INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint, metadata)
VALUES (%s, '', '1', '{"v": 4, "channel_values": {"secret": "old"}, "channel_versions": {}}', '{}') RETURNING thread_id
"""


async def test_checkpoints_that_nobody_owns_are_not_given_to_a_tenant(house: House) -> None:
    """By no way in which a client names the id of a thread; and the answer is the one for another tenant's thread."""
    client, other = await somebody(house, "finder"), await somebody(house, "owner")
    thread_id, taken = str(uuid4()), str(uuid4())
    await house.query(CHECKPOINT, thread_id)
    await other.post("/threads", json={"thread_id": taken})
    for body in ({}, {"if_exists": "do_nothing"}):
        answers = [await client.post("/threads", json={"thread_id": one, **body}) for one in (thread_id, taken)]
        assert [answer.status_code for answer in answers] == [409, 409]
        assert answers[0].text.replace(thread_id, taken) == answers[1].text
    for way in ("", "/stream", "/wait"):
        path = f"/threads/{thread_id}/runs{way}"
        assert (await client.post(path, json={**RUN, "if_not_exists": "create"})).status_code == 404
    start = {"id": 1, "method": "run.start", "params": RUN}
    assert (await client.post(f"/threads/{thread_id}/commands", json=start)).json().get("type") != "success"
    for path in ("", "/state", "/history"):
        assert (await client.get(f"/threads/{thread_id}{path}")).status_code == 404
    assert not await house.query("SELECT 1 FROM thread WHERE thread_id = %s", thread_id)


async def test_checkpoints_are_adopted_with_everything_else(house: House) -> None:
    client = await somebody(house, "keeper")
    thread_id = str(uuid4())
    await house.query(CHECKPOINT, thread_id)
    await house.query(CHECKPOINT, "not a UUID")
    async with house.database.transaction() as connection:
        moved = await adopt(connection, "keeper")
    assert moved["threads"] >= 1
    assert (await client.get(f"/threads/{thread_id}")).status_code == 200
    [row] = await house.query("SELECT has_state FROM thread WHERE thread_id = %s", thread_id)
    assert row["has_state"]


async def test_some_checkpoints_are_adopted_by_the_command(house: House) -> None:
    client = await somebody(house, "chosen")
    mine, nobodys = str(uuid4()), str(uuid4())
    for thread_id in (mine, nobodys):
        await house.query(CHECKPOINT, thread_id)
    environ = {**os.environ, "DATABASE_URL": house.database.settings.database_url or "", "COLUMNS": "200"}
    arguments = (mine, "--tenant", "chosen", "--metadata", '{"owner": "ann"}')
    done = await asyncio.to_thread(
        subprocess.run,
        holdfast("tenants", "adopt-checkpoints", *arguments),
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "1 thread", done.stderr
    assert (await client.get(f"/threads/{mine}")).json()["metadata"] == {"owner": "ann"}
    assert (await client.get(f"/threads/{nobodys}")).status_code == 404

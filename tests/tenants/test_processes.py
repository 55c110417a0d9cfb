"""Tenants in a fleet of real processes, of which some are killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from tests.cli.processes import holdfast
from tests.support.fleet import Fleet, until
from tests.support.watching import WatchedRun

ENVIRON = {"N_JOBS_PER_WORKER": "2", "KEY_REFRESH_SECONDS": "0.2"}


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(database_url, tmp_path) as fleet:
        fleet.steps.create()
        yield fleet


async def command(fleet: Fleet, *arguments: str) -> str:
    """What a `holdfast` command prints."""
    environ = {**os.environ, "DATABASE_URL": fleet.database_url, "COLUMNS": "200"}
    done = await asyncio.to_thread(
        subprocess.run, holdfast(*arguments), env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


async def new_key(fleet: Fleet, tenant: str) -> dict[str, str]:
    made = json.loads(await command(fleet, "keys", "create", "--tenant", tenant, "--name", "test", "--json"))
    return {"x-api-key": made["key"]}


async def post(fleet: Fleet, headers: dict[str, str], **body: Any) -> httpx.Response:
    given = {"assistant_id": "steps", "input": {"seconds": 0.2}, **body}
    return await fleet.client.post(f"{fleet.urls[0]}/runs", headers=headers, json=given)


async def test_a_killed_worker_costs_neither_turn_nor_limit(fleet: Fleet) -> None:
    """A tenant floods the queue and may run one at a time. The worker is killed in the middle of it; the other goes on
    with that run, the limit holds at every moment, and another tenant's first run does not wait for the flood."""
    acme, zeta = await new_key(fleet, "acme"), await new_key(fleet, "zeta")
    await command(fleet, "tenants", "set", "acme", "--max-running", "1", "--max-queued", "60")
    [web], [first] = await fleet.start(webs=1, workers=1, environ=ENVIRON)
    assert (await post(fleet, {})).status_code == 401
    # One that does not end before it is allowed to: it is what the worker has in its hands when it is killed.
    held = (await post(fleet, acme, input={"hold": "s3"})).json()
    watched = WatchedRun(UUID(held["run_id"]), UUID(held["thread_id"]))
    await fleet.held(watched, "s3")
    flood = await fleet.client.post(
        f"{web.url}/runs/batch", headers=acme, json=[{"assistant_id": "steps", "input": {"seconds": 0.3}}] * 55
    )
    assert flood.status_code == 200

    most = 0

    async def running() -> int:
        nonlocal most
        [row] = await fleet.query("SELECT count(*) FROM run WHERE tenant_id = 'acme' AND status = 'running'")
        most = max(most, row["count"])
        return int(row["count"])

    await until(running, "a run of the tenant is executed")
    second = await fleet.start_worker(ENVIRON)
    first.kill()

    async def taken_over() -> bool:
        await running()
        row = await fleet.row(watched)
        return bool(row["attempt"] > 1 and row["status"] == "running")

    await until(taken_over, "the run is taken over")
    run = (await post(fleet, zeta, input={"seconds": 0.05})).json()

    async def done() -> bool:
        await running()
        return bool(await fleet.query("SELECT 1 FROM run WHERE run_id = %s AND status = 'success'", (run["run_id"],)))

    await until(done, "the other tenant's run is done")
    fleet.steps.open_gate(watched.thread_id)

    async def some_are_through() -> bool:
        await running()
        [row] = await fleet.query("SELECT count(*) FROM run WHERE tenant_id = 'acme' AND status = 'success'")
        return bool(row["count"] >= 3)

    await until(some_are_through, "the flood goes on, one at a time")
    [left] = await fleet.query("SELECT count(*) FROM run WHERE tenant_id = 'acme' AND status = 'pending'")
    assert left["count"] > 20, "the flood was over before it could be in the way"
    assert most == 1
    assert second.process.poll() is None
    shown = [json.loads(line) for line in (await command(fleet, "tenants", "list", "--json")).splitlines()]
    assert [(one["tenant_id"], one["max_running"], one["keys"]) for one in shown] == [("acme", 1, 1), ("zeta", None, 1)]


async def test_a_web_process_killed_in_the_middle_leaves_no_more_than_the_limit(fleet: Fleet) -> None:
    acme = await new_key(fleet, "acme")
    await command(fleet, "tenants", "set", "acme", "--max-queued", "10")
    [one, other], _ = await fleet.start(webs=2, workers=0, environ=ENVIRON)

    async def create(url: str) -> int:
        try:
            body = {"assistant_id": "steps", "input": {}}
            return (await fleet.client.post(f"{url}/runs", headers=acme, json=body)).status_code
        except httpx.TransportError:
            return 0

    creating = [asyncio.create_task(create(url)) for url in (one.url, other.url) * 20]
    await asyncio.wait(creating, return_when=asyncio.FIRST_COMPLETED)
    one.kill()
    await asyncio.gather(*creating)
    while await create(other.url) == 200:
        pass
    assert await create(other.url) == 429
    [row] = await fleet.query(
        "SELECT count(*) AS runs, (SELECT count(*) FROM thread WHERE tenant_id = 'acme') AS threads "
        "FROM run WHERE tenant_id = 'acme'"
    )
    assert (row["runs"], row["threads"]) == (10, 10)


async def test_the_command_line_makes_lists_and_revokes(fleet: Fleet) -> None:
    made = json.loads(
        await command(fleet, "keys", "create", "--tenant", "acme", "--scopes", "read", "--expires", "1d", "--json")
    )
    assert made["key"].startswith("hf_")
    assert made["scopes"] == ["read"]
    listed = await command(fleet, "keys", "list", "--tenant", "acme")
    assert made["key"] not in listed
    assert made["prefix"] in listed
    assert "open" in listed
    await command(fleet, "keys", "revoke", made["prefix"])
    assert "revoked" in await command(fleet, "keys", "list")
    await command(fleet, "keys", "revoke", made["key_id"], "--forget")
    assert made["key_id"] not in await command(fleet, "keys", "list")


async def test_flood_at_the_highest_priority_does_not_delay_another_tenant(fleet: Fleet) -> None:
    """One slot, sixty urgent runs of one tenant, then three runs of another: these are started in every second turn."""
    acme, zeta = await new_key(fleet, "acme"), await new_key(fleet, "zeta")
    [web], _ = await fleet.start(webs=1, workers=0, environ=ENVIRON)
    flood = [{"assistant_id": "steps", "input": {"seconds": 0.01}, "priority": 100}] * 60
    assert (await fleet.client.post(f"{web.url}/runs/batch", headers=acme, json=flood)).status_code == 200
    late = [(await post(fleet, zeta, input={"seconds": 0.01}, priority=-100)).json()["run_id"] for _ in range(3)]
    await fleet.start_worker({**ENVIRON, "N_JOBS_PER_WORKER": "1"})

    async def all_ended() -> bool:
        [row] = await fleet.query("SELECT count(*) FROM run WHERE finished_at IS NULL")
        return bool(row["count"] == 0)

    await until(all_ended, "all runs have ended")
    started = await fleet.query("SELECT run_id FROM run ORDER BY started_at")
    places = [place for place, row in enumerate(started) if str(row["run_id"]) in late]
    assert places[-1] <= 6


async def test_weight_is_set_and_shown(fleet: Fleet) -> None:
    acme = await new_key(fleet, "acme")
    [web], _ = await fleet.start(webs=1, workers=0, environ=ENVIRON)
    assert "weight 2" in await command(fleet, "tenants", "set", "acme", "--weight", "2")
    assert "weight 2" in await command(fleet, "tenants", "set", "acme", "--max-queued", "5")
    [shown] = [json.loads(line) for line in (await command(fleet, "tenants", "list", "--json")).splitlines()]
    assert (shown["tenant_id"], shown["weight"], shown["max_queued"]) == ("acme", 2, 5)
    assert (await fleet.client.get(f"{web.url}/tenant", headers=acme)).json()["weight"] == 2
    assert "weight 1" in await command(fleet, "tenants", "set", "acme", "--weight", "default")

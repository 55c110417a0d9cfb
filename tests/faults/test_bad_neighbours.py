"""A locked table, hostile runs and nodes that hang for ever, next to an ordinary run: that one finishes as usual."""

from __future__ import annotations

import asyncio

import httpx

from tests.support.fleet import Fleet, Member, until
from tests.support.json_body import JSON
from tests.support.receiver import receiving
from tests.support.watching import WatchedRun

# How many runs a worker executes at once. It has 40 threads for plain nodes then, five times as many.
JOBS = 8


async def leads(member: Member) -> bool:
    return bool(member.logged("upkeep.leading"))


async def test_runs_are_taken_over_while_an_upkeep_table_is_locked(fleet: Fleet) -> None:
    # No statement is given up while the test runs: what waits for the lock waits to the end.
    environ = {"DATABASE_TIMEOUT": "300"}
    victim = await fleet.start_worker(environ)
    await until(lambda: leads(victim), "the worker leads")
    await fleet.start_web(environ)
    run = await fleet.post("steps", {"hold": "s3"})
    watcher, watching = fleet.watch(run)
    await fleet.held(run, "s3")
    heir = await fleet.start_worker(environ)

    # The next leader begins with all duties at once, and several of them need the table.
    async with fleet.locking_table("webhook_delivery"):
        victim.kill()
        await until(lambda: waits_for(fleet, "webhook_delivery"), "duties wait for the lock")
        assert await fleet.taken_over(run) is heir
    fleet.steps.open_gate(run.thread_id)
    await watching
    await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])


async def waits_for(fleet: Fleet, table: str) -> bool:
    """Whether somebody waits for the lock of a table."""
    return bool(await fleet.query("SELECT FROM pg_locks WHERE relation = %s::regclass AND NOT granted", (table,)))


async def test_hostile_runs_of_a_worker_that_is_killed_hurt_no_other(fleet: Fleet) -> None:
    environ = {"WEBHOOK_ALLOW_PRIVATE": "true"}
    web = await fleet.start_web(environ)
    await until(lambda: leads(web), "the web process leads")
    victim = await fleet.start_worker(environ)
    async with receiving() as receiver:
        refused = await post_lone_surrogate(fleet)
        assert refused.status_code == 422, refused.text
        nul = await fleet.post("steps", {"hold": "s3", "note": "a\0b"}, webhook=receiver.url)
        raising = await fleet.post("raising", {"hold": "s1"}, webhook=receiver.url)
        ordinary = await fleet.post("steps", {"hold": "s3"}, webhook=receiver.url)
        watcher, watching = fleet.watch(ordinary)
        for run, node in ((nul, "s3"), (raising, "s1"), (ordinary, "s3")):
            await fleet.held(run, node)
        heir = await fleet.start_worker(environ)
        victim.kill()

        # Runs of a dead worker are executed one after the other, until they have made progress.
        for run in (nul, raising):
            fleet.steps.open_gate(run.thread_id)
        assert await fleet.taken_over(ordinary) is heir
        fleet.steps.open_gate(ordinary.thread_id)
        await watching
        await fleet.prove_finished(ordinary, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])
        told = {run: await receiver.about(str(run.run_id)) for run in (nul, raising, ordinary)}
        assert [told[run].json["status"] for run in (nul, raising, ordinary)] == ["success", "error", "success"]
        rows = [await fleet.row(run) for run in (nul, raising)]
        assert [(row["status"], row["attempt"]) for row in rows] == [("success", 2), ("error", 2)]


async def post_lone_surrogate(fleet: Fleet) -> httpx.Response:
    """As an escape, which a client may write although no text can be that."""
    body = b'{"assistant_id": "steps", "input": {"note": "a\\ud800b"}}'
    return await fleet.client.post(f"{fleet.urls[0]}/runs", content=body, headers=JSON)


async def test_a_worker_whose_threads_all_hang_keeps_no_run_from_another(fleet: Fleet) -> None:
    await asyncio.gather(fleet.start_web(), fleet.start_worker({"N_JOBS_PER_WORKER": str(JOBS)}))
    for _ in range(5):
        hanging = [await fleet.post("hanging", {}) for _ in range(JOBS)]
        await asyncio.gather(*(cancel_when_it_hangs(fleet, run) for run in hanging))

    run = await fleet.post("blocking", {})
    watcher, watching = fleet.watch(run)
    able = await fleet.start_worker()

    async def ended() -> bool:
        return (await fleet.row(run))["finished_at"] is not None

    await until(ended, "the other worker executes the run")
    await watching
    await fleet.prove_finished(run, watcher, attempts=[1], nodes=["s1", "s2", "s3", "s4", "s5"])
    assert {mark.pid for mark in fleet.steps.marks(run.run_id)} == {able.pid}
    assert (await fleet.row(run))["crashes"] == 0


async def cancel_when_it_hangs(fleet: Fleet, run: WatchedRun) -> None:
    """The run ends, and its node goes on hanging."""

    async def hangs() -> bool:
        return fleet.steps.nodes(run.run_id) == ["hang_for_ever"]

    await until(hangs, "the node hangs")
    (await fleet.client.post(f"{fleet.urls[0]}{run.path}/cancel", params={"wait": "true"})).raise_for_status()
    assert (await fleet.row(run))["status"] == "interrupted"

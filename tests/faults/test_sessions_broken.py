"""Connections to the database that break, or fall silent, under a worker that is otherwise well."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from tests.support.fleet import Fleet, until
from tests.support.postgres_proxy import PostgresProxy

STRAIGHT = ["s1", "s2", "s3", "s4", "s5"]
# Long enough that nobody takes over what the worker itself must not forget.
UNDISTURBED = {"SESSION_GRACE_SECONDS": "60", "LEASE_DURATION_SECONDS": "120"}

TERMINATE = """
SELECT count(pg_terminate_backend(pid)) AS sessions FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'holdfast %'
"""


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[PostgresProxy]:
    async with PostgresProxy(database_url) as proxy:
        yield proxy


async def test_nothing_is_lost_when_every_session_is_terminated(fleet: Fleet) -> None:
    # A grace that also a worker on a busy machine comes back within.
    await fleet.start(workers=1, environ={"SESSION_GRACE_SECONDS": "30", "LEASE_DURATION_SECONDS": "60"})
    runs = [await fleet.post("steps", {"seconds": 0.1}, after_seconds=1) for _ in range(20)]
    watching = [fleet.watch(run) for run in runs]

    async def all_watched() -> bool:
        return all(watcher.listening for watcher, _ in watching)

    await until(all_watched, "every run is watched")
    for marks in (15, 45, 75):

        async def under_way(marks: int = marks) -> bool:
            (row,) = await fleet.query("SELECT count(*) AS steps FROM step_journal")
            return bool(row["steps"] >= marks)

        await until(under_way, f"{marks} steps have been started")
        (row,) = await fleet.query(TERMINATE)
        assert row["sessions"] >= 5
    await asyncio.gather(*(task for _, task in watching))

    for run, (watcher, _) in zip(runs, watching, strict=True):
        await fleet.prove_finished(run, watcher, attempts=None)
        assert (watcher.broken, watcher.ended_early) == (0, 0)
        assert (await fleet.row(run))["crashes"] == 0
    assert [row["status"] for row in await fleet.workers()] == ["online"], "the worker came back within the grace"


@pytest.mark.parametrize("silent", [False, True], ids=["cut", "silent"])
async def test_a_worker_that_is_cut_off_stops_its_runs_by_its_own_clock(
    fleet: Fleet, proxy: PostgresProxy, silent: bool
) -> None:
    _, alone = await asyncio.gather(fleet.start_web(), fleet.start_worker({"DATABASE_URL": proxy.url}))
    run = await fleet.post("steps", {"hold": "s3"})
    watcher, watching = fleet.watch(run)
    await fleet.held(run, "s3")
    other = await fleet.start_worker()

    if silent:
        proxy.fall_silent()
    else:
        proxy.cut()
    assert await fleet.taken_over(run) is other

    async def other_is_inside() -> bool:
        return fleet.steps.nodes(run.run_id) == ["s1", "s2", "s3", "s3"]

    await until(other_is_inside, "the other worker is in the same step")

    async def one_executes_it() -> bool:
        # A step that is held keeps a session of its own open, past the proxy.
        (row,) = await fleet.query(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'step'"
        )
        return bool(row["count"] == 1)

    await until(one_executes_it, "the worker that is cut off has stopped the run")

    async def said_so() -> bool:
        return bool(alone.logged("worker.lease_lost"))

    await until(said_so, "the worker says so")
    assert [entry["runs"] for entry in alone.logged("worker.lease_lost")] == [1]

    proxy.restore()

    async def back() -> bool:
        return [row["status"] for row in await fleet.workers() if row["pid"] == alone.pid] == ["lost", "online"]

    await until(back, "it is back under a new id")
    fleet.steps.open_gate(run.thread_id)
    await watching
    await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])
    assert (watcher.broken, watcher.ended_early) == (0, 0)


async def test_a_claim_whose_answer_was_lost_is_not_forgotten(fleet: Fleet, proxy: PostgresProxy) -> None:
    _, worker = await asyncio.gather(
        fleet.start_web(UNDISTURBED), fleet.start_worker({**UNDISTURBED, "DATABASE_URL": proxy.url})
    )
    thread_id = uuid4()
    held = proxy.hold_answers_from(str(thread_id))
    run = await fleet.post("steps", {}, thread_id=thread_id)
    watcher, watching = fleet.watch(run)
    await held.wait()
    assert await fleet.owner(run) is worker
    proxy.cut()
    proxy.restore()
    await watching

    await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=STRAIGHT)
    row = await fleet.row(run)
    assert (row["crashes"], row["retries"]) == (0, 0), "nothing was executed that could have failed"
    assert [row["status"] for row in await fleet.workers()] == ["online"]


async def test_a_claim_interrupted_by_a_drain_is_handed_back(fleet: Fleet, proxy: PostgresProxy) -> None:
    _, leaving = await asyncio.gather(
        fleet.start_web(UNDISTURBED), fleet.start_worker({**UNDISTURBED, "DATABASE_URL": proxy.url})
    )
    thread_id = uuid4()
    held = proxy.hold_answers_from(str(thread_id))
    run = await fleet.post("steps", {}, thread_id=thread_id)
    watcher, watching = fleet.watch(run)
    await held.wait()
    assert await fleet.owner(run) is leaving
    leaving.signal(signal.SIGTERM)
    proxy.cut()
    proxy.restore()
    assert await leaving.ended() == 0
    assert (await fleet.row(run))["status"] == "pending"
    await fleet.start_worker(UNDISTURBED)
    await watching

    await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=STRAIGHT)
    assert (await fleet.row(run))["crashes"] == 0, "a drain counts against nobody"


async def test_a_commit_whose_answer_was_lost_is_not_repeated(fleet: Fleet, proxy: PostgresProxy) -> None:
    await asyncio.gather(fleet.start_web(UNDISTURBED), fleet.start_worker({**UNDISTURBED, "DATABASE_URL": proxy.url}))
    run = await fleet.post("steps", {"hold": "s5"})
    watcher, watching = fleet.watch(run)
    await fleet.held(run, "s5")
    written = len(await fleet.events(run))
    # Every commit says so; nothing else that the worker does before the next heartbeat would.
    held = proxy.hold_answers_from("COMMIT")
    fleet.steps.open_gate(run.thread_id)

    async def committed() -> bool:
        return held.is_set() and len(await fleet.events(run)) > written

    await until(committed, "the journal has committed something it does not know of")
    proxy.cut()
    proxy.restore()
    await watching

    await fleet.prove_finished(run, watcher, attempts=[1], nodes=STRAIGHT)
    assert watcher.saw("updates") == [{name: {"done": [name]}} for name in STRAIGHT]
    assert [row["status"] for row in await fleet.workers()] == ["online"]

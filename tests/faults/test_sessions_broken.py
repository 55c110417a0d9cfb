"""Connections to the database that break, or fall silent, under a worker that is otherwise well."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from uuid import uuid4

import httpx
import pytest

from tests.support.fleet import Fleet, until
from tests.support.postgres_proxy import PostgresProxy
from tests.support.watching import WatchedRun

STRAIGHT = ["s1", "s2", "s3", "s4", "s5"]
# Long enough that nobody takes over what the worker itself must not forget.
UNDISTURBED = {"SESSION_GRACE_SECONDS": "60", "LEASE_DURATION_SECONDS": "120"}

# Web, worker and upkeep together have more than these. A fleet that has only just lost its sessions has fewer.
SESSIONS = 5
CONNECTED = """
SELECT count(*) AS sessions FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'holdfast %'
"""
TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
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

    async def connected() -> bool:
        (row,) = await fleet.query(CONNECTED)
        return bool(row["sessions"] >= SESSIONS)

    await until(all_watched, "every run is watched")
    for marks in (15, 45, 75):

        async def under_way(marks: int = marks) -> bool:
            (row,) = await fleet.query("SELECT count(*) AS steps FROM step_journal")
            return bool(row["steps"] >= marks)

        await until(under_way, f"{marks} steps have been started")
        await until(connected, "the fleet has connected again")
        await fleet.query(TERMINATE)
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


async def test_a_fleet_works_again_after_a_fail_over_from_a_server_that_hangs(
    fleet: Fleet, proxy: PostgresProxy
) -> None:
    """All connections lead to a server that never answers again, and nobody closes them."""
    # With so long a lease, a commit alone would wait for minutes.
    through = {**UNDISTURBED, "DATABASE_URL": proxy.url, "DATABASE_TIMEOUT": "3"}
    _, [worker] = await fleet.start(workers=1, environ=through)
    run = await fleet.post("steps", {"hold": "s3"})
    await fleet.held(run, "s3")

    proxy.strand()

    async def back() -> bool:
        rows = [row["status"] for row in await fleet.workers() if row["pid"] == worker.pid]
        return rows[-1] == "online" and worker.logged("heartbeat.recovered") != []

    await until(back, "the worker's lease is renewed again")
    fleet.steps.open_gate(run.thread_id)

    async def accepted() -> WatchedRun | None:
        with suppress(httpx.HTTPStatusError):
            return await fleet.post("steps", {"seconds": 0.01})
        return None

    another = await until(accepted, "a run is accepted")
    assert another is not None

    async def ended() -> bool:
        rows = [await fleet.row(one) for one in (run, another)]
        return [row["status"] for row in rows] == ["success", "success"]

    await until(ended, "both runs end")
    assert worker.process.poll() is None


async def test_a_web_process_gives_up_what_a_server_that_hangs_will_never_answer(
    fleet: Fleet, proxy: PostgresProxy
) -> None:
    """A request waits on a connection to the old server. Its statement may take three times DATABASE_TIMEOUT, but the
    process learns from its upkeep's session that the server is silent, and from the new server which connections lead
    nowhere."""
    alone = {"SIGNAL_PING_SECONDS": "300"}  # The pings would notice as well, later.
    web = await fleet.start_web({"DATABASE_URL": proxy.url, "DATABASE_TIMEOUT": "4", **alone})
    mark = str(uuid4())
    created = await fleet.client.post(f"{fleet.urls[0]}/threads", json={"metadata": {"mark": mark}})
    path = f"/threads/{created.json()['thread_id']}"
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=60) as client:
        held = proxy.hold_answers_from(mark)
        asking = asyncio.create_task(client.get(path))
        await held.wait()
        proxy.strand()
        proxy.refuse()
        await until(lambda: _true(proxy.refused > 0), "the process tries to connect")
        assert not asking.done()
        proxy.restore()
        assert (await asking).status_code == 503
        await until(lambda: _true(web.logged("database.hung_up") != []), "the process says so")

        async def works() -> bool:
            return (await client.get(path)).status_code == 200

        await until(works, "requests are answered again")


@pytest.mark.expects_errors("log.message")
async def test_a_request_under_way_when_a_web_process_stops_is_answered_503(fleet: Fleet, proxy: PostgresProxy) -> None:
    """The database does not answer, so that the request outlasts the time that a stop has."""
    web = await fleet.start_web({"DATABASE_URL": proxy.url})
    mark = str(uuid4())
    created = await fleet.client.post(f"{fleet.urls[0]}/threads", json={"metadata": {"mark": mark}})
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=60) as client:
        held = proxy.hold_answers_from(mark)
        asking = asyncio.create_task(client.get(f"/threads/{created.json()['thread_id']}"))
        await held.wait()
        web.signal(signal.SIGTERM)
        answer = await asking
    assert answer.status_code == 503
    assert "stopping" in answer.json()["detail"]
    assert answer.headers["retry-after"] == "1"


async def _true(value: bool) -> bool:
    return value


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

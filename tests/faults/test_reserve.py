"""More workers than cores: the reserve takes what the ordinary worker cannot, full, stopped or dead."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from tests.support.fleet import Fleet, Member, until
from tests.support.watching import WatchedRun

PATIENT = {
    # Nothing is found by polling, as long as nobody waits for that (see below).
    "POSTGRES_POLL_INTERVAL_SECONDS": "60",
    # A worker that is stopped is not given up while the test looks on.
    "LEASE_DURATION_SECONDS": "120",
    "N_JOBS_PER_WORKER": "1",
}
BEFORE_A_POLL = 30.0
STEPS = ["s1", "s2", "s3", "s4", "s5"]


async def start_on_one_core(fleet: Fleet) -> tuple[Member, Member]:
    """The ordinary worker and its reserve. Children may run where the thread that starts them may."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        _, workers = await fleet.start(webs=0, workers=2, environ=PATIENT)
    finally:
        os.sched_setaffinity(0, allowed)
    await fleet.start_web()
    registered = {row["worker_id"]: row for row in await fleet.workers()}
    assert [row["cores"] for row in registered.values()] == [1, 1]

    async def have_met() -> bool:
        return all(row["lease_until"] > registered[row["worker_id"]]["lease_until"] for row in await fleet.workers())

    await until(have_met, "they have heard of each other")
    by_pid: dict[int, UUID] = {row["pid"]: worker_id for worker_id, row in registered.items()}
    ordinary, reserve = sorted(workers, key=lambda member: by_pid[member.pid].bytes)
    return ordinary, reserve


async def taken(fleet: Fleet, run: WatchedRun) -> Member:
    """Who has the run, before anybody comes across it by polling."""

    async def somebody() -> bool:
        return (await fleet.row(run))["worker_id"] is not None

    await until(somebody, "somebody takes it", BEFORE_A_POLL)
    return await fleet.owner(run)


async def test_the_reserve_takes_what_the_ordinary_worker_leaves_standing(fleet: Fleet) -> None:
    ordinary, reserve = await start_on_one_core(fleet)

    # The ordinary one is full. Its reserve cannot be quicker, however slow the machine is.
    reserve.signal(signal.SIGSTOP)
    first = await fleet.post("steps", {"hold": "s3"})
    first_watcher, first_watching = fleet.watch(first)
    await fleet.held(first, "s3")
    reserve.signal(signal.SIGCONT)
    assert await fleet.owner(first) is ordinary
    second = await fleet.post("steps", {"hold": "s3"})
    second_watcher, second_watching = fleet.watch(second)
    assert await taken(fleet, second) is reserve
    await fleet.held(second, "s3")
    assert (await fleet.row(first))["status"] == "running", "both at the same time"
    fleet.steps.open_gate(second.thread_id)
    await second_watching
    await fleet.prove_finished(second, second_watcher, attempts=[1], nodes=STEPS)

    # It stands still, and nobody can know.
    ordinary.signal(signal.SIGSTOP)
    third = await fleet.post("steps", {"hold": "s3"})
    third_watcher, third_watching = fleet.watch(third)
    assert await taken(fleet, third) is reserve
    fleet.steps.open_gate(third.thread_id)
    await third_watching
    await fleet.prove_finished(third, third_watcher, attempts=[1], nodes=STEPS)
    assert {mark.pid for mark in fleet.steps.marks(third.run_id)} == {reserve.pid}
    assert {row["status"] for row in await fleet.workers()} == {"online"}

    # It dies, and its run goes on.
    ordinary.kill()
    assert await fleet.taken_over(first) is reserve
    fleet.steps.open_gate(first.thread_id)
    await first_watching
    await fleet.prove_finished(first, first_watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])


ASLEEP = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name ~ '^holdfast signals' AND query = 'UNLISTEN *'
"""
# As polite as can be, and yet there is no time left on any core.
BUSY = "import os; os.nice(19)\nwhile True: pass"


@contextmanager
def a_busy_host() -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


async def test_a_reserve_that_does_not_listen_takes_what_is_left_standing(fleet: Fleet) -> None:
    ordinary, reserve = await start_on_one_core(fleet)
    enough = asyncio.Event()

    async def keep_busy() -> None:
        while not enough.is_set():
            run = await fleet.post("steps", {})
            watcher, watching = fleet.watch(run)
            await watching
            await fleet.prove_finished(run, watcher, attempts=[1], nodes=STEPS)

    with a_busy_host():
        others = asyncio.create_task(keep_busy())
        await until(lambda: fleet.query(ASLEEP), "the reserve listens no more")
        ordinary.signal(signal.SIGSTOP)
        run = await fleet.post("steps", {"hold": "s3"})
        watcher, watching = fleet.watch(run)
        assert await taken(fleet, run) is reserve
    fleet.steps.open_gate(run.thread_id)
    await watching
    await fleet.prove_finished(run, watcher, attempts=[1], nodes=STEPS)
    enough.set()
    ordinary.signal(signal.SIGCONT)
    await others

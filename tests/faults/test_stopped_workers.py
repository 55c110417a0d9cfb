"""Workers that stand still keep no run from those that work, and nobody can know that they do."""

from __future__ import annotations

import signal

from tests.support.fleet import Fleet, until
from tests.support.watching import WatchedRun

PATIENT = {
    # Longer than the test waits for a claim: a run that no hint leads to is found too late.
    "POSTGRES_POLL_INTERVAL_SECONDS": "60",
    # Workers that are stopped are not given up while the test looks on.
    "LEASE_DURATION_SECONDS": "120",
}
BEFORE_A_POLL_SECONDS = 30.0
STEPS = ["s1", "s2", "s3", "s4", "s5"]
RUNS = 8


async def test_worker_claims_runs_for_which_stopped_workers_come_first(fleet: Fleet) -> None:
    """Two look for a run at once. Of eight runs these are the two that stand still for two or three."""
    _, workers = await fleet.start(webs=0, workers=3, environ=PATIENT)
    await fleet.start_web()
    registered = {row["worker_id"]: row["lease_until"] for row in await fleet.workers()}

    async def have_met() -> bool:
        return all(row["lease_until"] > registered[row["worker_id"]] for row in await fleet.workers())

    await until(have_met, "they know each other")
    works, *stopped = workers
    for worker in stopped:
        worker.signal(signal.SIGSTOP)
    for _ in range(RUNS):
        run = await fleet.post("steps", {})
        watcher, watching = fleet.watch(run)

        async def claimed(run: WatchedRun = run) -> bool:
            return (await fleet.row(run))["worker_id"] is not None

        await until(claimed, "a worker claims it", BEFORE_A_POLL_SECONDS)
        await watching
        await fleet.prove_finished(run, watcher, attempts=[1], nodes=STEPS)
        assert {mark.pid for mark in fleet.steps.marks(run.run_id)} == {works.pid}
    assert {row["status"] for row in await fleet.workers()} == {"online"}

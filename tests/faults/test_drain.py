"""SIGTERM during long runs: what can finish finishes, what cannot is handed back, and watchers see a pause."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.support.fleet import Fleet, Member, until
from tests.support.watching import WatchedRun

INTERRUPTED = ["s1", "s2", "s3", "s3", "s4", "s5"]
STRAIGHT = ["s1", "s2", "s3", "s4", "s5"]


async def shown_as(fleet: Fleet, member: Member, status: str) -> None:
    async def shown() -> bool:
        return any(row["pid"] == member.pid and row["status"] == status for row in await fleet.workers())

    await until(shown, f"{member.name} is {status}")


async def hold_runs(fleet: Fleet, count: int, graph: str = "steps") -> list[WatchedRun]:
    """Runs that are all in the middle of their third step."""
    runs = [await fleet.post(graph, {"hold": "s3"}) for _ in range(count)]
    for run in runs:
        await fleet.held(run, "s3")
    return runs


@pytest.mark.parametrize("graph", ["steps", "blocking", "stubborn"])
async def test_runs_are_handed_back_at_the_end_of_the_grace(fleet: Fleet, graph: str) -> None:
    """Also those whose step blocks a thread that nobody can stop, or swallows each cancel: the process does not wait
    for it."""
    _, (leaving,) = await fleet.start(workers=1, environ={"WORKER_DRAIN_TIMEOUT": "0.5"})
    runs = await hold_runs(fleet, 4, graph)
    watching = [fleet.watch(run) for run in runs]
    staying = await fleet.start_worker()

    leaving.signal(signal.SIGTERM)
    assert await leaving.ended() == 0
    await shown_as(fleet, leaving, "offline")
    for run in runs:
        assert await fleet.taken_over(run) is staying
        fleet.steps.open_gate(run.thread_id)
    await asyncio.gather(*(task for _, task in watching))

    for run, (watcher, _) in zip(runs, watching, strict=True):
        await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=INTERRUPTED)
        row = await fleet.row(run)
        assert (row["crashes"], row["retries"]) == (0, 0), "a drain counts against nobody"
        assert (watcher.broken, watcher.ended_early) == (0, 0)


async def test_runs_finish_within_the_grace(fleet: Fleet) -> None:
    _, (leaving,) = await fleet.start(workers=1, environ={"WORKER_DRAIN_TIMEOUT": "60"})
    runs = await hold_runs(fleet, 4)
    watching = [fleet.watch(run) for run in runs]
    staying = await fleet.start_worker()

    leaving.signal(signal.SIGTERM)
    await shown_as(fleet, leaving, "draining")
    # It takes no new ones.
    later = await fleet.post("steps", {})
    watcher, task = fleet.watch(later)
    await task
    await fleet.prove_finished(later, watcher, attempts=[1], nodes=STRAIGHT)
    assert {mark.pid for mark in fleet.steps.marks(later.run_id)} == {staying.pid}

    for run in runs:
        fleet.steps.open_gate(run.thread_id)
    assert await leaving.ended() == 0
    await shown_as(fleet, leaving, "offline")
    await asyncio.gather(*(task for _, task in watching))
    for run, (watcher, _) in zip(runs, watching, strict=True):
        await fleet.prove_finished(run, watcher, attempts=[1], nodes=STRAIGHT)
        assert {mark.pid for mark in fleet.steps.marks(run.run_id)} == {leaving.pid}


async def test_second_signal_ends_the_worker_at_once(fleet: Fleet) -> None:
    _, (leaving,) = await fleet.start(workers=1, environ={"WORKER_DRAIN_TIMEOUT": "600"})
    (run,) = await hold_runs(fleet, 1)
    watcher, watching = fleet.watch(run)
    staying = await fleet.start_worker()

    leaving.signal(signal.SIGTERM)
    await shown_as(fleet, leaving, "draining")
    leaving.signal(signal.SIGTERM)
    assert await leaving.ended() == 130
    assert await fleet.taken_over(run) is staying
    fleet.steps.open_gate(run.thread_id)
    await watching
    await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=INTERRUPTED)
    assert (await fleet.row(run))["crashes"] == 0, "a drain counts against no run, however it ends"

"""kill -9 of a worker in the middle of a run: another worker goes on from the last checkpoint."""

from __future__ import annotations

import pytest

from tests.support.fleet import Fleet


@pytest.mark.parametrize("graph", ["steps", "blocking"])
async def test_another_worker_takes_over(fleet: Fleet, graph: str) -> None:
    await fleet.start()
    run = await fleet.post(graph, {"hold": "s3"})
    watcher, watching = fleet.watch(run)
    await fleet.held(run, "s3")

    victim = await fleet.owner(run)
    victim.kill()
    heir = await fleet.taken_over(run)
    assert heir is not victim
    fleet.steps.open_gate(run.thread_id)
    await watching

    await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])
    assert [mark.pid for mark in fleet.steps.marks(run.run_id)] == [victim.pid] * 3 + [heir.pid] * 3
    assert (watcher.broken, watcher.ended_early) == (0, 0), "the watcher noticed more than a pause"
    assert (await fleet.row(run))["crashes"] == 1

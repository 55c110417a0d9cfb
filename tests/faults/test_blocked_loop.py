"""Graph code that blocks the event loop of its worker: the worker leaves, and only the run that blocks is blamed."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.support.fleet import Fleet, Member, until
from tests.support.watching import WatchedRun


async def blocked_worker(fleet: Fleet, **environ: str) -> tuple[Member, WatchedRun, WatchedRun]:
    """A worker that one of its runs blocks, that run, and another one that it holds."""
    _, worker = await asyncio.gather(fleet.start_web(), fleet.start_worker(environ))
    bystander = await fleet.post("steps", {"hold": "s3"})
    await fleet.held(bystander, "s3")
    stuck = await fleet.post("stuck", {})

    async def blocked() -> bool:
        return bool(worker.logged("loop.blocked"))

    await until(blocked, "the event loop is blocked")
    return worker, stuck, bystander


@pytest.mark.expects_errors("worker.left_blocked")
async def test_a_worker_whose_loop_is_blocked_for_too_long_hands_its_runs_over(fleet: Fleet) -> None:
    worker, stuck, bystander = await blocked_worker(fleet, BLOCKED_LOOP_LIMIT_SECONDS="3")

    assert await worker.ended() == 75
    [left] = worker.logged("worker.left_blocked")
    assert (left["run_id"], left["function"]) == (str(stuck.run_id), "block_loop")
    assert "time.sleep" in left["source"]

    for run in (stuck, bystander):
        fleet.steps.open_gate(run.thread_id)
    await fleet.start_worker()

    async def ended() -> bool:
        return [(await fleet.row(run))["status"] for run in (stuck, bystander)] == ["success", "success"]

    await until(ended, "another worker goes on with both runs")
    assert [(await fleet.row(run))["crashes"] for run in (stuck, bystander)] == [1, 0]


@pytest.mark.expects_errors("worker.left_blocked")
async def test_a_worker_whose_loop_is_blocked_still_stops(fleet: Fleet) -> None:
    worker, stuck, bystander = await blocked_worker(fleet)
    worker.signal(signal.SIGTERM)

    assert await worker.ended() == 0
    for run in (stuck, bystander):
        fleet.steps.open_gate(run.thread_id)
    await fleet.start_worker()

    async def ended() -> bool:
        return [(await fleet.row(run))["status"] for run in (stuck, bystander)] == ["success", "success"]

    await until(ended, "another worker goes on with both runs")
    assert [(await fleet.row(run))["crashes"] for run in (stuck, bystander)] == [0, 0], "a deploy is nobody's crash"

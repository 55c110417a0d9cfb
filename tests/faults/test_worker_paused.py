"""SIGSTOP past the lease, then SIGCONT: the worker that wakes up owns nothing any more, and does not know it yet."""

from __future__ import annotations

import signal
from typing import Any

from tests.support.fleet import Fleet, Member, until
from tests.support.watching import WatchedRun


async def everything_written(fleet: Fleet, run: WatchedRun) -> dict[str, list[dict[str, Any]]]:
    """Every row that belongs to the run or its thread."""
    thread = {"uuid": run.thread_id}
    return {
        "run": await fleet.query("SELECT * FROM run WHERE thread_id = %(uuid)s", thread),
        "thread": await fleet.query("SELECT * FROM thread WHERE thread_id = %(uuid)s", thread),
        "event": await fleet.query("SELECT * FROM event WHERE thread_id = %(uuid)s ORDER BY seq", thread),
        "checkpoints": await fleet.query(
            "SELECT * FROM checkpoints WHERE thread_id = %(uuid)s::uuid::text ORDER BY checkpoint_id", thread
        ),
        "checkpoint_writes": await fleet.query(
            "SELECT * FROM checkpoint_writes WHERE thread_id = %(uuid)s::uuid::text "
            "ORDER BY checkpoint_id, task_id, idx",
            thread,
        ),
        "checkpoint_blobs": await fleet.query(
            "SELECT * FROM checkpoint_blobs WHERE thread_id = %(uuid)s::uuid::text ORDER BY channel, version", thread
        ),
    }


async def back_under_a_new_id(fleet: Fleet, member: Member) -> None:
    async def statuses() -> bool:
        mine = [row["status"] for row in await fleet.workers() if row["pid"] == member.pid]
        return mine == ["lost", "online"]

    await until(statuses, "the worker is back as somebody new")


async def test_a_zombie_writes_nothing(fleet: Fleet) -> None:
    """It wakes with a step to finish and a checkpoint to write, after its run has ended elsewhere."""
    await fleet.start()
    run = await fleet.post("steps", {"hold": "s3"})
    watcher, watching = fleet.watch(run)
    await fleet.held(run, "s3")
    zombie = await fleet.owner(run)
    zombie.signal(signal.SIGSTOP)
    heir = await fleet.taken_over(run)
    fleet.steps.open_gate(run.thread_id)
    await watching
    await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])

    before = await everything_written(fleet, run)
    zombie.signal(signal.SIGCONT)
    await back_under_a_new_id(fleet, zombie)

    (lost,) = zombie.logged("worker.lease_lost")
    assert lost["runs"] == 1, "the zombie was not holding the run when it woke"
    # As somebody new it is as good as any: the only one left, it executes the next run.
    heir.kill()
    following = await fleet.post("steps", {})
    watcher, watching = fleet.watch(following)
    await watching
    await fleet.prove_finished(following, watcher, attempts=[1], nodes=["s1", "s2", "s3", "s4", "s5"])
    assert {mark.pid for mark in fleet.steps.marks(following.run_id)} == {zombie.pid}
    assert await everything_written(fleet, run) == before


async def test_a_zombie_leaves_the_running_run_to_its_heir(fleet: Fleet) -> None:
    """It wakes while the heir is in the middle of the same step. And it is the leader of upkeep, whose session and lock
    outlive its silence until the server ends them: somebody else has to notice that it is lost."""
    zombie = await fleet.start_worker()

    async def leads() -> bool:
        return bool(zombie.logged("upkeep.leading"))

    await until(leads, "the worker leads")
    await fleet.start_web()
    run = await fleet.post("steps", {"hold": "s3"})
    watcher, watching = fleet.watch(run)
    await fleet.held(run, "s3")
    heir = await fleet.start_worker()

    zombie.signal(signal.SIGSTOP)
    assert await fleet.taken_over(run) is heir
    zombie.signal(signal.SIGCONT)
    await back_under_a_new_id(fleet, zombie)

    async def inside_twice() -> bool:
        return fleet.steps.nodes(run.run_id) == ["s1", "s2", "s3", "s3"]

    await until(inside_twice, "the heir is in the same step")
    fleet.steps.open_gate(run.thread_id)
    await watching

    await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])
    assert (watcher.broken, watcher.ended_early) == (0, 0)
    assert [mark.pid for mark in fleet.steps.marks(run.run_id)] == [zombie.pid] * 3 + [heir.pid] * 3

"""A run that takes its worker down every time ends with the dead letters, and the thread goes on."""

from __future__ import annotations

import pytest

from tests.support.fleet import Fleet, until


async def test_a_poison_run_is_put_aside(fleet: Fleet) -> None:
    _, workers = await fleet.start(workers=4)
    poison = await fleet.post("poison", {})
    watcher, watching = fleet.watch(poison)
    following = await fleet.post("steps", {}, thread_id=poison.thread_id)
    follower, follows = fleet.watch(following)
    await watching
    await follows

    row = await fleet.row(poison)
    assert (row["status"], row["dead_letter"], row["crashes"], row["attempt"]) == ("error", "poison", 3, 3)
    assert sorted(worker.process.poll() or 0 for worker in workers) == [-9, -9, -9, 0]
    assert fleet.steps.nodes(poison.run_id) == ["kill_worker"] * 3
    assert [data["attempt"] for data in watcher.saw("metadata")] == [1, 2, 3]
    (error,) = watcher.saw("error")
    assert error["error"] == "PoisonRun"
    assert watcher.frames[-1].event == "error"

    told = (await fleet.client.get(f"{fleet.urls[0]}/runs/{poison.run_id}/timeline")).json()
    outer = [span for span in told["spans"] if span["kind"] in ("queued", "attempt", "takeover")]
    assert [span["kind"] for span in outer] == ["queued", *["attempt", "takeover"] * 3]
    assert outer[-1]["ended_at"] == told["finished_at"], "the time after the last worker had died is not work"
    assert sum(span["seconds"] for span in outer) == pytest.approx(told["seconds"], abs=0.001)

    assert (await fleet.row(following))["status"] == "success"
    assert follower.saw("values")[-1]["done"] == ["s1", "s2", "s3", "s4", "s5"]
    assert fleet.steps.nodes(following.run_id) == ["s1", "s2", "s3", "s4", "s5"]
    events = await fleet.events(poison)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert await fleet.replay(poison) == watcher.frames
    assert await fleet.replay(following) == follower.frames


async def test_only_the_run_that_kills_its_workers_is_poison(fleet: Fleet) -> None:
    """It takes five others down with it. They are retried apart from it and from each other, and succeed."""
    _, [first] = await fleet.start(workers=1)
    innocent = [await fleet.post("steps", {"hold": "s1"}) for _ in range(5)]
    for run in innocent:
        await fleet.held(run, "s1")
    poison = await fleet.post("poison", {"hold": "kill_worker"})
    assert await fleet.owner(poison) is first
    await fleet.start(webs=0, workers=3)
    fleet.steps.open_gate(poison.thread_id)
    await first.ended()
    for run in innocent:
        fleet.steps.open_gate(run.thread_id)

    async def over() -> bool:
        return all([(await fleet.row(run))["finished_at"] is not None for run in [*innocent, poison]])

    await until(over, "all runs have ended")
    row = await fleet.row(poison)
    assert (row["status"], row["dead_letter"], row["crashes"]) == ("error", "poison", 3)
    assert [(await fleet.row(run))["status"] for run in innocent] == ["success"] * 5

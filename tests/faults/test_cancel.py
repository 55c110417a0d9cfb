"""Cancelling at one web process what was started at another, while a worker is in the middle of a step."""

from __future__ import annotations

import pytest

from tests.support.fleet import Fleet

LEFT_BEHIND = """
SELECT (SELECT count(*) FROM run WHERE thread_id = %(id)s) AS run,
       (SELECT count(*) FROM checkpoints WHERE thread_id = %(id)s::uuid::text) AS checkpoints,
       (SELECT count(*) FROM checkpoint_writes WHERE thread_id = %(id)s::uuid::text) AS writes,
       (SELECT count(*) FROM checkpoint_blobs WHERE thread_id = %(id)s::uuid::text) AS blobs
"""


@pytest.mark.parametrize("graph", ["steps", "blocking"])
async def test_interrupt_stops_the_graph_where_it_stands(fleet: Fleet, graph: str) -> None:
    (_, other), _ = await fleet.start(webs=2, workers=1)
    run = await fleet.post(graph, {"hold": "s3"})
    watcher, watching = fleet.watch(run)
    await fleet.held(run, "s3")

    answer = await fleet.client.post(f"{other.url}{run.path}/cancel", params={"wait": "true"})
    answer.raise_for_status()
    await watching

    row = await fleet.row(run)
    assert (row["status"], row["error"]["error"]) == ("interrupted", "UserInterrupt")
    (thread,) = await fleet.query("SELECT status, error FROM thread WHERE thread_id = %s", (run.thread_id,))
    assert (thread["status"], thread["error"]["error"]) == ("interrupted", "UserInterrupt")
    assert fleet.steps.nodes(run.run_id) == ["s1", "s2", "s3"], "the gate was never opened"
    assert watcher.saw("values")[-1]["done"] == ["s1", "s2"]
    await fleet.prove(run, watcher, attempts=[1])

    # The thread goes on from what was durable.
    fleet.steps.open_gate(run.thread_id)
    following = await fleet.post(graph, {"hold": ""}, thread_id=run.thread_id)
    _, follows = fleet.watch(following)
    await follows
    assert (await fleet.row(following))["status"] == "success"


async def test_rollback_leaves_nothing(fleet: Fleet) -> None:
    (_, other), _ = await fleet.start(webs=2, workers=1)
    run = await fleet.post("steps", {"hold": "s3"})
    watcher, watching = fleet.watch(run)
    await fleet.held(run, "s3")

    answer = await fleet.client.post(f"{other.url}{run.path}/cancel", params={"action": "rollback", "wait": "true"})
    answer.raise_for_status()
    await watching

    (left,) = await fleet.query(LEFT_BEHIND, {"id": run.thread_id})
    assert left == {"run": 0, "checkpoints": 0, "writes": 0, "blobs": 0}
    (thread,) = await fleet.query("SELECT status, error FROM thread WHERE thread_id = %s", (run.thread_id,))
    assert thread == {"status": "idle", "error": None}
    assert (await fleet.client.get(f"{other.url}{run.path}")).status_code == 404
    assert not watcher.saw("error")

    following = await fleet.post("steps", {}, thread_id=run.thread_id)
    follower, follows = fleet.watch(following)
    await follows
    assert follower.saw("values")[-1]["done"] == ["s1", "s2", "s3", "s4", "s5"], "something of the old run was left"
    assert follower.frames[0].id > watcher.frames[-1].id, "numbers are never used twice"

"""kill -9 of the worker of a family: there is one child for each key, and the parent gets what they came to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, until
from tests.support.watching import WatchedRun

DONE = {"done": ["one:5", "two:5", "three:5"]}


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(database_url, tmp_path) as fleet:
        fleet.steps.create()
        yield fleet


async def prove(fleet: Fleet, run: WatchedRun) -> None:
    row = await fleet.row(run)
    assert (row["status"], row["error"], row["children"]) == ("success", None, 3)
    children = await fleet.query("SELECT * FROM child WHERE parent_run_id = %s", (run.run_id,))
    below = await fleet.query("SELECT * FROM run WHERE parent_run_id = %s", (run.run_id,))
    assert {child["run_id"] for child in children} == {one["run_id"] for one in below}
    assert sorted(child["key"] for child in children) == ["one", "three", "two"]
    assert {one["status"] for one in below} == {"success"}
    for child in children:
        assert not [mark for mark in fleet.steps.marks(child["run_id"]) if mark.repeated_what_was_durable]
    assert len(await fleet.query("SELECT 1 FROM thread")) == 4
    assert await fleet.query("SELECT 1 FROM abandoned") == []


async def test_between_the_spawns_and_the_wait(fleet: Fleet) -> None:
    await fleet.start()
    run = await fleet.post("family", {"hold": "spawned"})
    watcher, watching = fleet.watch(run)

    async def spawned() -> bool:
        return "spawned" in fleet.steps.nodes(run.run_id)

    await until(spawned, "the children are spawned")
    victim = await fleet.owner(run)
    victim.kill()
    await fleet.taken_over(run)
    fleet.steps.open_gate(run.thread_id)
    await watching
    await prove(fleet, run)
    assert {key: watcher.saw("values")[-1][key] for key in DONE} == DONE
    nodes = fleet.steps.nodes(run.run_id)
    assert (nodes[:4], nodes.count("spawned")) == (["spread", "spawned"] * 2, nodes.count("spread"))
    assert (await fleet.row(run))["crashes"] == 1


async def test_while_the_parent_waits(fleet: Fleet) -> None:
    [_], [worker] = await fleet.start(workers=1)
    run = await fleet.post("family", {"below": {"hold": "s2"}})
    watcher, watching = fleet.watch(run)

    async def waits() -> bool:
        row = await fleet.row(run)
        return bool(row["status"] == "pending" and row["children"] == 3)

    await until(waits, "the parent waits")

    async def all_held() -> bool:
        rows = await fleet.query(
            "SELECT count(DISTINCT step_journal.run_id) AS held FROM public.step_journal JOIN run USING (run_id) "
            "WHERE run.parent_run_id = %s AND node = 's2'",
            (run.run_id,),
        )
        return bool(rows[0]["held"] == 3)

    await until(all_held, "the children are in their second step")
    # Nobody is left who knew of any of them.
    worker.kill()
    await fleet.start_worker()
    for row in await fleet.query("SELECT thread_id FROM run WHERE parent_run_id = %s", (run.run_id,)):
        fleet.steps.open_gate(row["thread_id"])
    await watching
    await prove(fleet, run)
    assert {key: watcher.saw("values")[-1][key] for key in DONE} == DONE
    # The parent's worker had nothing of it to lose.
    assert fleet.steps.nodes(run.run_id) == ["spread", "spread"]
    assert (await fleet.row(run))["crashes"] == 0

"""A worker whose network loses every packet, without an error on either side, for longer than its lease."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.db.migrate import migrate
from holdfast.settings import load_settings
from tests.faults.test_worker_paused import back_under_a_new_id
from tests.support.fleet import Fleet, until
from tests.support.network import network
from tests.support.servers import network_postgres

# Its tests start processes.
pytestmark = pytest.mark.servers


async def test_worker_behind_a_silent_network_gives_up_its_runs_and_comes_back(data_dir: Path, tmp_path: Path) -> None:
    """Another worker takes its run over; the worker notices by itself that its lease is over, drops the run while it
    is still cut off, and works under a new id as soon as packets arrive again."""
    with network() as net, network_postgres(data_dir, net.near) as url:
        migrate(load_settings({}, database_url=url))
        async with Fleet(url, tmp_path, roles=True) as fleet:
            fleet.steps.create()
            far = await fleet.start_worker(prefix=net.prefix)
            await fleet.start_web()
            run = await fleet.post("steps", {"hold": "s3"})
            watcher, watching = fleet.watch(run)
            await fleet.held(run, "s3")
            near = await fleet.start_worker()

            net.drop()
            assert await fleet.taken_over(run) is near

            async def given_up() -> bool:
                return bool(far.logged("worker.lease_lost"))

            await until(given_up, "the worker that is cut off gives up its runs")
            fleet.steps.open_gate(run.thread_id)
            await watching
            await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])
            assert (watcher.broken, watcher.ended_early) == (0, 0)

            net.heal()
            await back_under_a_new_id(fleet, far)
            assert [line["runs"] for line in far.logged("worker.lease_lost")] == [1]
            near.kill()
            following = await fleet.post("steps", {})
            watcher, watching = fleet.watch(following)
            await watching
            await fleet.prove_finished(following, watcher, attempts=[1], nodes=["s1", "s2", "s3", "s4", "s5"])
            assert {mark.pid for mark in fleet.steps.marks(following.run_id)} == {far.pid}

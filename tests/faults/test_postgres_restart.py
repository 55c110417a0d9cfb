"""The database goes away under load and comes back: everything waits, nothing is lost, nothing is said twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.db.embedded import EmbeddedPostgres
from holdfast.db.migrate import migrate
from holdfast.settings import load_settings
from tests.support.fleet import Fleet, until

# Its tests start processes.
pytestmark = pytest.mark.servers

RUNS = 36


class PrivateServer:
    """A Postgres of the test's own. Its guard starts it again when it ends."""

    def __init__(self, directory: Path, url: str, guard: int) -> None:
        self.directory = directory
        self.url = url
        self.guard = guard

    def postmaster(self) -> int:
        """Its process id, or 0 while there is none."""
        try:
            return int((self.directory / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return 0

    def signal_all(self, number: signal.Signals) -> None:
        """The postmaster and all processes it has started."""
        postmaster = self.postmaster()
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for pid in (postmaster, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def restart(self, number: signal.Signals) -> None:
        before = self.postmaster()
        os.kill(before, number)

        async def another() -> bool:
            return self.postmaster() not in (0, before)

        await until(another, "Postgres runs again")


@pytest.fixture
def private_server(data_dir: Path) -> Iterator[PrivateServer]:
    with EmbeddedPostgres(data_dir) as postgres:
        url = postgres.start()
        migrate(load_settings({}, database_url=url))
        yield PrivateServer(data_dir, url, postgres.guard_pid)


@pytest.fixture
async def private_fleet(private_server: PrivateServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(private_server.url, tmp_path, roles=True) as fleet:
        fleet.steps.create()
        yield fleet


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="fast restart"),
        pytest.param(signal.SIGKILL, id="kill -9"),
    ],
)
async def test_runs_outlive_a_restart_of_postgres(
    private_fleet: Fleet, private_server: PrivateServer, number: signal.Signals
) -> None:
    fleet = private_fleet
    # Recovery, and coming back after it, may take as long as they like: the next test is about the lease.
    patient = {"LEASE_DURATION_SECONDS": "60", "SESSION_GRACE_SECONDS": "60"}
    await fleet.start(environ={"N_JOBS_PER_WORKER": "12", **patient})
    # More than fit at once: some are being claimed and some finish at any moment.
    runs = [await fleet.post("steps", {"seconds": 0.15}) for _ in range(RUNS)]
    watching = [fleet.watch(run) for run in runs]

    async def under_way() -> bool:
        (row,) = await fleet.query("SELECT count(*) AS steps FROM step_journal")
        return bool(row["steps"] >= RUNS)

    for _ in range(2):
        await until(under_way, "the runs are under way")
        await private_server.restart(number)
    await asyncio.gather(*(task for _, task in watching))

    for run, (watcher, _) in zip(runs, watching, strict=True):
        await fleet.prove_finished(run, watcher, attempts=None)
        assert watcher.ended_early == 0
        assert (await fleet.row(run))["crashes"] == 0, "a restart of the database is nobody's crash"
    assert {row["status"] for row in await fleet.workers()} == {"online"}


async def test_an_outage_longer_than_the_lease_is_nobodys_crash(
    private_fleet: Fleet, private_server: PrivateServer
) -> None:
    """The workers give their runs up by their own clocks, and come back as others; no run is to blame."""
    fleet = private_fleet
    _, workers = await fleet.start()
    runs = [await fleet.post("steps", {"hold": "s3"}) for _ in range(6)]
    watching = [fleet.watch(run) for run in runs]
    for run in runs:
        await fleet.held(run, "s3")

    async def all_lost() -> bool:
        return all(worker.logged("worker.lease_lost") for worker in workers)

    os.kill(private_server.guard, signal.SIGSTOP)
    try:
        os.kill(private_server.postmaster(), signal.SIGKILL)
        await until(all_lost, "every worker has given up")
    finally:
        os.kill(private_server.guard, signal.SIGCONT)
    for run in runs:
        await fleet.resumed(run)
        fleet.steps.open_gate(run.thread_id)
    await asyncio.gather(*(task for _, task in watching))

    for run, (watcher, _) in zip(runs, watching, strict=True):
        await fleet.prove_finished(run, watcher, attempts=None)
        assert watcher.ended_early == 0
        assert (await fleet.row(run))["crashes"] == 0


async def test_a_fleet_works_again_after_postgres_has_hung(private_fleet: Fleet, private_server: PrivateServer) -> None:
    """A server that is stopped keeps its sockets open and answers nothing, for longer than anybody waits."""
    fleet = private_fleet
    _, workers = await fleet.start(environ={"DATABASE_TIMEOUT": "3"})
    runs = [await fleet.post("steps", {"hold": "s3"}) for _ in range(4)]
    for run in runs:
        await fleet.held(run, "s3")

    async def all_lost() -> bool:
        return all(worker.logged("worker.lease_lost") and worker.logged("heartbeat.outage") for worker in workers)

    private_server.signal_all(signal.SIGSTOP)
    try:
        await until(all_lost, "every worker has given up")
    finally:
        private_server.signal_all(signal.SIGCONT)
    for run in runs:
        fleet.steps.open_gate(run.thread_id)

    async def ended() -> bool:
        rows = [await fleet.row(run) for run in runs]
        return {row["status"] for row in rows} == {"success"}

    await until(ended, "the runs end")
    last = await fleet.post("steps", {})
    watcher, watching = fleet.watch(last)
    await watching
    await fleet.prove_finished(last, watcher, attempts=[1])
    assert [worker.process.poll() for worker in workers] == [None, None]

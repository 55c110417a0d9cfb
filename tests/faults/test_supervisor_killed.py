"""kill -9 of the supervisor: nothing stays behind, and the next start on the same directory goes on with the runs."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.cli.exit_codes import ExitCode
from holdfast.db.embedded import EmbeddedPostgres
from tests.cli.processes import Program, alive, holdfast, postmaster, processes_naming
from tests.support.fleet import INTERVALS, PROJECT, Fleet, until

# Its tests start processes.
pytestmark = pytest.mark.servers


class ServedFleet(Fleet):
    """A fleet whose processes belong to `holdfast serve`, always at the same address."""

    def __init__(self, database_url: str, data_dir: Path, directory: Path) -> None:
        super().__init__(database_url, directory)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._data_dir = data_dir
        self._starts = 0

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self._port}"]

    @contextmanager
    def served(self) -> Iterator[Program]:
        """Start the supervisor and wait until it says that it is ready."""
        command = holdfast("serve", "--workers", "2", "--port", str(self._port), "--config", PROJECT)
        environ = {
            **INTERVALS,
            "HOLDFAST_DATA_DIR": str(self._data_dir),
            "STEP_JOURNAL_URL": self.database_url,
            "COLUMNS": "300",
        }
        self._starts += 1
        with Program(command, environ=environ) as program:
            try:
                program.expect("Holdfast is ready")
                yield program
            finally:
                (self._directory / f"serve-{self._starts}.log").write_text(program.output)


async def test_runs_go_on_after_a_killed_supervisor(data_dir: Path, tmp_path: Path) -> None:
    with EmbeddedPostgres(data_dir) as postgres:
        url = postgres.start()
    async with ServedFleet(url, data_dir, tmp_path) as fleet:
        with fleet.served() as first:
            fleet.steps.create()
            runs = [await fleet.post("steps", {"hold": "s3"}) for _ in range(4)]
            watching = [fleet.watch(run) for run in runs]
            for run in runs:
                await fleet.held(run, "s3")
            family = [child.pid for child in psutil.Process(first.pid).children(recursive=True)]
            assert postmaster(data_dir) in family
            assert len(family) >= 5, "web, two workers, the guard and Postgres"

            first.process.kill()
            first.wait()

            async def nobody_left() -> bool:
                return not any(alive(pid) for pid in family) and not processes_naming(str(data_dir))

            await until(nobody_left, "children, guard and Postgres end")

        with fleet.served() as second:
            for run in runs:
                await fleet.resumed(run)
                fleet.steps.open_gate(run.thread_id)
            await asyncio.gather(*(task for _, task in watching))
            for run, (watcher, _) in zip(runs, watching, strict=True):
                await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])
                assert (await fleet.row(run))["crashes"] == 0, "the workers handed their runs back as they went"
            second.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(second.wait) == ExitCode.OK
        assert not processes_naming(str(data_dir))

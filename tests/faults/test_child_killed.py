"""kill -9 of a worker under `serve`: its supervisor reports it, and nobody waits for a grace or a lease."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cli.processes import Program, holdfast
from tests.support.fleet import INTERVALS, PROJECT, Fleet, until

# Longer than the test waits: nothing but the report can make a worker lost.
PATIENT = {"LEASE_DURATION_SECONDS": "900", "SESSION_GRACE_SECONDS": "60", "HEARTBEAT_INTERVAL_SECONDS": "1"}


class SupervisedFleet(Fleet):
    """Whose processes belong to `holdfast serve`."""

    url = ""

    @property
    def urls(self) -> list[str]:
        return [self.url]


@pytest.fixture
async def supervised(database_url: str, tmp_path: Path) -> AsyncIterator[SupervisedFleet]:
    async with SupervisedFleet(database_url, tmp_path) as fleet:
        fleet.steps.create()
        yield fleet


async def test_runs_of_a_killed_child_are_taken_over_without_a_grace(
    supervised: SupervisedFleet, tmp_path: Path
) -> None:
    fleet = supervised
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fleet.url = f"http://127.0.0.1:{port}"
    urls = {"DATABASE_URL": fleet.database_url, "STEP_JOURNAL_URL": fleet.database_url}
    command = holdfast("serve", "--workers", "2", "--port", str(port), "--config", PROJECT)
    with Program(command, environ={**INTERVALS, **PATIENT, **urls, "COLUMNS": "300"}) as program:
        program.expect("Holdfast is ready")
        run = await fleet.post("steps", {"hold": "s3"})
        watcher, watching = fleet.watch(run)
        await fleet.held(run, "s3")
        (held,) = await fleet.query("SELECT worker.pid FROM run JOIN worker USING (worker_id)")
        os.kill(held["pid"], signal.SIGKILL)
        await fleet.resumed(run)
        fleet.steps.open_gate(run.thread_id)
        await watching
        await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])

        async def replaced() -> bool:
            # In the order in which they registered; the last one is the dead worker's successor.
            rows = await fleet.workers()
            return sorted(row["status"] for row in rows[:2]) == ["lost", "online"] and [
                row["status"] for row in rows[2:]
            ] == ["online"]

        await until(replaced, "the dead worker alone is lost, and replaced")
        (tmp_path / "serve.log").write_text(program.output)
        reasons = re.findall(r'"reason":"([^"]+)","event":"worker.lost"', program.output)
        assert reasons == ["its process ended"]

"""The whole of it, small: real servers, real processes, and nothing left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from bench.peers.cells import Pace
from bench.peers.participants import Participant
from bench.peers.programme import run
from bench.peers.scenarios import Scenario
from bench.stage import wait_for

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]


def test_holdfast_and_the_bare_graph(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        run(
            names=[Participant.HOLDFAST, Participant.BARE_POSTGRES],
            scenarios=[Scenario.STATELESS, Scenario.FIVE, Scenario.DRAIN, Scenario.FIRST_EVENT, Scenario.TOKENS],
            pace=Pace(concurrency=2, seconds=0.1, warm_up=0, rounds=1),
            results=tmp_path,
        )
    finally:
        signal.signal(signal.SIGTERM, handler)
    kept = json.loads((tmp_path / "peers.json").read_text())
    assert [cell["failure"] for cell in kept["cells"] if cell["failure"]] == []
    measured = {(cell["server"], cell["scenario"]): cell["measures"] for cell in kept["cells"]}
    assert len(measured) == 5 + 3
    five = measured["holdfast", "five"]
    assert five["rate"] > 0
    assert five["cpu_server"] > 0
    assert five["cpu_postgres"] >= 0
    assert 5 < five["statements"] < 200
    assert measured["holdfast", "first-event"]["first_p50"] > 0
    # The supervisor, the web process and two workers.
    assert len(kept["memory"]["holdfast"][0]) == 4
    assert "| Holdfast |" in (tmp_path / "peers.md").read_text()
    assert (tmp_path / "peers.svg").read_text().startswith("<svg")
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_outlives_the_comparison(number: signal.Signals, tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "bench", "peers", "--only", "holdfast", "--scenario", "five", "--seconds", "100"]
    with (tmp_path / "log").open("wb") as log:
        started = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
    children: list[psutil.Process] = []
    try:
        family = psutil.Process(started.pid)

        def complete() -> list[psutil.Process]:
            assert started.poll() is None, (tmp_path / "log").read_text()
            found = family.children(recursive=True)
            names = [_command(member) for member in found]
            workers = sum("holdfast worker" in name for name in names)
            return found if workers == 2 and any("postgres:" in name for name in names) else []

        children = wait_for(complete, "the server is up", timeout=180)
        started.send_signal(number)
        started.wait(60)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []
    finally:
        if started.poll() is None:
            started.kill()
            started.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""

"""One server under one scenario in one round: the smallest thing that is measured."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import uvloop

from bench.peers.backing import ROOT, Postgres
from bench.peers.load import Load
from bench.peers.participants import Participant
from bench.peers.processes import Program, cpu_seconds, environment
from bench.peers.scenarios import Scenario
from bench.peers.servers import Running
from bench.peers.window import Window, WrongAnswer, percentile

COUNTED = 20
"""Runs whose statements are counted."""
CLIENT = "client"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How hard and how long."""

    concurrency: int = 30
    seconds: float = 4.0
    warm_up: float = 1.0
    rounds: int = 3


@dataclass(kw_only=True)
class Cell:
    """What came of it, or why nothing did. The measures by name; what each is called is in `bench.peers.summary`."""

    server: Participant
    scenario: Scenario
    round: int
    measures: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


def measure_server(running: Running, cell: Cell, pace: Pace) -> None:
    """Puts the measures into the cell. Raises whatever goes wrong."""

    def look() -> dict[str, float]:
        spent = {name: cpu_seconds(pids) for name, pids in running.processes.items()}
        return spent | {CLIENT: time.process_time()}

    async def measure() -> None:
        async with Load(running.url, pace.concurrency, look) as load:
            match cell.scenario:
                case Scenario.DRAIN:
                    window, drained = await load.drain(pace.seconds)
                    cell.measures["enqueues"] = drained.enqueued / drained.enqueue_seconds
                case Scenario.FIRST_EVENT:
                    window, found = await load.first_events(pace.seconds)
                    for share in (50, 99):
                        cell.measures[f"content_p{share}"] = 1000 * percentile(found.content, share)
                case Scenario.TOKENS | Scenario.MESSAGES:
                    window = await load.streams(cell.scenario, pace.seconds, pace.warm_up)
                case _:
                    window = await load.waits(cell.scenario, pace.seconds, pace.warm_up)
            cell.measures.update(_measures(cell.scenario, window))
            for name in window.before:
                spent = window.after[name] - window.before[name]
                cell.measures[f"cpu_{name}"] = 1000 * spent / max(window.runs, 1)
                cell.measures[f"cores_{name}"] = spent / window.seconds

    uvloop.run(measure())


def _measures(scenario: Scenario, window: Window) -> dict[str, float]:
    found = {"runs": float(window.runs)}
    if scenario is Scenario.FIRST_EVENT:
        for share in (50, 99):
            found[f"first_p{share}"] = 1000 * percentile(window.latencies, share)
        return found
    for share in (50, 99):
        found[f"p{share}"] = 1000 * percentile(window.latencies, share)
    found["rate"] = window.event_rate if scenario.streams else window.rate
    return found


def count_statements(postgres: Postgres, running: Running, cell: Cell, pace: Pace) -> None:
    """How many statements the server sends for a run, from the log of its Postgres. Not while time is measured: writing
    the log takes some."""

    async def drive() -> None:
        async with Load(running.url, min(pace.concurrency, COUNTED)) as load:
            await load.some(cell.scenario, COUNTED)

    since = postgres.start_counting()
    try:
        uvloop.run(drive())
    finally:
        counted = postgres.stop_counting(since)
    cell.measures["statements"] = counted / COUNTED


def measure_bare(cell: Cell, pace: Pace, postgres: Postgres | None) -> None:
    """The graph in a process of its own."""
    command = [sys.executable, "-m", "bench.peers.bare", "--scenario", cell.scenario]
    command += ["--concurrency", str(pace.concurrency), "--seconds", str(pace.seconds), "--warm-up", str(pace.warm_up)]
    command += ["--database-url", postgres.url] if postgres is not None else []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        log = Path(directory) / "log"
        environ = environment(PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        program = Program(command, environ, ROOT, log)
        try:
            code = program.wait(pace.seconds + 120)
        finally:
            program.stop()
        if code:
            raise WrongAnswer(log.read_text()[-1500:])
        window = Window(**orjson.loads(log.read_text().splitlines()[-1]))
    cell.measures.update(_measures(cell.scenario, window))
    if window.after is not None:
        cell.measures["cpu_server"] = 1000 * (window.after - window.before) / max(window.runs, 1)

"""Whether a worker's memory stays as it is: 100,000 five-step runs, and its resident memory after every 5,000.

The runs are put into the queue in bulk, behind the server's back. The worker is warm after a tenth of them: by then
every statement is prepared, every cache is full and the allocator has what it needs at 30 runs at once. Before that,
in a short piece of its own, what memory may hide: the objects that live in a worker, counted by type after some runs
and again after as many more. What belongs to runs that are over would show as a multiple of them.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path

from psycopg import Connection
from psycopg.rows import DictRow

from bench.cost import COUNT_UNFINISHED, INPUT, KWARGS
from bench.report import Finding, Measure
from bench.stage import PROJECT, Process, Stage, wait_for
from holdfast.graphs.assistants import assistant_id
from holdfast.settings import Settings

RUNS, PORTION = 100_000, 5_000
CENSUS_RUNS = 3_000
JOBS = 30
MEGABYTE = 1_000_000

QUEUE_RUNS = """
WITH new AS (SELECT gen_random_uuid() AS thread_id, gen_random_uuid() AS run_id FROM generate_series(1, %(runs)s)),
threads AS (INSERT INTO thread (thread_id, status) SELECT thread_id, 'busy' FROM new)
INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, ready_at, kwargs)
SELECT run_id, thread_id, %(assistant_id)s, 'five', now(), now(), %(kwargs)s::json FROM new
"""
FAILED = "SELECT count(*) AS runs, max(traceback) AS traceback FROM run WHERE status <> 'success'"


def _execute(connection: Connection[DictRow], process: Process, runs: int) -> None:
    """Queue so many runs, and wait until they have ended."""
    parameters = {"runs": runs, "assistant_id": assistant_id("five"), "kwargs": json.dumps(KWARGS | {"input": INPUT})}
    connection.execute(QUEUE_RUNS, parameters)
    connection.execute("NOTIFY holdfast_work")

    def finished() -> bool:
        process.check()
        row = connection.execute(COUNT_UNFINISHED).fetchone()
        return row is not None and row["unfinished"] == 0

    wait_for(finished, "a portion of runs ends", timeout=1800, interval=0.2)
    row = connection.execute(FAILED).fetchone()
    assert row is not None
    if row["runs"]:
        raise RuntimeError(f"{row['runs']} runs did not succeed, {row['traceback']}")


def _census(stage: Stage, settings: Settings, runs: int) -> tuple[Counter[str], Counter[str]]:
    """The objects in a worker after so many runs, and how many more there are after as many again."""
    path = stage.directory / "census.sock"
    process = stage.start(settings, "bench.scale.census", str(path), "worker", "--config", str(PROJECT))
    stage.wait_online(settings, process)
    counted = []
    with stage.connect(settings.database_url) as connection:
        _execute(connection, process, 500)  # Warms up.
        for _ in range(2):
            _execute(connection, process, runs)
            counted.append(_ask(path))
    process.stop()
    gained = Counter(counted[1])
    gained.subtract(counted[0])
    return counted[0], gained


def _ask(path: Path) -> Counter[str]:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
        return Counter(json.loads(asking.makefile("rb").readline()))


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    runs, portion, census_runs = (20_000, 2_000, 1_000) if quick else (RUNS, PORTION, CENSUS_RUNS)
    settings = stage.database("bench_memory", jobs=JOBS)
    stage.say("memory: counting the objects in a worker")
    there, gained = _census(stage, settings, census_runs)
    process = stage.start_worker(settings, PROJECT)
    samples: list[tuple[int, int, int]] = []
    with stage.connect(settings.database_url) as connection:
        for done in range(portion, runs + 1, portion):
            _execute(connection, process, portion)
            samples.append((done, process.resident_memory(), process.own_memory()))
            stage.say(f"memory: {done:,} runs: {samples[-1][1] / MEGABYTE:.1f} MB")
    process.stop()
    stage.drop("bench_memory")
    warm = next(resident for done, resident, _ in samples if done >= runs // 10)
    last = samples[-1][1]
    most = ", ".join(f"{name} {number:+}" for name, number in gained.most_common(3))
    return Finding(
        figure="memory",
        measures=[
            Measure(
                name=f"resident memory of a worker after {runs:,} runs, as a multiple of that after {runs // 10:,}",
                target=1.1,
                rule="at most",
                measured=last / warm,
                note=f"{last / MEGABYTE:.1f} against {warm / MEGABYTE:.1f} MB",
            ),
            Measure(
                name=f"objects in it that came with {census_runs:,} more runs, for each of them",
                target=0.1,
                rule="below",
                measured=gained.total() / census_runs,
                note=f"{gained.total():+} of {there.total():,}; most: {most}",
            ),
        ],
        details={"samples": samples, "objects": dict(there), "gained": {k: n for k, n in gained.items() if n}},
    )

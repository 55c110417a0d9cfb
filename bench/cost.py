"""What a five-step checkpointed run costs, against the same worker with LangGraph's stock AsyncPostgresSaver.

Two worker processes stand ready, each on a database of its own in the same Postgres, alike but for the checkpointer.
They take turns, a batch of runs each, so that whatever else the machine does falls on both. CPU is that of the worker
process, all threads; the rate is by the database's clock, from the first claim to the last end.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from psycopg import Connection
from psycopg.rows import DictRow

from bench.report import Finding, Measure
from bench.stage import PROJECT, Process, Stage, wait_for
from holdfast.graphs.assistants import assistant_id
from holdfast.settings import Settings

CONCURRENCY = 30
RUNS = 450
REPETITIONS = 7
INPUT: dict[str, Any] = {"messages": [{"role": "user", "content": "What does it cost?"}], "step": 0}
KWARGS = {
    "input": INPUT,
    "command": None,
    "config": {},
    "context": None,
    "stream_mode": ["values"],
    "interrupt_before": None,
    "interrupt_after": None,
    "temporary": False,
    "subgraphs": False,
    "resumable": False,
    "durability": "async",
}

# What `create` leaves behind, for many runs at once, each on a thread of its own.
QUEUE_RUNS = """
WITH new AS (SELECT gen_random_uuid() AS thread_id, gen_random_uuid() AS run_id FROM generate_series(1, %(runs)s)),
threads AS (INSERT INTO thread (thread_id, status) SELECT thread_id, 'busy' FROM new)
INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, ready_at, kwargs)
SELECT run_id, thread_id, %(assistant_id)s, 'five', now(), now(), %(kwargs)s::json FROM new
RETURNING run_id
"""
COUNT_UNFINISHED = "SELECT count(*) AS unfinished FROM run WHERE status IN ('pending', 'running')"
BATCH = """
SELECT count(*) FILTER (WHERE status = 'success') AS succeeded,
       extract(epoch FROM max(finished_at) - min(started_at))::float8 AS seconds, max(traceback) AS traceback
FROM run WHERE run_id = ANY(%(run_ids)s)
"""
COUNT_WRITTEN = """
SELECT (SELECT count(*) FROM checkpoints) AS checkpoints, (SELECT count(*) FROM checkpoint_writes) AS writes,
       (SELECT count(*) FROM event) AS events
"""


@dataclass(frozen=True)
class Batch:
    """What one batch took: milliseconds of CPU for each run, and runs a second."""

    cpu_ms: float
    rate: float


class Contestant:
    """A worker process and its database."""

    def __init__(self, stage: Stage, saver: str) -> None:
        self.batches: list[Batch] = []
        self.settings: Settings = stage.database(f"bench_cost_{saver}", jobs=CONCURRENCY)
        self._connection: Connection[DictRow] = stage.connect(self.settings.database_url)
        self._process: Process = stage.start(
            self.settings, "bench.cost_worker", "--config", str(PROJECT), "--saver", saver
        )
        stage.wait_online(self.settings, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, runs: int) -> Batch:
        parameters = {"runs": runs, "assistant_id": assistant_id("five"), "kwargs": json.dumps(KWARGS)}
        before = self._process.cpu_seconds()
        run_ids = [row["run_id"] for row in self._connection.execute(QUEUE_RUNS, parameters)]
        self._connection.execute("NOTIFY holdfast_work")
        wait_for(self._finished, "a batch of runs ends", timeout=300, interval=0.05)
        cpu = self._process.cpu_seconds() - before
        row = self._connection.execute(BATCH, {"run_ids": run_ids}).fetchone()
        assert row is not None
        if row["succeeded"] != runs:
            raise RuntimeError(f"{row['succeeded']} of {runs} runs succeeded, {row['traceback']}")
        return Batch(cpu * 1000 / runs, runs / row["seconds"])

    def settle(self) -> None:
        """Start every turn from like conditions."""
        self._connection.execute("VACUUM ANALYZE")
        self._connection.execute("CHECKPOINT")

    def written(self) -> DictRow | None:
        """What all runs so far have left in the database."""
        return self._connection.execute(COUNT_WRITTEN).fetchone()

    def stop(self) -> None:
        self._process.stop()
        self._connection.close()

    def _finished(self) -> bool:
        self._process.check()
        row = self._connection.execute(COUNT_UNFINISHED).fetchone()
        return row is not None and row["unfinished"] == 0


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    runs, repetitions = (150, 2) if quick else (RUNS, REPETITIONS)
    journal, stock = Contestant(stage, "journal"), Contestant(stage, "stock")
    for contestant in (journal, stock):
        contestant.run(runs)  # Warms up: prepared statements, caches, connections.
    for number in range(1, repetitions + 1):
        for contestant in (journal, stock):
            contestant.settle()
            contestant.batches.append(contestant.run(runs))
        ours, theirs = journal.batches[-1], stock.batches[-1]
        stage.say(
            f"cost: {number}/{repetitions}: {ours.cpu_ms:.2f} against {theirs.cpu_ms:.2f} ms a run, "
            f"{ours.rate:.0f} against {theirs.rate:.0f} runs/s"
        )
    if journal.written() != stock.written():
        raise RuntimeError(f"not the same work: {journal.written()} against {stock.written()}")
    bare = {saver: _bare(stage, journal.settings, saver, runs, quick) for saver in ("none", "memory", "stock")}
    journal.stop()
    stock.stop()
    pairs = list(zip(journal.batches, stock.batches, strict=True))
    ours, theirs = _typical(journal.batches), _typical(stock.batches)
    return Finding(
        figure="cost",
        measures=[
            Measure(
                name="worker CPU of a run, as a share of the stock saver's",
                target=0.5,
                rule="at most",
                measured=median(mine.cpu_ms / other.cpu_ms for mine, other in pairs),
                note=f"{ours.cpu_ms:.2f} against {theirs.cpu_ms:.2f} ms",
            ),
            Measure(
                name=f"runs a second at {CONCURRENCY} at once, as a multiple of the stock saver's",
                target=2,
                rule="at least",
                measured=median(mine.rate / other.rate for mine, other in pairs),
                note=f"{ours.rate:.0f} against {theirs.rate:.0f}",
            ),
        ],
        asides=[
            f"for orientation, the bare graph, no queue and no events, {name}: "
            f"{_typical(batches).cpu_ms:.2f} ms of CPU a run, {_typical(batches).rate:.0f} runs/s"
            for name, batches in (
                ("no checkpointer", bare["none"]),
                ("the memory saver", bare["memory"]),
                ("the stock Postgres saver", bare["stock"]),
            )
        ],
        details={
            "runs": runs,
            "journal": [asdict(batch) for batch in journal.batches],
            "stock": [asdict(batch) for batch in stock.batches],
            "bare": {saver: [asdict(batch) for batch in batches] for saver, batches in bare.items()},
        },
    )


def _typical(batches: list[Batch]) -> Batch:
    return Batch(median(batch.cpu_ms for batch in batches), median(batch.rate for batch in batches))


def _bare(stage: Stage, settings: Settings, saver: str, runs: int, quick: bool) -> list[Batch]:
    batches = 1 if quick else 3
    command = ["bench.cost_bare", "--config", str(PROJECT), "--saver", saver]
    command += ["--runs", str(runs), "--batches", str(batches), "--concurrency", str(CONCURRENCY)]
    process = stage.start(settings, *command)
    process.wait(300)
    found = [json.loads(line) for line in process.log.read_text().splitlines() if line.startswith("{")]
    if len(found) != batches:
        raise RuntimeError(f"the bare graph did not run:\n{process.log.read_text()[-2000:]}")
    return [Batch(one["cpu"] * 1000 / runs, runs / one["seconds"]) for one in found]

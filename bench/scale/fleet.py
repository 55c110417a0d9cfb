"""A web process and a worker on a database of their own, and rounds of runs through HTTP."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Self

import psutil

from bench.stage import PROJECT, Stage, wait_for

Graph = Literal["five", "one"]
PATIENCE = 600.0

UNFINISHED = "SELECT count(*) AS runs FROM run WHERE status IN ('pending', 'running')"


@dataclass(frozen=True)
class Round:
    """What one round took: runs a second, CPU milliseconds of each part for each run, and the clients' median wait."""

    rate: float
    cpu_ms: dict[str, float]
    p50_ms: float
    p99_ms: float

    @property
    def servers_ms(self) -> float:
        """All that is Holdfast and its database, for each run."""
        return sum(used for name, used in self.cpu_ms.items() if name != "clients")


class Fleet:
    """Use as a context manager: the processes run for the length of the block."""

    def __init__(self, stage: Stage, name: str, *, jobs: int, **settings: Any) -> None:
        self.stage = stage
        self.name = name
        self.rounds: list[Round] = []
        self._settings = {"jobs": jobs, **settings}
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        self.settings = self.stage.database(self.name, **self._settings)
        self.connection = self._exit.enter_context(self.stage.connect(self.settings.database_url))
        self.web, self.url = self.stage.start_web(self.settings, PROJECT)
        self._exit.callback(self.web.stop)
        self.worker = self.stage.start_worker(self.settings, PROJECT)
        self._exit.callback(self.worker.stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        self.stage.drop(self.name)

    def cpu(self) -> dict[str, float]:
        """Seconds that each part has used so far. Postgres is all of the server, whoever it works for."""
        return {
            "web": self.web.cpu_seconds(),
            "worker": self.worker.cpu_seconds(),
            "postgres": postgres_cpu(self.stage),
        }

    def run(self, graph: Graph, runs: int, at_once: int, durability: str = "async") -> Round:
        """A round, when its last run has ended."""
        result = self.stage.directory / f"{self.name}-round.json"
        command = ["bench.scale.clients", "--url", self.url, "--graph", graph]
        command += ["--durability", durability]
        command += ["--runs", str(runs), "--at-once", str(at_once), "--result", str(result)]
        result.unlink(missing_ok=True)
        before = self.cpu()
        clients = self.stage.start(self.settings, *command)
        clients.wait(PATIENCE)
        if not result.exists():
            raise RuntimeError(f"the clients failed:\n{clients.log.read_text()[-2000:]}")
        found = json.loads(result.read_text())
        wait_for(self._idle, "the runs of a round end", timeout=PATIENCE, interval=0.1)
        spent = {name: used - before[name] for name, used in self.cpu().items()} | {"clients": found["cpu"]}
        took = found["took"]
        return Round(
            rate=runs / found["seconds"],
            cpu_ms={name: 1000 * used / runs for name, used in spent.items()},
            p50_ms=1000 * took[len(took) // 2],
            p99_ms=1000 * took[len(took) * 99 // 100],
        )

    def settle(self) -> None:
        """Start every turn from like conditions."""
        self.connection.execute("VACUUM ANALYZE")
        self.connection.execute("CHECKPOINT")

    def _idle(self) -> bool:
        for process in (self.web, self.worker):
            process.check()
        row = self.connection.execute(UNFINISHED).fetchone()
        return row is not None and row["runs"] == 0


def postgres_cpu(stage: Stage) -> float:
    """What the server and all its backends have used. One that has left takes its share along, as the kernel counts it
    with the server once it has been waited for."""
    postmaster = psutil.Process(psutil.Process(stage.admin.info.backend_pid).ppid())
    times = postmaster.cpu_times()
    total = float(times.user + times.system + times.children_user + times.children_system)
    for backend in postmaster.children():
        with suppress(psutil.NoSuchProcess):
            times = backend.cpu_times()
            total += float(times.user + times.system)
    return total


def parts(pairs: list[tuple[Round, Round]]) -> str:
    """The CPU of the first of each pair, by part, and that of the second in brackets."""
    return ", ".join(
        f"{part} {median(one.cpu_ms[part] for one, _ in pairs):.2f} "
        f"({median(two.cpu_ms[part] for _, two in pairs):.2f})"
        for part in ("web", "worker", "postgres", "clients")
    )

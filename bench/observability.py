"""What logs and metrics cost, against the same fleet without them.

Two fleets stand ready, a web and a worker process each, on databases of their own in the same Postgres. One logs at
`info` (JSON, to a file) and counts, and both its processes are scraped once a second; the other logs warnings only, and
counts nothing. They take turns at the same load, who begins changes, so that whatever else the machine does falls on
both: clients that create runs and watch them, one after the other, twenty at a time. A run says a little and ends, so
that there is much to log and to count for its time. CPU is that of web and worker.
"""

from __future__ import annotations

import os
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median

from bench.programme import run as run_programme
from bench.report import Finding, Measure
from bench.stage import Stage
from bench.streams.fleet import Fleet

AT_ONCE = 20
EVENTS = 10
RUNS_EACH = 25
REPETITIONS = 20
# Seconds between two scrapes.
SCRAPE_INTERVAL = 1.0


@dataclass(frozen=True)
class Turn:
    """What one turn took: runs a second, milliseconds of CPU for each run, and what of it was whose."""

    rate: float
    cpu_ms: float
    cpu: dict[str, float]
    scrapes: int


class Scraper:
    """Asks for the metrics of both processes of a fleet while the block lasts."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self.scrapes = 0

    @contextmanager
    def scraping(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,), name="scraper")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        while True:
            for url in self._urls:
                with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                    if b"holdfast_info" not in answer.read():
                        raise RuntimeError(f"{url} serves no metrics")
                self.scrapes += 1
            if stop.wait(SCRAPE_INTERVAL):
                return


class Contestant:
    """A fleet, and what its turns took."""

    def __init__(self, fleet: Fleet, scraper: Scraper) -> None:
        self._fleet = fleet
        self._scraper = scraper
        self.turns: list[Turn] = []

    def take_turn(self, runs_each: int) -> Turn:
        fleet, before = self._fleet, self._scraper.scrapes
        fleet.connection.execute("CHECKPOINT")
        threads = fleet.threads(AT_ONCE * runs_each)
        lists = [threads[client::AT_ONCE] for client in range(AT_ONCE)]
        spent: dict[str, float] = {}
        with self._scraper.scraping(), fleet.spending(spent):
            body = fleet.run_body("speech", {"events": EVENTS}, ["custom"])
            result = fleet.clients.order("rush", threads=lists, body=body, events=EVENTS)
        if result["faults"] or result["streams"] != len(threads):
            raise RuntimeError(f"not every event came once and in order: {result}")
        used = spent["web"] + spent["worker"]
        rate, each = len(threads) / result["seconds"], 1000 * used / len(threads)
        return Turn(rate, each, spent, self._scraper.scrapes - before)


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    runs_each, repetitions = (5, 2) if quick else (RUNS_EACH, REPETITIONS)
    with ExitStack() as exit:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        observed = exit.enter_context(
            Fleet(stage, "postgres", "bench_observed", jobs=AT_ONCE, log_level="info", metrics=True, health_port=port)
        )
        silent = exit.enter_context(
            Fleet(stage, "postgres", "bench_silent", jobs=AT_ONCE, log_level="warning", metrics=False)
        )
        on = Contestant(observed, Scraper([observed.url, f"http://127.0.0.1:{port}"]))
        off = Contestant(silent, Scraper([]))
        for contestant in (on, off):
            contestant.take_turn(runs_each)  # Warms up: prepared statements, caches, connections.
        for number in range(1, repetitions + 1):
            for contestant in (on, off) if number % 2 else (off, on):
                contestant.turns.append(contestant.take_turn(runs_each))
            mine, other = on.turns[-1], off.turns[-1]
            stage.say(
                f"observability: {number}/{repetitions}: {mine.rate:.0f} against {other.rate:.0f} runs/s, "
                f"{mine.cpu_ms:.2f} against {other.cpu_ms:.2f} ms a run"
            )
    pairs = list(zip(on.turns, off.turns, strict=True))
    rates = [mine.rate / other.rate for mine, other in pairs]
    costs = [mine.cpu_ms / other.cpu_ms for mine, other in pairs]
    with_them, without = _typical(on.turns), _typical(off.turns)
    return Finding(
        figure="observability",
        measures=[
            Measure(
                name="runs a second with logs and metrics, as a share of those without",
                target=0.95,
                rule="at least",
                measured=median(rates),
                note=f"{with_them[0]:.0f} against {without[0]:.0f}; {min(rates):.2f} to {max(rates):.2f}",
            ),
            Measure(
                name="CPU of web and worker for a run, as a multiple of that without",
                target=1.05,
                rule="at most",
                measured=median(costs),
                note=f"{with_them[1]:.2f} against {without[1]:.2f} ms; {min(costs):.2f} to {max(costs):.2f}",
            ),
        ],
        asides=[f"{sum(turn.scrapes for turn in on.turns)} scrapes; load average {os.getloadavg()[0]:.1f}"],
        details={"on": [asdict(turn) for turn in on.turns], "off": [asdict(turn) for turn in off.turns]},
    )


def _typical(turns: list[Turn]) -> tuple[float, float]:
    return median(turn.rate for turn in turns), median(turn.cpu_ms for turn in turns)


def run(*, quick: bool) -> bool:
    modules = {"observability": "bench.observability"}
    return run_programme("observability", "Holdfast: the cost of seeing inside", modules, quick=quick)

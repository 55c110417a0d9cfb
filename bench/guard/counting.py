"""What requests make everybody do, counted and not timed: the same on any machine, however busy.

A web and a worker process serve the requests of the cases (bench/guard/cases.py). After each, when everybody has come
to rest, the counters are read: statements in the log of Postgres, bytes of its write-ahead log, and of both processes
calls of Python functions, waits for the database, timers, seconds slept and CPU time. What counts is the median of many
repetitions after some to warm up, so that what now and then comes in between does not.

CPU time is the one figure that depends on the machine. It is divided by that of a fixed piece of work, done at the
same time: what is left differs by some per cent, and what it is there for, work that no call shows, is many times that.

Nothing else is to happen meanwhile: heartbeats, polls and upkeep come too seldom to be seen.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

import httpx

from bench.guard.cases import CASES, CLIENTS
from bench.stage import PROJECT, Process, Stage, wait_for
from holdfast.claiming import claim_loop
from holdfast.cli.readiness import answers
from holdfast.journal import journal, run_writer
from holdfast.settings import Settings

DATABASE = "bench_guard"
WARM_UP, REPETITIONS = 6, 11
QUIET = 0.06
"""Seconds without a statement after which everybody has come to rest."""

SETTINGS: dict[str, Any] = {
    "lease": 3600.0,
    "heartbeat": 1200.0,
    "poll_interval": 60.0,
    "reaper_interval": 60.0,
    "signal_ping": 300.0,
    "stream_heartbeat": 15.0,
    "pool_min": 1,
    "pool_max": 2,
    "jobs": CLIENTS,
}
SERVER = {
    "log_line_prefix": "'bench-guard %d %a | '",
    "autovacuum": "off",
    # A page is written whole when it is changed for the first time after a checkpoint, whoever's turn that is.
    "full_page_writes": "off",
    "checkpoint_timeout": "'1h'",
    "max_wal_size": "'10GB'",
}

LINE = re.compile(
    r"^bench-guard (?P<database>\S*) holdfast (?P<part>.*?)(?: [0-9a-f]{12})? \| LOG:  duration: \S+ ms  "
    r"(?:statement|bind [^:]*): (?P<text>.*)$"
)


ROLES = ("web", "worker")
WORK = 30_000
"""How much of the fixed piece of work: about ten milliseconds."""


@dataclass(frozen=True)
class Counts:
    """What one repetition took. `statements` by part of Holdfast and text, those that begin and end a transaction
    included; `calls` by process and package; `slept` in milliseconds, `cpu` in hundredths of the fixed piece of work.
    """

    statements: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    wal: int = 0
    timers: Counter[str] = field(default_factory=Counter)
    slept: Counter[str] = field(default_factory=Counter)
    cpu: Counter[str] = field(default_factory=Counter)


class Counting:
    """A web and a worker process that count, and their database."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        for name, value in SERVER.items():
            stage.admin.execute(f"ALTER SYSTEM SET {name} = {value}".encode())
        stage.admin.execute("SELECT pg_reload_conf()")
        self._settings = stage.database(DATABASE, **SETTINGS)
        stage.admin.execute(f"ALTER DATABASE {DATABASE} SET log_min_duration_statement = 0".encode())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._processes = {
            "web": self._start(self._settings, "web", "--port", str(port)),
            "worker": self._start(self._settings, "worker"),
        }
        wait_for(lambda: self._well() and answers("127.0.0.1", port), "the web process answers", interval=0.1)
        stage.wait_online(self._settings, self._processes["worker"])
        self.port = port
        self.directory = stage.directory
        self.listed_thread: str | None = None
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self._database = stage.connect(self._settings.database_url)

    @property
    def pids(self) -> dict[str, int]:
        return {role: process.pid for role, process in self._processes.items()}

    def wait_until_queued(self, runs: int) -> None:
        """Until so many runs are unfinished."""
        statement = "SELECT count(*) = %s AS reached FROM run WHERE status IN ('pending', 'running')"

        def queued() -> bool:
            row = self._database.execute(statement, (runs,)).fetchone()
            return row is not None and bool(row["reached"])

        wait_for(queued, f"{runs} runs are unfinished")

    def close(self) -> None:
        self.client.close()
        self._database.close()
        for process in self._processes.values():
            process.stop()

    def count(self, name: str, repetitions: int = REPETITIONS, warm_up: int = WARM_UP) -> list[Counts]:
        """What each of so many repetitions of a case took."""
        case = CASES[name]
        found = []
        for number in range(warm_up + repetitions):
            steps = case.steps(self)
            next(steps)
            self._rest()
            before, place = self._snapshot(first_write_delay=case.first_write_delay), self._log_size()
            next(steps)
            after = self._rest()
            if number >= warm_up:
                statements = read_statements(self._stage.postgres_log, place, self._log_size())
                found.append(difference(before, after, statements, unit=work()))
            for _ in steps:
                raise AssertionError(f"{name} has more than two parts")
        return found

    def _start(self, settings: Settings, role: str, *more: str) -> Process:
        path = str(self._path(role))
        return self._stage.start(settings, "bench.guard.counted", path, role, "--config", str(PROJECT), *more)

    def _path(self, role: str) -> Path:
        return self._stage.directory / f"guard-{role}.sock"

    def _well(self) -> bool:
        for process in self._processes.values():
            process.check()
        return True

    def _log_size(self) -> int:
        return self._stage.postgres_log.stat().st_size

    def _rest(self) -> dict[str, Any]:
        """The counters, when nobody sends statements any more."""
        size, since = self._log_size(), time.monotonic()
        while time.monotonic() - since < QUIET:
            time.sleep(QUIET / 6)
            if (now := self._log_size()) != size:
                size, since = now, time.monotonic()
        return self._snapshot()

    def _snapshot(self, **wanted: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for role, process in self._processes.items():
            process.check()
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(str(self._path(role)))
                asking.sendall(json.dumps(wanted).encode() + b"\n")
                found[role] = json.loads(asking.makefile("rb").readline())
        row = self._stage.admin.execute(
            "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint AS wal"
        ).fetchone()
        assert row is not None
        return found | row


def read_statements(log: Path, since: int, until: int) -> Counter[tuple[str, str]]:
    """The statements between two positions in the log, by part of Holdfast and text."""
    with log.open("rb") as file:
        file.seek(since)
        lines = file.read(until - since).decode(errors="replace").splitlines()
    found: list[tuple[str, str]] = []
    inside = False
    for line in lines:
        if line.startswith("\t"):  # A statement of several lines goes on.
            if inside:
                part, text = found[-1]
                found[-1] = (part, f"{text} {line.strip()}")
            continue
        match = LINE.match(line)
        inside = match is not None and match["database"] == DATABASE
        if match is not None and inside:
            found.append((match["part"], match["text"]))
    return Counter((part, shorten(text)) for part, text in found)


def shorten(text: str) -> str:
    """Enough of a statement to know it by."""
    text = " ".join(text.split())
    return text if len(text) <= 72 else text[:72].rstrip() + "…"


def work() -> float:
    """CPU seconds of the fixed piece of work, at the speed that the machine has now."""
    took = []
    for _ in range(3):
        began = time.thread_time()
        sum(len(str(number)) for number in range(WORK))
        took.append(time.thread_time() - began)
    return min(took)


def difference(
    before: dict[str, Any], after: dict[str, Any], statements: Counter[tuple[str, str]], *, unit: float
) -> Counts:
    found = Counts(statements, wal=after["wal"] - before["wal"])
    for role in ROLES:
        then, now = before[role], after[role]
        for name, number in now["calls"].items():
            found.calls[role, name] = number - then["calls"].get(name, 0)
        found.waits[role] = now["waits"] - then["waits"]
        found.timers[role] = now["timers"] - then["timers"]
        found.slept[role] = round(1000 * (now["slept"] - then["slept"]))
        found.cpu[role] = round(100 * (now["cpu"] - then["cpu"]) / unit)
    return found


def typical(counted: list[Counts]) -> dict[str, Any]:
    """The medians, as they are compared and kept."""
    return {
        "statements": _nested([one.statements for one in counted]),
        "wal": median_low(one.wal for one in counted),
        **{name: _by_role([getattr(one, name) for one in counted]) for name in ("waits", "timers", "slept", "cpu")},
        "calls": _nested([one.calls for one in counted]),
    }


def delays() -> dict[str, float]:
    """Milliseconds that the worker waits on purpose before a run's first events are visible. They are replaced while
    calls are counted, so they are kept as they are."""
    return {
        "first write of a run (FIRST_WRITE_DELAY_SECONDS)": 1000 * run_writer.FIRST_WRITE_DELAY_SECONDS,
        "event of the claim (CLAIM_EVENT_HINT_MAX_DELAY_SECONDS)": 1000 * claim_loop.CLAIM_EVENT_HINT_MAX_DELAY_SECONDS,
        "between commits of several runs (MAX_GROUP_DELAY_SECONDS)": 1000 * journal.MAX_GROUP_DELAY_SECONDS,
    }


def _by_role(counters: list[Counter[str]]) -> dict[str, int]:
    return {role: median_low(counter[role] for counter in counters) for role in ROLES}


def _nested(counters: list[Counter[tuple[str, str]]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for first, second in sorted(set().union(*counters)):
        if number := median_low(counter[first, second] for counter in counters):
            found.setdefault(first, {})[second] = number
    return found

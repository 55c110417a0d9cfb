"""What a run makes everybody do, counted and not timed: the same on any machine, however busy.

A web and a worker process execute runs one at a time, each on a thread of its own and waited for. After each, when
everybody has come to rest, the counters are read: statements in the log of Postgres, bytes of its write-ahead log,
calls of Python functions and waits for the database in both processes. What counts is the median of
many runs after some to warm up, so that what now and then comes in between does not.

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

from bench.scale.clients import INPUTS
from bench.stage import PROJECT, Process, Stage, wait_for
from holdfast.cli.readiness import answers
from holdfast.settings import Settings

DATABASE = "bench_guard"
# With `sync` every step waits for its commit. Else how many steps share one, and with it the number of statements,
# would depend on how fast the machine is at this moment; a run of one step has but one to wait for.
CASES = {"one step": ("one", "async"), "five steps": ("five", "sync")}
WARM_UP, RUNS = 8, 11
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
    r"^bench-guard (?P<database>\S*) holdfast (?P<part>.*?) \| LOG:  duration: \S+ ms  "
    r"(?:statement|bind [^:]*): (?P<text>.*)$"
)


@dataclass(frozen=True)
class Counts:
    """What one run took. `statements` by part of Holdfast and text, those that begin and end a transaction included;
    `calls` by process and package."""

    statements: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    wal: int = 0


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
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def close(self) -> None:
        self._client.close()
        for process in self._processes.values():
            process.stop()

    def count(self, case: str, runs: int = RUNS, warm_up: int = WARM_UP) -> list[Counts]:
        """What each of so many runs took."""
        graph, durability = CASES[case]
        found = []
        for number in range(warm_up + runs):
            before, place = self._snapshot(), self._log_size()
            self._run(graph, durability)
            after = self._rest()
            if number >= warm_up:
                statements = read_statements(self._stage.postgres_log, place, self._log_size())
                found.append(difference(before, after, statements))
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

    def _run(self, graph: str, durability: str) -> None:
        thread_id = self._client.post("/threads", json={}).raise_for_status().json()["thread_id"]
        body = {"assistant_id": graph, "input": INPUTS[graph], "durability": durability}
        answer = self._client.post(f"/threads/{thread_id}/runs/wait", json=body).raise_for_status().json()
        if "__error__" in answer:
            raise RuntimeError(f"a run failed: {answer}")

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

    def _snapshot(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for role, process in self._processes.items():
            process.check()
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(str(self._path(role)))
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


def difference(before: dict[str, Any], after: dict[str, Any], statements: Counter[tuple[str, str]]) -> Counts:
    calls: Counter[tuple[str, str]] = Counter()
    waits: Counter[str] = Counter()
    for role in ("web", "worker"):
        for name, number in after[role]["calls"].items():
            calls[role, name] = number - before[role]["calls"].get(name, 0)
        waits[role] = after[role]["waits"] - before[role]["waits"]
    return Counts(statements, waits, calls, after["wal"] - before["wal"])


def typical(counted: list[Counts]) -> dict[str, Any]:
    """The medians, as they are compared and kept."""
    return {
        "statements": _nested([one.statements for one in counted]),
        "waits": {role: median_low(one.waits[role] for one in counted) for role in ("web", "worker")},
        "wal": median_low(one.wal for one in counted),
        "calls": _nested([one.calls for one in counted]),
    }


def _nested(counters: list[Counter[tuple[str, str]]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for first, second in sorted(set().union(*counters)):
        if number := median_low(counter[first, second] for counter in counters):
            found.setdefault(first, {})[second] = number
    return found

"""What a run costs with a million finished runs in the database, against a thousand.

Two fleets, a web and a worker process each, on databases of the same make in one Postgres; see `bench.scale.copies`.
They take turns: five-step runs, each on a new thread and waited for. CPU is that of all of them, Postgres included.
Then what does not depend on the machine: the statements of a run, counted in the log of Postgres as `bench.idle` does,
and the pages that it reads or changes. Then what people look at, request by request, in turns too. Last what is
read again and again with nothing to do, by upkeep and for the figures of the queue: in pages.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import httpx
from psycopg import ClientCursor
from psycopg.rows import DictRow, tuple_row

from bench.report import Finding, Measure
from bench.scale.copies import fill
from bench.scale.fleet import Fleet, parts
from bench.stage import Stage
from holdfast.insight import activity
from holdfast.insight.fleet import QUEUE
from holdfast.resources import history
from holdfast.upkeep import sweeps

SMALL, LARGE = 1_000, 1_000_000
AT_ONCE = 20
RUNS, REPETITIONS = 300, 9
LOOKS = 40
MONTH = 30 * 86_400.0
"""Nothing of the past is to be swept, and sweeps are to look for what is older."""
STATISTICS_DELAY = 12.0
"""Seconds after which every idle backend has said what it has read."""
COUNTED = "bench-past %d %a | "

PAGES = """
SELECT pg_stat_clear_snapshot(), blks_hit + blks_read AS pages FROM pg_stat_database WHERE datname = current_database()
"""
ANY_RUN = "SELECT thread_id, run_id FROM run WHERE status = 'success' ORDER BY created_at LIMIT 1"


def _requests(thread_id: str, run_id: str) -> dict[str, tuple[str, str, Any]]:
    """What screens ask for, by what to call it."""
    search, thread = "/threads/search", f"/threads/{thread_id}"
    return {
        "threads": ("POST", search, {"limit": 20}),
        "threads of a graph": ("POST", search, {"limit": 20, "metadata": {"graph_id": "one"}}),
        "threads of nobody": ("POST", search, {"limit": 20, "metadata": {"graph_id": "none"}}),
        "threads by creation": ("POST", search, {"limit": 20, "sort_by": "created_at"}),
        "idle threads": ("POST", search, {"limit": 20, "status": "idle"}),
        "busy threads": ("POST", search, {"limit": 20, "status": "busy"}),
        "threads that wait for an answer": ("POST", search, {"limit": 20, "status": "interrupted"}),
        "failed threads": ("POST", search, {"limit": 20, "status": "error"}),
        "number of busy threads": ("POST", "/threads/count", {"status": "busy"}),
        "a thread": ("GET", thread, None),
        "its runs": ("GET", f"{thread}/runs", None),
        "its state": ("GET", f"{thread}/state", None),
        "its history": ("POST", f"{thread}/history", {"limit": 10}),
        "a run": ("GET", f"{thread}/runs/{run_id}", None),
        "its timeline": ("GET", f"{thread}/runs/{run_id}/timeline", None),
        "all runs": ("GET", "/runs", None),
        "successful runs": ("GET", "/runs?status=success", None),
        "failed runs": ("GET", "/runs?status=error", None),
        "running runs": ("GET", "/runs?status=running", None),
        "workers": ("GET", "/workers", None),
        "dead letters": ("GET", "/dead-letters", None),
        "questions": ("GET", "/interrupts", None),
    }


class Past:
    """A fleet on a database with a past."""

    def __init__(self, fleet: Fleet, finished: int) -> None:
        self.fleet = fleet
        self.finished = finished
        self.looks: dict[str, list[float]] = {}
        self._client = httpx.Client(base_url=fleet.url, timeout=120)

    def fill(self) -> None:
        self.fleet.run("one", 60, 10)
        fill(self.fleet.connection, self.finished)
        row = self.fleet.connection.execute(ANY_RUN).fetchone()
        assert row is not None
        self.requests = _requests(str(row["thread_id"]), str(row["run_id"]))

    def look(self, name: str) -> None:
        method, path, body = self.requests[name]
        began = time.perf_counter()
        answer = self._client.request(method, path, json=body)
        self.looks.setdefault(name, []).append(1000 * (time.perf_counter() - began))
        answer.raise_for_status()

    def pages(self) -> int:
        row = self.fleet.connection.execute(PAGES).fetchone()
        assert row is not None
        return int(row["pages"])

    def standing_pages(self) -> dict[str, int]:
        """The pages that are read again and again, whether anything happens or not: by upkeep to find that there is
        nothing to do, and for the figures that are counted at most once a second, whoever asks."""
        found = {}
        statements = {sweep.what: sweep.statement for sweep in sweeps.SWEEPS} | {
            "threads with a time to live": sweeps.SWEEP_EXPIRED,
            "active threads": sweeps.POSTPONE_ACTIVE,
            "threads to prune": sweeps.EXPIRED_HISTORIES,
            "checkpoints": history.LOCK_DUE,
            "queue": QUEUE,
            "finished lately": activity.FINISHED,
            "created lately": activity.CREATED,
            "running now": activity.RUNNING,
        }
        connection = self.fleet.connection
        self.fleet.settle()  # What has just run leaves dead entries, as many in either.
        with connection.transaction(force_rollback=True), ClientCursor(connection, row_factory=tuple_row) as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")  # As on all of Holdfast's own connections.
            for what, statement in statements.items():
                # What has happened lately is read run by run, and is no part of the past: of a moment it is nothing.
                parameters = {
                    "ttl": MONTH,
                    "batch": 100,
                    "aside": [],
                    "window": 0.001,
                    "limit": activity.RUNNING_RUNS_SHOWN,
                }
                for _ in range(2):  # The first to meet a dead entry marks it for all others.
                    cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}".encode(), parameters)
                    row = cursor.fetchone()
                assert row is not None
                plan: DictRow = row[0][0]["Plan"]
                found[what] = int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])
        return found


def _count(stage: Stage, past: Past, runs: int) -> tuple[float, float]:
    """Statements and pages of a run."""
    time.sleep(STATISTICS_DELAY)
    pages, since = past.pages(), stage.postgres_log.stat().st_size
    # Every step waits for its commit: how much of a run is in one does not depend on how fast it is then.
    past.fleet.run("five", runs, 1, durability="sync")
    until = stage.postgres_log.stat().st_size
    time.sleep(STATISTICS_DELAY)
    with stage.postgres_log.open("rb") as log:
        log.seek(since)
        lines = log.read(until - since).splitlines()
    mine = f"bench-past {past.fleet.name} holdfast ".encode()
    ours = [line for line in lines if line.startswith(mine) and (b" ms  bind " in line or b" ms  statement:" in line)]
    return len(ours) / runs, (past.pages() - pages) / runs


def _compare_looks(small: Past, large: Past, looks: int) -> dict[str, float]:
    for number in range(looks + 5):
        for name in small.requests:
            for past in (small, large):
                past.look(name)
                if number < 5:  # Warms up: plans and connections.
                    past.looks[name].clear()
    return {name: median(large.looks[name]) / median(small.looks[name]) for name in small.requests}


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    size, repetitions, runs = (50_000, 2, 100) if quick else (LARGE, REPETITIONS, RUNS)
    with ExitStack() as exits:
        small, large = (
            Past(exits.enter_context(Fleet(stage, name, jobs=AT_ONCE, event_ttl=MONTH)), finished)
            for name, finished in (("bench_past_small", SMALL), ("bench_past_large", size))
        )
        for past in (small, large):
            stage.say(f"past: making {past.finished:,} finished runs")
            past.fill()
            past.fleet.run("five", runs, AT_ONCE)  # Warms up.
        for number in range(1, repetitions + 1):
            for past in (small, large) if number % 2 else (large, small):
                past.fleet.rounds.append(past.fleet.run("five", runs, AT_ONCE))
            ours, base = large.fleet.rounds[-1], small.fleet.rounds[-1]
            stage.say(f"past: {number}/{repetitions}: {ours.servers_ms:.2f} against {base.servers_ms:.2f} ms a run")
        ratios = _compare_looks(small, large, 8 if quick else LOOKS)
        standing = [past.standing_pages() for past in (small, large)]
        stage.say("past: counting statements and pages")
        stage.admin.execute(f"ALTER SYSTEM SET log_line_prefix = '{COUNTED}'".encode())
        stage.admin.execute("ALTER SYSTEM SET log_min_duration_statement = 0")
        stage.admin.execute("SELECT pg_reload_conf()")
        (base_statements, base_pages), (statements, pages) = (_count(stage, past, 100) for past in (small, large))
        stage.admin.execute("ALTER SYSTEM RESET log_min_duration_statement")
        stage.admin.execute("SELECT pg_reload_conf()")
    pairs = list(zip(large.fleet.rounds, small.fleet.rounds, strict=True))
    worst = max(ratios, key=lambda name: ratios[name])
    slow, quick_one = median(large.looks[worst]), median(small.looks[worst])
    return Finding(
        figure="past",
        measures=[
            Measure(
                name=f"CPU of a run with {size:,} finished runs, as a multiple of {SMALL:,}",
                target=1.2,
                rule="at most",
                measured=median(one.servers_ms / two.servers_ms for one, two in pairs),
                note=f"{median(one.servers_ms for one, _ in pairs):.2f} against "
                f"{median(two.servers_ms for _, two in pairs):.2f} ms",
            ),
            Measure(
                name="its statements, likewise",
                target=1.05,
                rule="at most",
                measured=statements / base_statements,
                note=f"{statements:.1f} against {base_statements:.1f}",
            ),
            Measure(
                name=f"what screens ask for, {len(ratios)} requests, the one that has grown most",
                target=2,
                rule="at most",
                measured=ratios[worst],
                note=f"{worst}: {slow:.2f} against {quick_one:.2f} ms",
            ),
            Measure(
                name="pages that upkeep reads with nothing to do, and the figures of the queue",
                target=2,
                rule="at most",
                measured=sum(standing[1].values()) / sum(standing[0].values()),
                note=f"{sum(standing[1].values())} against {sum(standing[0].values())}",
            ),
        ],
        asides=[
            f"CPU by part, ms a run, with {size:,} (and with {SMALL:,}): {parts(pairs)}",
            f"pages that a run reads or changes: {pages:.0f} against {base_pages:.0f}; an index is deeper then",
        ],
        details={
            "rounds": {past.fleet.name: [vars(one) for one in past.fleet.rounds] for past in (small, large)},
            "screens": {name: [median(past.looks[name]) for past in (small, large)] for name in ratios},
            "pages of standing statements": standing,
            "statements": [base_statements, statements],
            "pages": [base_pages, pages],
        },
    )

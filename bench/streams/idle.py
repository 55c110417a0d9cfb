"""What a watcher costs while nothing happens.

One web process, and streams over which nothing comes but heartbeats: half of them of a thread each, half of a run each
that waits in the queue. Every watcher has a thread of its own, which is the worst case: whatever the hub keeps, it
keeps for each. Memory is what the process has to itself (USS), before and after; CPU is user and system time of all
its threads while heartbeats go out and the slow poll asks for all threads.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from bench.report import Finding, Measure
from bench.stage import Stage
from bench.streams.fleet import CARRIERS, Carrier, Fleet, shares
from holdfast.graphs.assistants import assistant_id

WATCHERS = 10_000
SECONDS = 30.0
HEARTBEAT = 5.0
ARRIVING = 300.0
"""Watchers that come each second. How many can come at once is another matter: each has its log read, once."""
SETTLE = 12.0
"""Seconds until every watcher has had its first heartbeats, and the memory has stopped growing."""

QUEUE = """
INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, ready_at, kwargs)
SELECT gen_random_uuid(), thread_id, %(assistant_id)s, 'one', now(), now(), %(kwargs)s::json
FROM unnest(%(threads)s::uuid[]) AS thread_id
RETURNING thread_id, run_id
"""


def _requests(fleet: Fleet, watchers: int) -> list[tuple[str, str, Any]]:
    threads = fleet.threads(watchers)
    waiting, quiet = threads[: watchers // 2], threads[watchers // 2 :]
    parameters = {"assistant_id": assistant_id("one"), "kwargs": json.dumps({"input": {}}), "threads": waiting}
    runs = fleet.connection.execute(QUEUE, parameters).fetchall()
    subscription = {"channels": ["values", "messages", "lifecycle"]}
    return [
        *(("GET", f"/threads/{run['thread_id']}/runs/{run['run_id']}/stream", None) for run in runs),
        *(("POST", f"/threads/{thread_id}/stream/events", subscription) for thread_id in quiet),
    ]


def _watch(stage: Stage, carrier: Carrier, watchers: int, seconds: float) -> dict[str, Any]:
    with Fleet(
        stage, carrier, "bench_watchers", worker=False, stream_heartbeat=HEARTBEAT, database_timeout=60
    ) as fleet:
        # What the process loads and caches for the first of them it has once.
        fleet.clients.order("open", requests=_requests(fleet, 200), keep=False)
        fleet.clients.order("close")
        time.sleep(2)
        before = fleet.web.own_memory()
        requests = _requests(fleet, watchers)
        opened = time.monotonic()
        fleet.clients.order("open", requests=requests, keep=False, rate=ARRIVING)
        opened = time.monotonic() - opened
        stage.say(f"idle: {watchers:,} watchers after {opened:.0f} s; now {SETTLE + seconds:g} s of nothing")
        time.sleep(SETTLE)
        after = fleet.web.own_memory()
        tally = fleet.clients.order("tally")
        spent: dict[str, float] = {}
        started = time.monotonic()
        with fleet.spending(spent):
            time.sleep(seconds)
        lasted = time.monotonic() - started
        told = fleet.clients.order("tally")
        if told["open"] != watchers:
            raise RuntimeError(f"{watchers - told['open']} of {watchers} streams have ended")
        heartbeats = told["heartbeats"] - tally["heartbeats"]
        if heartbeats < 0.8 * watchers * lasted / HEARTBEAT:
            raise RuntimeError(f"only {heartbeats} heartbeats came in {lasted:.0f} s")
        fleet.clients.order("close")
    return {
        "carrier": carrier,
        "watchers": watchers,
        "opened_in": opened,
        "before": before,
        "after": after,
        "seconds": lasted,
        "heartbeats": heartbeats,
        "cpu": spent,
        "load": os.getloadavg()[0],
    }


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    watchers, seconds = (1000, 10.0) if quick else (WATCHERS, SECONDS)
    found = [_watch(stage, carrier, watchers, seconds) for carrier in CARRIERS]
    measures, asides = [], []
    for one in found:
        over = f"{watchers:,} watchers, signals over {one['carrier']}"
        grown = (one["after"] - one["before"]) / watchers / 1000
        share = 100 * one["cpu"]["web"] / one["seconds"]
        each = 1e6 * one["cpu"]["web"] / one["heartbeats"]
        measures += [
            Measure(
                name=f"memory of each of {over}",
                target=60,
                rule="below",
                measured=grown,
                unit=" KB",
                note=f"from {one['before'] / 1e6:.0f} to {one['after'] / 1e6:.0f} MB",
            ),
            Measure(
                name=f"CPU of the web process with {over}",
                target=5,
                rule="below",
                measured=share,
                unit=" %",
                note=f"{one['heartbeats'] / one['seconds']:.0f} heartbeats a second, {each:.0f} µs each",
            ),
        ]
        asides.append(f"{one['carrier']}: CPU {shares(one['cpu'], one['seconds'])}; load average {one['load']:.1f}")
    return Finding(figure="idle", measures=measures, asides=asides, details={"rounds": found})

"""What a thousand watchers of one run get, and what they cost the database.

A run waits at a gate while its watchers gather; then it says something every few milliseconds. Every watcher must have
every event, once and in order, which is checked byte by byte. How often the web process read the log meanwhile is
counted in the log of Postgres, for one watcher and for all, from the moment before they come to the run's end.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, LiteralString
from uuid import uuid4

import httpx

from bench.report import Finding, Measure
from bench.stage import Stage, wait_for
from bench.streams.fleet import CARRIERS, Carrier, Fleet, shares
from holdfast.streams.log import READ_AFTER

DATABASE = "bench_fanout"
WATCHERS = 1000
EVENTS = 200
PAUSE = 0.02

# One line for a simple query, and of the lines for a prepared one the one that is there at every execution.
LINE = re.compile(
    r"^bench-streams (?P<database>\S*) (?P<application>.*?) \| LOG:  duration: \S+ ms  (?:statement|bind [^:]*): "
    r"(?P<statement>.*(?:\n\t.*)*)",
    re.MULTILINE,
)


def _squeeze(statement: str) -> str:
    return re.sub(r"\$\d+|%\(\w+\)s", "?", " ".join(statement.split()))


def statements(log: Path, since: int) -> Counter[str]:
    """What web processes have sent since a position in the log."""
    with log.open("rb") as file:
        file.seek(since)
        text = file.read().decode(errors="replace")
    return Counter(
        _squeeze(match["statement"])
        for match in LINE.finditer(text)
        if match["database"] == DATABASE and match["application"].startswith("holdfast web")
    )


def _watch(stage: Stage, fleet: Fleet, watchers: int, events: int) -> dict[str, Any]:
    gate = stage.directory / uuid4().hex
    [thread_id] = fleet.threads(1)
    body = fleet.run_body("speech", {"events": events, "pause": PAUSE, "gate": str(gate)}, ["custom"])
    run = httpx.post(f"{fleet.url}/threads/{thread_id}/runs", json=body).raise_for_status().json()
    begun = "SELECT 1 FROM event WHERE thread_id = %s"
    wait_for(lambda: fleet.connection.execute(begun, (thread_id,)).fetchone(), "the run waits at its gate")
    since = stage.postgres_log.stat().st_size
    request = ("GET", f"/threads/{thread_id}/runs/{run['run_id']}/stream", None)
    fleet.clients.order("open", requests=[request] * watchers, keep=True)
    spent: dict[str, float] = {}
    with fleet.spending(spent):
        gate.touch()
        result = fleet.clients.order("ended", events=events)
    fleet.clients.order("close")
    sent = statements(stage.postgres_log, since)
    wrong = sum(result["faults"].values())
    return {
        **result,
        "watchers": watchers,
        "delivered_wrong": wrong + (0 if result["different"] == 1 else result["different"]),
        "reads": sent[_squeeze(READ_AFTER)],
        "statements": dict(sent),
        "cpu": spent,
    }


def _both(stage: Stage, carrier: Carrier, watchers: int, events: int) -> dict[str, Any]:
    with Fleet(stage, carrier, DATABASE) as fleet:
        _watch(stage, fleet, 1, 10)
        stage.say(f"fanout: {events} events to one watcher, then to {watchers:,}, signals over {carrier}")
        one = _watch(stage, fleet, 1, events)
        many = _watch(stage, fleet, watchers, events)
    if not one["statements"]:
        raise RuntimeError("no statement was seen: the log is not read right")
    return {"carrier": carrier, "one": one, "many": many, "load": os.getloadavg()[0]}


def _configure(stage: Stage, statement: LiteralString) -> None:
    stage.admin.execute(statement)
    stage.admin.execute("SELECT pg_reload_conf()")


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    watchers, events = (200, 50) if quick else (WATCHERS, EVENTS)
    _configure(stage, "ALTER SYSTEM SET log_line_prefix = 'bench-streams %d %a | '")
    _configure(stage, "ALTER SYSTEM SET log_min_duration_statement = 0")
    measures, asides, found = [], [], []
    for carrier in CARRIERS:
        both = _both(stage, carrier, watchers, events)
        one, many = both["one"], both["many"]
        found.append(both)
        measures += [
            Measure(
                name=f"watchers of {watchers:,} that got every event once and in order, signals over {carrier}",
                target=watchers,
                rule="at least",
                measured=many["streams"] - many["delivered_wrong"],
                note=f"{events} events each, {many['faults'] or 'all alike'}",
            ),
            Measure(
                name=f"reads of the log for {watchers:,}, as a multiple of those for one, signals over {carrier}",
                target=1,
                rule="at most",
                measured=many["reads"] / max(1, one["reads"]),
                note=f"{many['reads']} against {one['reads']}",
            ),
        ]
        rate = watchers * events / many["seconds"]
        asides.append(
            f"{carrier}: {rate:,.0f} events a second to {watchers:,} watchers; "
            f"CPU {shares(many['cpu'], many['seconds'])}; load average {both['load']:.1f}"
        )
    _configure(stage, "ALTER SYSTEM RESET log_min_duration_statement")
    return Finding(figure="fanout", measures=measures, asides=asides, details={"rounds": found})

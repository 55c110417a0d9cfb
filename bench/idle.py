"""How many statements a second an idle worker sends.

Counted in the log of Postgres, exactly: with log_min_duration_statement = 0 the server writes one line for every simple
query ("statement:") and one for every execution of a prepared one ("bind": each execution binds once, and unlike
"execute" the line is there for an empty statement too). Transaction control counts. The worker under measure is the
only Holdfast process on its database, and the log names the database. Measured twice: for a worker that leads the
upkeep, and for one that does not, because this process holds the leadership.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

from bench.report import Finding, Measure
from bench.stage import Stage, wait_for
from holdfast.upkeep.leader import TRY_LOCK

DATABASE = "bench_idle"
SECONDS = 60.0
"""A multiple of the half minute between two sweeps, which come in bursts."""
SETTLE = 12.0
"""What a worker does once, when it starts, is not idling: registering, first polls, first sweep."""

LINE = re.compile(r"^bench-idle (?P<database>\S*) (?P<application>.*?) \| LOG:  duration: \S+ ms  (?:statement|bind)\b")


def statements(log: Path, since: int, until: int) -> Counter[str]:
    """Who sent how many statements to the database, between two positions in the log."""
    with log.open("rb") as file:
        file.seek(since)
        lines = file.read(until - since).decode(errors="replace").splitlines()
    found = (match for line in lines if (match := LINE.match(line)) and match["database"] == DATABASE)
    # "holdfast heartbeat 1f0c…": the last word is the token of the process.
    names = (match["application"].split() for match in found)
    return Counter(" ".join(name[:2]) for name in names if name[:1] == ["holdfast"])


def _count(stage: Stage, seconds: float, *, leads: bool) -> Counter[str]:
    settings = stage.database(DATABASE)
    stage.admin.execute(f"ALTER DATABASE {DATABASE} SET log_min_duration_statement = 0".encode())
    with stage.connect(settings.database_url) as holder:
        if not leads:
            row = holder.execute(TRY_LOCK, {"schema": settings.db_schema}).fetchone()
            assert row is not None
            assert row["leads"]
        process = stage.start_worker(settings)
        if leads:
            wait_for(lambda: "upkeep.leading" in process.log.read_text(), "the worker leads")
        time.sleep(SETTLE)
        since = stage.postgres_log.stat().st_size
        time.sleep(seconds)
        until = stage.postgres_log.stat().st_size
        process.check()
        if leads != ("upkeep.leading" in process.log.read_text()):
            raise RuntimeError("the leadership is not where it was put")
        process.stop()
    return statements(stage.postgres_log, since, until)


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    seconds = 30.0 if quick else SECONDS
    stage.admin.execute("ALTER SYSTEM SET log_line_prefix = 'bench-idle %d %a | '")
    stage.admin.execute("SELECT pg_reload_conf()")
    measures = []
    details: dict[str, dict[str, int]] = {}
    for name, leads in (("a worker that leads the upkeep", True), ("any other worker", False)):
        stage.say(f"idle: watching {name} for {seconds:g} s")
        counted = _count(stage, seconds, leads=leads)
        if not counted:
            raise RuntimeError("no statement was seen: the log is not read right")
        note = ", ".join(f"{role.removeprefix('holdfast ')} {number}" for role, number in counted.most_common())
        rate = counted.total() / seconds
        details[name] = dict(counted)
        measures.append(
            Measure(name=name, target=2, rule="below", measured=rate, unit="/s", note=f"in {seconds:g} s: {note}")
        )
    return Finding(figure="idle", measures=measures, details=details)

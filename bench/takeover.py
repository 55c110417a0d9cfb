"""How long a run stands still when its worker is killed.

Two workers and a web process, first started one by one, then under `holdfast serve`. Again and again: a five-step run
is started and followed over SSE; in the middle of it the process that holds it gets SIGKILL, and the clock runs until
the client receives the first event of the attempt that goes on. Then a new worker takes the place of the dead one. The
lead over the upkeep is taken away and given back before every round, so that some of the workers killed are the very
ones that would have noticed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import httpx
from psycopg import Connection
from psycopg.rows import DictRow

from bench.report import Finding, Measure
from bench.stage import Process, Stage, wait_for
from holdfast.cli.sse import ServerEvent, read_events
from holdfast.settings import Settings
from holdfast.upkeep.leader import TRY_LOCK

ROUNDS = 20
STEPS = ["s1", "s2", "s3", "s4", "s5"]
STEP_SECONDS = 0.5
PATIENCE = 90.0
"""Seconds a round may take before something is wrong."""

HOLDER = """
SELECT worker.pid FROM run JOIN worker USING (worker_id) WHERE run_id = %s AND run.status = 'running'
"""
ONLINE = "SELECT count(*) AS workers FROM worker WHERE status = 'online' AND pid <> %s"
LEADER = """
SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ '^holdfast upkeep'
  AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted)
"""


class Fleet:
    """Two workers, a web process, and who among them does what."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._settings: Settings = stage.database("bench_takeover")
        self.connection: Connection[DictRow] = stage.connect(self._settings.database_url)
        self.url = self._start()

    def _start(self) -> str:
        self.workers = {process.pid: process for process in (self._worker(), self._worker())}
        self.web, url = self._stage.start_web(self._settings)
        return url

    def _worker(self) -> Process:
        return self._stage.start_worker(self._settings)

    def leader(self) -> int | None:
        """The Postgres session that holds the leadership."""
        row = self.connection.execute(LEADER).fetchone()
        return None if row is None else row["pid"]

    def shake_leadership(self) -> int:
        """Take the lead from whoever has it, and let all try for it anew. The session that got it."""
        with self._stage.connect(self._settings.database_url) as usurper:
            wait_for(lambda: self._seize_lead(usurper), "the lead is taken")
            time.sleep(random.uniform(1, 2) * self._settings.reaper_interval)
        return wait_for(self.leader, "somebody leads") or 0

    def _seize_lead(self, connection: Connection[DictRow]) -> bool:
        """Another candidate may be faster than this one: try until it succeeds."""
        if (leader := self.leader()) is not None:
            self.connection.execute("SELECT pg_terminate_backend(%s)", (leader,))
        row = connection.execute(TRY_LOCK, {"schema": self._settings.db_schema}).fetchone()
        return row is not None and row["leads"]

    def kill_holder(self, run_id: str) -> tuple[int, float]:
        """Kill whoever executes the run. Its process id and the moment."""
        row = self.connection.execute(HOLDER, (run_id,)).fetchone()
        if row is None:
            raise RuntimeError(f"no worker holds run {run_id}")
        os.kill(row["pid"], signal.SIGKILL)
        return row["pid"], time.monotonic()

    def replace(self, pid: int) -> None:
        """Start a worker in the place of a dead one."""
        self.workers.pop(pid).kill()
        successor = self._worker()
        self.workers[successor.pid] = successor

    def stop(self) -> None:
        for process in (*self.workers.values(), self.web):
            process.stop()
        self.connection.close()


class SupervisedFleet(Fleet):
    """The same under `holdfast serve`, whose supervisor replaces the dead."""

    def _start(self) -> str:
        self.supervisor, url = self._stage.start_serve(self._settings, workers=2)
        return url

    def replace(self, pid: int) -> None:
        def two_online() -> bool:
            row = self.connection.execute(ONLINE, (pid,)).fetchone()
            return row is not None and row["workers"] == 2

        wait_for(two_online, "the dead worker is replaced")

    def stop(self) -> None:
        self.supervisor.stop()
        self.connection.close()


def _follow(response: httpx.Response) -> Iterator[ServerEvent]:
    """The events of a stream, as they come. The server says something every few seconds, so this cannot hang."""
    deadline = time.monotonic() + PATIENCE

    def chunks() -> Iterator[bytes]:
        for chunk in response.iter_raw():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {PATIENCE:g} s: the run ends")
            yield chunk

    response.raise_for_status()
    return read_events(chunks())


def _kill(fleet: Fleet, run_id: str, killed: list[tuple[int, float]]) -> None:
    killed.append(fleet.kill_holder(run_id))


def _round(fleet: Fleet, client: httpx.Client) -> dict[str, Any]:
    leader = fleet.shake_leadership()
    thread_id = client.post("/threads", json={}).raise_for_status().json()["thread_id"]
    body = {"assistant_id": "steps", "input": {"seconds": STEP_SECONDS}, "stream_mode": ["updates", "values"]}
    killed: list[tuple[int, float]] = []
    taken_over_at: float | None = None
    run_id = ""
    done: list[str] = []
    values: dict[str, Any] = {}
    with client.stream("POST", f"/threads/{thread_id}/runs/stream", json=body) as response:
        for event in _follow(response):
            arrived = time.monotonic()
            if event.name == "metadata":
                run_id = event.data["run_id"]
                if event.data["attempt"] > 1 and taken_over_at is None:
                    taken_over_at = arrived
            elif event.name == "updates":
                done += event.data
                if done == STEPS[:2]:
                    # Any moment of the third step, from a thread, so that what comes meanwhile is seen when it comes.
                    delay = random.uniform(0.1, 0.9) * STEP_SECONDS
                    threading.Timer(delay, _kill, (fleet, run_id, killed)).start()
            elif event.name == "values":
                values = event.data
    if not killed or taken_over_at is None or done != STEPS or values.get("done") != STEPS:
        raise RuntimeError(f"run {run_id} was not taken over as it should be: steps {done}, values {values}")
    pid, killed_at = killed[0]
    led = fleet.leader() != leader
    fleet.replace(pid)
    return {"seconds": taken_over_at - killed_at, "killed_the_leader": led}


def _kills(stage: Stage, fleet: Fleet, name: str, rounds: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with httpx.Client(base_url=fleet.url, timeout=30) as client:
        for number in range(1, rounds + 1):
            found.append(_round(fleet, client))
            leads = ", which led" if found[-1]["killed_the_leader"] else ""
            stage.say(f"takeover: {number}/{rounds}: {found[-1]['seconds']:.2f} s after the kill of {name}{leads}")
    fleet.stop()
    return found


def measure(stage: Stage, *, quick: bool = False) -> Finding:
    rounds = 3 if quick else ROUNDS
    measures: list[Measure] = []
    details: dict[str, Any] = {}
    for name, kind in (("a worker", Fleet), ("a worker under `serve`", SupervisedFleet)):
        found = details[name] = _kills(stage, kind(stage), name, rounds)
        seconds = [one["seconds"] for one in found]
        leaders = sum(one["killed_the_leader"] for one in found)
        measures += [
            Measure(
                name=f"p50 from kill -9 of {name} to the next event at the client",
                target=0.5,
                rule="below",
                measured=median(seconds),
                unit=" s",
                note=f"{rounds} kills, {leaders} of them of the leader",
            ),
            Measure(name=f"worst of them, {name}", target=6, rule="below", measured=max(seconds), unit=" s"),
        ]
    return Finding(figure="takeover", measures=measures, details=details)

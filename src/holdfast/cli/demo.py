"""`holdfast demo`: kill a worker in the middle of a run, and show how another worker finishes it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from rich.text import Text

from holdfast.cli.client import Client, RunStream
from holdfast.cli.console import complain, out
from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.fleet import ReadyFleet, run_fleet
from holdfast.cli.options import Config, examples
from holdfast.settings import Settings, environment_names

GRAPH = "steps"
STEPS = ["s1", "s2", "s3", "s4", "s5"]
STEP_SECONDS = 1.5
KILL_AFTER_STEP = "s2"
WORKERS = 2
WORKERS_START_TIMEOUT_SECONDS = 30.0
DEMO_TIMEOUT_SECONDS = 90.0

EPILOG = examples("holdfast demo --config examples/langgraph.json")


def demo(config: Config = Path("examples/langgraph.json")) -> None:
    """Watch a run survive: start two workers, kill the busy one with SIGKILL, see the other finish its run.

    Takes about 20 seconds, uses a temporary directory and ends by itself.

    The exit code is 0 only if the run finished with every step exactly once.
    """
    # The demonstration kills processes. It must never do that on a database that is in use.
    for field in ("database_url", "direct_database_url"):
        for name in environment_names(Settings.model_fields[field]):
            os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-", ignore_cleanup_errors=True) as directory:
        demonstration = Demonstration()
        overrides = {"data_dir": Path(directory), "port": 0, "log_level": "error", "drain_timeout": 3.0}
        limit = threading.Timer(DEMO_TIMEOUT_SECONDS, demonstration.give_up)
        limit.daemon = True
        limit.start()
        demonstration.say("starting Postgres, one web process and two workers")
        code = run_fleet(config, overrides, workers=WORKERS, reload=False, announce=demonstration.run)
        limit.cancel()
    sys.exit(code or demonstration.verdict())


class Demonstration:
    """Runs the demonstration in a thread beside the supervisor, prints what happens, and then stops the supervisor."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._killed_at: float | None = None
        self._steps: list[str] = []
        self._attempt = 0
        self._takeover: float | None = None
        self._values: dict[str, Any] = {}
        self._status = "never started"

    def say(self, text: str, style: str = "") -> None:
        clock = f"{time.monotonic() - self._began:6.1f} s  "
        out.print(Text.assemble((clock, "dim"), (text, style)))

    def run(self, ready: ReadyFleet) -> None:
        """Run the demonstration; then send this process, the supervisor, SIGTERM."""
        try:
            self._run(ready)
        except CommandError as error:
            complain(str(error))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def give_up(self) -> None:
        complain(f"This should have been over within {DEMO_TIMEOUT_SECONDS:g} seconds.")
        os.kill(os.getpid(), signal.SIGTERM)

    def verdict(self) -> ExitCode:
        """Print what was observed, and whether it is what Holdfast guarantees."""
        counts = Counter(self._steps)
        once = self._steps == STEPS and self._values.get("done") == STEPS
        checks = [
            (f"the run ended as {self._status}", self._status == "success"),
            (
                f"the worker was killed and attempt {self._attempt} took over",
                bool(self._takeover) and self._attempt == 2,
            ),
            (f"steps: {', '.join(f'{name} x{counts[name]}' for name in STEPS)}", once),
        ]
        out.print()
        for text, good in checks:
            out.print(f"  {'✓' if good else '✗'} {text}", style="green" if good else "red")
        if not all(good for _, good in checks):
            return ExitCode.FAILURE
        out.print(
            f"\nTaken over {self._takeover:.1f} s after the kill; nothing lost, nothing done twice.", style="bold"
        )
        return ExitCode.OK

    def _run(self, ready: ReadyFleet) -> None:
        assert ready.settings.database_url is not None
        fleet = _WorkerTable(ready.settings.database_url, ready.settings.db_schema)
        fleet.wait_for_workers(WORKERS)
        self.say(f"ready: {ready.url}", "green")
        with Client(ready.url) as client:
            thread_id = client.request("POST", "/threads", json={})["thread_id"]
            body = {
                "assistant_id": GRAPH,
                "input": {"seconds": STEP_SECONDS},
                "stream_mode": ["updates", "values"],
                "stream_resumable": True,
            }
            stream = client.start_run(thread_id, body, notice=self.say)
            self._watch(stream, fleet)
            run = client.run(str(stream.run_id), stream.thread_id)
            self._status = str(run["status"]) if run else "deleted"
        self.say(f"the run ended: {self._status}", "green" if self._status == "success" else "red")

    def _watch(self, stream: RunStream, fleet: _WorkerTable) -> None:
        for event in stream:
            if event.name == "metadata":
                self._attempt = int(event.data["attempt"])
                if self._killed_at is None:
                    self.say(f"run {event.data['run_id']} of {len(STEPS)} steps, {STEP_SECONDS:g} s each")
                elif self._takeover is None:
                    self._takeover = time.monotonic() - self._killed_at
                    self.say(f"another worker goes on (attempt {self._attempt})", "bold yellow")
            elif event.name == "updates":
                for step in event.data:
                    self._steps.append(step)
                    self.say(f"  step {step} is done", "cyan")
                if self._killed_at is None and self._steps[-1] == KILL_AFTER_STEP:
                    self._kill(fleet, str(stream.run_id))
            elif event.name == "values":
                self._values = event.data
            elif event.name == "error":
                self.say(f"error: {event.data}", "red")

    def _kill(self, fleet: _WorkerTable, run_id: str) -> None:
        """Kill the worker of the run in the middle of its next step. The next worker has to start that step again."""
        time.sleep(STEP_SECONDS / 3)
        pid = fleet.worker_of(run_id)
        if pid is None or psutil.Process(pid).ppid() != os.getpid():
            raise CommandError(f"No worker of this demonstration holds the run (process {pid}).")
        os.kill(pid, signal.SIGKILL)
        self._killed_at = time.monotonic()
        self.say(f"kill -9 {pid}: the worker is gone, in the middle of a step", "bold red")


class _WorkerTable:
    """Reads from the database which workers are online and which of them executes a run."""

    def __init__(self, url: str, schema: str) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True, options=f"-c search_path={schema}")

    def wait_for_workers(self, number: int) -> None:
        deadline = time.monotonic() + WORKERS_START_TIMEOUT_SECONDS
        while self._one("SELECT count(*) FROM worker WHERE status = 'online'") < number:
            if time.monotonic() > deadline:
                raise CommandError(f"The workers did not start within {WORKERS_START_TIMEOUT_SECONDS:g} seconds.")
            time.sleep(0.1)

    def worker_of(self, run_id: str) -> int | None:
        pid: int | None = self._one(
            "SELECT worker.pid FROM run JOIN worker USING (worker_id) WHERE run_id = %s AND run.status = 'running'",
            run_id,
        )
        return pid

    def _one(self, statement: str, *parameters: str) -> Any:
        row = self._connection.execute(statement.encode(), parameters).fetchone()
        return row[0] if row else None

"""`holdfast demo`: kill a worker in the middle of a run, and watch another one finish it."""

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
from holdfast.cli.fleet import Ready, run_fleet
from holdfast.cli.options import Config, examples
from holdfast.settings import Settings, environment_names

GRAPH = "steps"
STEPS = ["s1", "s2", "s3", "s4", "s5"]
SECONDS = 1.5
KILL_AFTER = "s2"
WORKERS = 2
PATIENCE = 30.0
LIMIT = 90.0
"""Seconds after which something is wrong."""

EPILOG = examples("holdfast demo --config examples/langgraph.json")


def demo(config: Config = Path("examples/langgraph.json")) -> None:
    """Watch a run survive: start two workers, kill the busy one with SIGKILL, see the other finish its run.

    Takes about 20 seconds, uses a temporary directory and ends by itself.

    The exit code is 0 only if the run finished with every step exactly once.
    """
    # The demonstration kills processes: it must never do that to a database somebody uses.
    for field in ("database_url", "direct_database_url"):
        for name in environment_names(Settings.model_fields[field]):
            os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-", ignore_cleanup_errors=True) as directory:
        play = Demonstration()
        overrides = {"data_dir": Path(directory), "port": 0, "log_level": "error", "drain_timeout": 3.0}
        limit = threading.Timer(LIMIT, play.give_up)
        limit.daemon = True
        limit.start()
        play.tell("starting Postgres, one web process and two workers")
        code = run_fleet(config, overrides, workers=WORKERS, reload=False, announce=play.perform)
        limit.cancel()
    sys.exit(code or play.verdict())


class Demonstration:
    """What happens, told as it happens. Runs beside the supervisor and ends it when it is over."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._killed_at: float | None = None
        self._steps: list[str] = []
        self._attempt = 0
        self._takeover: float | None = None
        self._values: dict[str, Any] = {}
        self._status = "never started"

    def tell(self, text: str, style: str = "") -> None:
        clock = f"{time.monotonic() - self._began:6.1f} s  "
        out.print(Text.assemble((clock, "dim"), (text, style)))

    def perform(self, ready: Ready) -> None:
        """The whole play; then the supervisor is asked to stop, as Ctrl-C would."""
        try:
            self._perform(ready)
        except CommandError as error:
            complain(str(error))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def give_up(self) -> None:
        complain(f"This should have been over within {LIMIT:g} seconds.")
        os.kill(os.getpid(), signal.SIGTERM)

    def verdict(self) -> ExitCode:
        """Say what was seen, and whether it is what Holdfast promises."""
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

    def _perform(self, ready: Ready) -> None:
        assert ready.settings.database_url is not None
        fleet = _Fleet(ready.settings.database_url, ready.settings.db_schema)
        fleet.wait_for_workers(WORKERS)
        self.tell(f"ready: {ready.url}", "green")
        with Client(ready.url) as client:
            thread_id = client.request("POST", "/threads", json={})["thread_id"]
            body = {
                "assistant_id": GRAPH,
                "input": {"seconds": SECONDS},
                "stream_mode": ["updates", "values"],
                "stream_resumable": True,
            }
            stream = client.start_run(thread_id, body, notice=self.tell)
            self._watch(stream, fleet)
            run = client.run(str(stream.run_id), stream.thread_id)
            self._status = str(run["status"]) if run else "deleted"
        self.tell(f"the run ended: {self._status}", "green" if self._status == "success" else "red")

    def _watch(self, stream: RunStream, fleet: _Fleet) -> None:
        for event in stream:
            if event.name == "metadata":
                self._attempt = int(event.data["attempt"])
                if self._killed_at is None:
                    self.tell(f"run {event.data['run_id']} of {len(STEPS)} steps, {SECONDS:g} s each")
                elif self._takeover is None:
                    self._takeover = time.monotonic() - self._killed_at
                    self.tell(f"another worker goes on (attempt {self._attempt})", "bold yellow")
            elif event.name == "updates":
                for step in event.data:
                    self._steps.append(step)
                    self.tell(f"  step {step} is done", "cyan")
                if self._killed_at is None and self._steps[-1] == KILL_AFTER:
                    self._kill(fleet, str(stream.run_id))
            elif event.name == "values":
                self._values = event.data
            elif event.name == "error":
                self.tell(f"error: {event.data}", "red")

    def _kill(self, fleet: _Fleet, run_id: str) -> None:
        """In the middle of the next step, which then has to be started again."""
        time.sleep(SECONDS / 3)
        pid = fleet.worker_of(run_id)
        if pid is None or psutil.Process(pid).ppid() != os.getpid():
            raise CommandError(f"No worker of this demonstration holds the run (process {pid}).")
        os.kill(pid, signal.SIGKILL)
        self._killed_at = time.monotonic()
        self.tell(f"kill -9 {pid}: the worker is gone, in the middle of a step", "bold red")


class _Fleet:
    """Who is there and who holds what, from the database."""

    def __init__(self, url: str, schema: str) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True, options=f"-c search_path={schema}")

    def wait_for_workers(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._one("SELECT count(*) FROM worker WHERE status = 'online'") < number:
            if time.monotonic() > deadline:
                raise CommandError(f"The workers did not start within {PATIENCE:g} seconds.")
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

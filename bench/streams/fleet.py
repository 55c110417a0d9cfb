"""A web process, perhaps a worker, and the clients in a process of their own, on a fresh database."""

from __future__ import annotations

import json
import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import psutil
import redis

from bench.stage import PROJECT, Process, Stage, wait_for
from holdfast.graphs.assistants import assistant_id
from holdfast.settings import Settings, load_settings

Carrier = Literal["postgres", "redis"]
CARRIERS: tuple[Carrier, ...] = ("postgres", "redis")
PATIENCE = 300.0
"""Seconds an order to the clients may take before something is wrong."""

THREADS = """
INSERT INTO thread (thread_id, status) SELECT gen_random_uuid(), 'idle' FROM generate_series(1, %s) RETURNING thread_id
"""


class Clients:
    """The process of the clients. See `bench.streams.load` for what it can be told."""

    def __init__(self, stage: Stage, settings: Settings, name: str) -> None:
        path = stage.directory / f"{name}.sock"
        self.process = stage.start(settings, "bench.streams.load", "--control", str(path))
        wait_for(lambda: self._dial(path), "the clients take orders")
        self._answers = self._socket.makefile("rb")

    def _dial(self, path: Path) -> bool:
        self.process.check()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        with suppress(OSError):
            self._socket.connect(str(path))
            return True
        self._socket.close()
        return False

    def order(self, name: str, **arguments: Any) -> Any:
        """Have it done. Raises RuntimeError with what went wrong."""
        self.begin(name, **arguments)
        return self.result()

    def begin(self, name: str, **arguments: Any) -> None:
        self._socket.sendall(json.dumps([name, arguments], default=str).encode() + b"\n")

    def result(self) -> Any:
        line = self._answers.readline()
        if not line:
            self.process.check()
            raise RuntimeError("the clients do not answer")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the clients failed: {answer['error']}")
        return answer["result"]

    def stop(self) -> None:
        self._answers.close()
        self._socket.close()
        self.process.stop()


class Fleet:
    """Use as a context manager. `cpu` is what each of them has spent so far, in seconds."""

    def __init__(self, stage: Stage, carrier: Carrier, name: str, *, worker: bool = True, **settings: Any) -> None:
        self.stage = stage
        self.carrier = carrier
        self._name = name
        self._worker = worker
        self._overrides = settings
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        # As many streams as the system lets a process have; the processes inherit it.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.redis: Process | None = None
        if self.carrier == "redis":
            self.redis, self._overrides["redis_url"] = self._start_redis()
        self.settings = self.stage.database(self._name, **self._overrides)
        self.connection = self._exit.enter_context(self.stage.connect(self.settings.database_url))
        self.web, self.url = self.stage.start_web(self.settings, PROJECT)
        self._exit.callback(self.web.stop)
        self.worker: Process | None = None
        if self._worker:
            self.worker = self.stage.start_worker(self.settings, PROJECT)
            self._exit.callback(self.worker.stop)
        self.clients = Clients(self.stage, self.settings, self._name)
        self._exit.callback(self.clients.stop)
        self.clients.order("server", port=urlsplit(self.url).port)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _start_redis(self) -> tuple[Process, str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        process = self.stage.start(load_settings({}), "bench.streams.redis_guard", "--port", str(port))
        self._exit.callback(process.stop)

        def answers() -> bool:
            process.check()
            with redis.Redis(port=port, socket_timeout=1) as client, suppress(redis.RedisError):
                return bool(client.ping())
            return False

        wait_for(answers, "Redis answers")
        return process, f"redis://127.0.0.1:{port}/0"

    def threads(self, count: int) -> list[str]:
        """New threads, made behind the server's back: what it costs to make them is not the matter."""
        return [str(row["thread_id"]) for row in self.connection.execute(THREADS, (count,)).fetchall()]

    def run_body(self, graph: str, given: Any, modes: Sequence[str]) -> dict[str, Any]:
        return {"assistant_id": str(assistant_id(graph)), "input": given, "stream_mode": list(modes)}

    def cpu(self) -> dict[str, float]:
        found = {"web": self.web.cpu_seconds(), "clients": self.clients.process.cpu_seconds()}
        if self.worker is not None:
            found["worker"] = self.worker.cpu_seconds()
        if self.redis is not None:
            found["redis"] = _family_cpu(self.redis.pid)
        found["postgres"] = _family_cpu(psutil.Process(self.connection.info.backend_pid).ppid())
        return found

    @contextmanager
    def spending(self, spent: dict[str, float]) -> Iterator[None]:
        """Puts into `spent` the CPU seconds that everybody spends in the block."""
        before = self.cpu()
        yield
        spent.update({name: seconds - before[name] for name, seconds in self.cpu().items()})


def _family_cpu(pid: int) -> float:
    process = psutil.Process(pid)
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            total += float(times.user + times.system)
    return total


def shares(spent: dict[str, float], seconds: float) -> str:
    """CPU as shares of one core."""
    return ", ".join(f"{name} {100 * used / seconds:.0f} %" for name, used in sorted(spent.items()))

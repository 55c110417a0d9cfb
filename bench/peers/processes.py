"""Processes of the comparison: started, looked at, and ended by their own numbers, with everything they started."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

STOP_TIMEOUT = 15.0
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "USER")
"""Of this process's environment: anything else might configure one of the servers."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**added: str) -> dict[str, str]:
    return {name: os.environ[name] for name in KEPT if name in os.environ} | added


class Program:
    """A program and whatever it starts."""

    def __init__(
        self, command: list[str], environ: Mapping[str, str], cwd: Path, log: Path, fds: tuple[int, ...] = ()
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environ),
                cwd=cwd,
                pass_fds=fds,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        self._process = psutil.Process(self._popen.pid)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def check(self) -> None:
        """Raises RuntimeError when the program has ended."""
        if (code := self._popen.poll()) is not None:
            raise RuntimeError(f"it has ended ({code}): {self.log.read_text(errors='replace').strip()[-1500:]}")

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        return self._popen.wait(timeout)

    def stop(self) -> None:
        """Ask it to end, then end what is left of its family. A child may outlive the one that started it."""
        family = members(self.pid)
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(STOP_TIMEOUT)
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=5)


def members(pid: int) -> list[psutil.Process]:
    """A process and everything below it."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes and everything below them."""
    total = 0.0
    for pid in pids:
        for member in members(pid):
            with suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                # What has ended is with whoever waited for it: a server's connections come and go.
                total += float(times.user + times.system + times.children_user + times.children_system)
    return total


def memory(pids: list[int]) -> list[int]:
    """Bytes of each process that would be free if it ended, largest first."""
    found = []
    for pid in pids:
        for member in members(pid):
            with suppress(psutil.Error):
                found.append(int(member.memory_full_info().uss))
    return sorted(found, reverse=True)


def wait_listening(program: Program, port: int, timeout: float) -> None:
    """Until somebody accepts connections there. Raises RuntimeError when the program ends first, or TimeoutError."""
    deadline = time.monotonic() + timeout
    while True:
        program.check()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on {port} after {timeout:g} s")
        time.sleep(0.05)


def _end_with_parent() -> Callable[[], None] | None:
    """What a new program does first: ask the kernel for SIGTERM when this process is killed."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # Looked up here: after the fork nothing may be imported or allocated.
    return lambda: libc.prctl(1, int(signal.SIGTERM))

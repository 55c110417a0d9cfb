"""Real processes under test: waiting for conditions, reading their output, finding what they left behind."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self, TypeVar

import psutil

from tests.support import error_logs

T = TypeVar("T")
DEADLINE = 150.0


def wait_for(condition: Callable[[], T], what: str, timeout: float = DEADLINE) -> T:
    """Return the first true value of `condition`, or fail naming `what` was waited for."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def processes_naming(text: str) -> list[int]:
    """The processes with `text` in their command line, other than this one."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if text in command and process.info["status"] != psutil.STATUS_ZOMBIE and process.info["pid"] != os.getpid():
            found.append(process.info["pid"])
    return found


def processes_in(directory: Path) -> list[int]:
    """The processes whose current directory is `directory`."""
    return [
        process.info["pid"] for process in psutil.process_iter(["pid", "cwd"]) if process.info["cwd"] == str(directory)
    ]


def postmaster(data_dir: Path) -> int:
    """The process id of the embedded Postgres, or 0."""
    try:
        pid = int((data_dir / "postgres" / "postmaster.pid").read_text().split("\n", 1)[0])
    except (OSError, ValueError):
        return 0
    return pid if alive(pid) else 0


class Program:
    """A subprocess whose lines (stdout and stderr together) can be waited for."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.lines: list[str] = []
        self._arriving: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environ or {})},
            cwd=cwd,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def expect(self, pattern: str, timeout: float = DEADLINE) -> re.Match[str]:
        """The next line that matches, skipping others."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._arriving.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line like {pattern!r} within {timeout:g} s:\n{self.output}") from None
            assert line is not None, f"ended before a line like {pattern!r}:\n{self.output}"
            if match := re.search(pattern, line):
                return match

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait(self, timeout: float = DEADLINE) -> int:
        return self.process.wait(timeout)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            line = line.rstrip("\n")
            error_logs.see(line)
            self.lines.append(line)
            self._arriving.put(line)
        self._arriving.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        # What it started notices by itself, and then the output ends; that is part of what is tested.
        self._reader.join(DEADLINE)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def holdfast(*arguments: str | Path) -> list[str | Path]:
    """The command line of `holdfast`, of the interpreter under test."""
    return [sys.executable, "-m", "holdfast", *arguments]

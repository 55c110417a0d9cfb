"""The embedded Postgres of `dev` and `serve`, used when DATABASE_URL is not set.

Four kinds of process take part:

    supervisor ──┬── web, worker …        each of them holds the write end of one pipe
                 └── guard ── postgres    the guard reads the other end

The guard starts Postgres, reports its URL and waits for the end of the pipe. The end comes when the last process that
holds the pipe has exited: the kernel closes the pipe of a process that was killed with SIGKILL, too. Then the guard
stops Postgres and exits. So Postgres runs for as long as any child is draining, and no longer.

If Postgres dies, the guard starts it again. If the guard is killed, the kernel stops Postgres (on Linux).

Guarantees: one Holdfast per data directory; a directory is either fully initialised or absent; commits are durable
(fsync stays on); only the user who owns the data can open the socket.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
import structlog

from holdfast.db.embedded_files import make_private, open_private
from holdfast.db.embedded_server import STOP_TIMEOUT_SECONDS, EmbeddedServer, log_path
from holdfast.errors import DatabaseError, DataDirectoryInUse
from holdfast.lifecycle.descriptors import readable

log = structlog.get_logger(__name__)

DIRECTORY_LOCK_TIMEOUT_SECONDS = 15.0


class EmbeddedPostgres:
    """The supervisor's handle on the embedded Postgres. Start it, pass `holder_fd` to each child, and close it after
    they have exited.

    Postgres runs until `close` has been called (or this process has died) and every child that inherited `holder_fd`
    has exited. A child must make the descriptor non-inheritable before it starts processes itself.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        environ: Mapping[str, str] | None = None,
        for_command: bool = False,
    ) -> None:
        """`say` prints a message for the operator. `environ` is the environment of the guard, which configures its
        logging from it. `for_command`: the data directory is needed only for a moment, so other processes wait for it
        instead of failing."""
        self._environ = environ
        self._for_command = for_command
        self.data_dir = data_dir.expanduser().absolute()
        self._say = say
        self._fds: dict[str, int] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def holder_fd(self) -> int:
        return self._fds["hold_write"]

    @property
    def guard_pid(self) -> int:
        assert self._guard is not None
        return self._guard.pid

    def claim(self) -> None:
        """Lock the data directory. Raises DatabaseError naming the process that holds it. `start` does this, too."""
        if "lock" in self._fds:
            return
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private(self.data_dir)
            self._fds["lock"] = _lock(self.data_dir, for_command=self._for_command)
        except OSError as error:
            raise DatabaseError(f"HOLDFAST_DATA_DIR={self.data_dir}: {error.strerror}") from None

    def start(self) -> str:
        """Start Postgres and return its URL. On DatabaseError, no process and no descriptor is left behind."""
        try:
            self.claim()
            self._fds["hold_read"], self._fds["hold_write"] = os.pipe()
            return self._start_guard()
        except BaseException:
            self.close()
            raise

    def ensure_guard(self) -> bool:
        """Start a new guard if the old one has died; it starts Postgres again under the same URL."""
        if self._guard is None or self._guard.poll() is None:
            return False
        self._start_guard()
        return True

    def close(self, timeout: float = STOP_TIMEOUT_SECONDS + 30) -> None:
        """Close the pipe, and wait until the guard has stopped Postgres."""
        if (holder := self._fds.pop("hold_write", None)) is not None:
            os.close(holder)
        if self._guard is not None:
            try:
                self._guard.wait(timeout)
            except subprocess.TimeoutExpired:
                self._say(f"Postgres in {self.data_dir} is still stopping; process {self._guard.pid} sees to it.")
            self._guard = None
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _start_guard(self) -> str:
        ready_read, ready_write = os.pipe()
        try:
            hold, lock = self._fds["hold_read"], self._fds["lock"]
            command = [
                sys.executable,
                "-m",
                "holdfast.db.embedded",
                str(self.data_dir),
                str(hold),
                str(ready_write),
            ]
            # A new session, so that Ctrl-C in the terminal does not reach the guard. The guard inherits the lock, which
            # is therefore held until Postgres has stopped, even if this process dies first.
            self._guard = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                pass_fds=(hold, ready_write, lock),
                start_new_session=True,
            )
            os.close(ready_write)
            ready_write = -1
            return self._read_report(ready_read)
        finally:
            os.close(ready_read)
            if ready_write >= 0:
                os.close(ready_write)

    def _read_report(self, fd: int) -> str:
        if not readable([fd], 5):
            self._say(f"Postgres is taking its time to start; its log is {log_path(self.data_dir)}")
        with os.fdopen(os.dup(fd), "rb") as pipe:
            line = pipe.readline()
        if not line:
            raise DatabaseError(f"The embedded Postgres in {self.data_dir} could not be started: its guard has died.")
        report: dict[str, str] = json.loads(line)
        if "error" in report:
            raise DatabaseError(report["error"])
        return report["url"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# The lock file contains the process id, followed by this word if the process is a command.
COMMAND_MARK = "command"


def _lock(data_dir: Path, *, for_command: bool) -> int:
    """Lock the directory for this process, and return the descriptor that holds the lock.

    Waits up to DIRECTORY_LOCK_TIMEOUT_SECONDS for a command, and for the guard of a process that has ended: it may be
    stopping Postgres.
    """
    fd = open_private(data_dir / "lock", os.O_RDWR)
    deadline = time.monotonic() + DIRECTORY_LOCK_TIMEOUT_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner, _, kind = os.pread(fd, 32, 0).decode().strip().partition(" ")
            alive = owner.isdigit() and psutil.pid_exists(int(owner))
            by_command = kind == COMMAND_MARK
            if (by_command or not alive) and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            os.close(fd)
            raise DataDirectoryInUse(
                f"{data_dir} is in use by another Holdfast (process {owner or 'unknown'}). Stop that one "
                "first, or give this one a directory of its own with HOLDFAST_DATA_DIR.",
                by_command=by_command,
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {COMMAND_MARK if for_command else ''}".strip().encode(), 0)
        return fd


def _report(fd: int, **report: str) -> None:
    with suppress(BrokenPipeError):  # The supervisor has exited. The other pipe shows this, too.
        os.write(fd, json.dumps(report).encode() + b"\n")
    os.close(fd)


def guard(data_dir: Path, hold_fd: int, ready_fd: int) -> int:
    """Run Postgres for as long as a process holds the other end of `hold_fd`."""

    def abandoned(wait: float = 0) -> bool:
        return bool(readable([hold_fd], wait))  # Nothing is ever written: readable means the end of the pipe.

    try:
        postgres = EmbeddedServer(data_dir, abandoned)
        postgres.initialise()
    except (DatabaseError, OSError) as error:
        _report(ready_fd, error=str(error))
        return 1
    try:
        if postgres.start():
            _report(ready_fd, url=postgres.url)
    except (DatabaseError, OSError) as error:
        postgres.stop()
        _report(ready_fd, error=str(error))
        return 1
    pause = 0.2
    while not abandoned(0.5):
        if postgres.running():
            continue
        _log_restart(f"The embedded Postgres has ended. Its log: {postgres.log}")
        try:
            postgres.start()
            pause = 0.2
        except (DatabaseError, OSError) as error:
            _log_restart(str(error))
            pause = min(pause * 2, 30)
            if abandoned(pause):
                break
    postgres.stop()
    return 0


def _log_restart(reason: str) -> None:
    # Imported here so that the guard of a healthy Postgres stays small and starts fast.
    from holdfast.telemetry.logs import configure_logging, logging_settings

    configure_logging(logging_settings(os.environ), role="guard", pid=os.getpid())
    log.warning("postgres.restarting", reason=reason)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Only the end of the pipe stops the guard.
    parser = argparse.ArgumentParser(description="Run a private Postgres while the pipe is held.")
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("hold_fd", type=int)
    parser.add_argument("ready_fd", type=int)
    given = parser.parse_args()
    os.chdir("/")
    for fd in (given.hold_fd, given.ready_fd):
        os.set_inheritable(fd, False)
    return guard(given.data_dir, given.hold_fd, given.ready_fd)


if __name__ == "__main__":
    sys.exit(main())

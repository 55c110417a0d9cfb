"""The supervisor of `dev` and `serve`: keeps a few child processes running, and leaves none behind.

One thread with one loop, which signals and requests from other threads wake. Guarantees:

- A child that ends is replaced: at once if it had run for a while, otherwise after growing delays.
- A child that is reported as silent (`silent_children.py`) is killed, unless it is stopping within its grace.
- A child that refuses to start (exit code 78) ends the fleet with the same code, because the next process would refuse,
  too. Under `dev`, a child that had started before is started again after the next change of the project instead.
- After the first SIGTERM, SIGINT or SIGHUP the supervisor sends SIGTERM to every child and waits for them.
- A second signal, or the end of their grace, kills them.
- If the supervisor dies for any reason, the children notice by their lifeline (`supervised_child.py`) and stop.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

import structlog

from holdfast.cli.exit_codes import ExitCode
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.db.session_names import new_process_token
from holdfast.errors import DatabaseError
from holdfast.lifecycle.descriptors import readable

log = structlog.get_logger(__name__)

STARTED_AFTER_SECONDS = 10.0
"""The end of a child that has run for longer does not count as a failure to start."""
FIRST_RESTART_DELAY_SECONDS = 0.5
MAX_RESTART_DELAY_SECONDS = 30.0


@dataclass(frozen=True)
class Child:
    """One process to keep running. The supervisor adds `--lifeline-fd` and the like to its command.

    `probes` is a listening socket on which the child answers probes (`--health-fd`). The supervisor owns it, so its
    address stays the same when the child is replaced, and requests sent before the child can answer wait in it.
    """

    name: str
    command: Sequence[str]
    probes: socket.socket | None = None


@dataclass(frozen=True)
class ChildState:
    """A snapshot of a child. `pid` is None while it has no process. `replacing`: its process is being replaced, on
    purpose or because it has ended after it had run for a while; False if the next process is delayed."""

    child: Child
    pid: int | None
    replacing: bool


class _Slot:
    """The place of one child: its process, or the time when its next process starts."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.process: subprocess.Popen[bytes] | None = None
        self.token = ""
        self.started = 0.0
        self.failures = 0
        self.replacing = False
        self.starts = 0
        self.refused = False
        self.start_at: float | None = None
        self.kill_at: float | None = None

    def deadline(self) -> float | None:
        return self.kill_at if self.process is not None else self.start_at


class Supervisor:
    """Runs in the main thread, because that is where Python delivers signals."""

    def __init__(
        self,
        children: Sequence[Child],
        *,
        environ: Mapping[str, str],
        grace: float,
        postgres: EmbeddedPostgres | None = None,
        reload: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """`grace` is how many seconds a child may take to stop. `postgres` is kept running until the children have
        ended. `reload`: `restart` is called after each change of the project that loads. `report` is called with the
        token (`--process-token`) of each child that was killed or has failed; it must not block."""
        self._slots = [_Slot(child) for child in children]
        self._environ = dict(environ)
        self._grace = grace
        self._postgres = postgres
        self._reload = reload
        self._report = report
        self._signals = 0
        self._stopping = False
        self._exit_code = ExitCode.OK
        self._requests: deque[str] = deque()
        self._silent: deque[tuple[int, float]] = deque()
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def grace(self) -> float:
        """Seconds that a child may take to stop."""
        return self._grace

    def states(self) -> list[ChildState]:
        """The state of each child. May be called from any thread."""
        return [self.state(number) for number in range(len(self._slots))]

    def state(self, number: int) -> ChildState:
        """The state of one child, by its index. May be called from any thread."""
        slot = self._slots[number]
        process = slot.process
        running = process is not None and process.returncode is None
        pid = process.pid if process and running else None
        between = pid is None and not slot.failures and not slot.refused
        return ChildState(slot.child, pid, slot.replacing or between)

    def restart(self, name: str) -> None:
        """Replace the children with this name gracefully, and start each child that waits for a change. May be called
        from any thread."""
        self._requests.append(name)
        self._wake()

    def kill_silent(self, pid: int, seconds: float) -> None:
        """Kill a child that has not answered for `seconds`. It is replaced like any child that ends. May be called from
        any thread."""
        self._silent.append((pid, seconds))
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # The buffer is full, so the loop is awake already; or the loop has ended.
            self._wake_write.send(b"\0")

    def run(self) -> ExitCode:
        """Start the children and keep them running until a signal has stopped the supervisor and all have ended."""
        previous = self._take_signals()
        try:
            for slot in self._slots:
                self._start(slot)
            while not self._stopping or any(slot.process for slot in self._slots):
                self._wait()
                self._handle_signals()
                self._handle_restart_requests()
                self._reap()
                self._kill_silent()
                self._handle_deadlines()
                self._check_postgres()
            return self._exit_code
        finally:
            self._kill()
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(self._lifeline_read)
            os.close(self._lifeline_write)
            self._wake_read.close()
            self._wake_write.close()

    def _take_signals(self) -> dict[signal.Signals, signal._HANDLER]:
        def count(_number: int, _frame: FrameType | None) -> None:
            self._signals += 1

        previous: dict[signal.Signals, signal._HANDLER] = {}
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Under nohup SIGHUP is ignored, and must stay so.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, count)
        # Only a signal with a handler writes to the wake-up descriptor. SIGCHLD must wake the loop.
        previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return previous

    def _wait(self) -> None:
        deadlines = [deadline for slot in self._slots if (deadline := slot.deadline()) is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        readable([self._wake_read], timeout)
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _handle_signals(self) -> None:
        if self._signals >= 1 and not self._stopping:
            log.info("fleet.stopping")
            self._stop()
        if self._signals >= 2:
            self._kill()

    def _stop(self) -> None:
        self._stopping = True
        for slot in self._slots:
            slot.start_at = None
            self._terminate(slot)

    def _handle_restart_requests(self) -> None:
        while self._requests:
            name = self._requests.popleft()
            for slot in self._slots:
                if (slot.child.name != name and not slot.refused) or self._stopping or slot.replacing:
                    continue
                slot.failures, slot.refused = 0, False
                if slot.process is None:
                    slot.start_at = time.monotonic()
                else:
                    slot.replacing = True
                    self._terminate(slot)

    def _reap(self) -> None:
        for slot in self._slots:
            if slot.process is None or (code := slot.process.poll()) is None:
                continue
            pid, slot.process, slot.kill_at = slot.process.pid, None, None
            if self._report is not None and code not in (ExitCode.OK, ExitCode.CONFIG):
                self._report(slot.token)
            if self._stopping:
                continue
            if slot.replacing:
                slot.replacing = False
                self._start(slot)
                continue
            if code == ExitCode.CONFIG:
                self._refused(slot, pid)
                continue
            lived = time.monotonic() - slot.started
            slot.failures = 0 if lived >= STARTED_AFTER_SECONDS else slot.failures + 1
            delay = 0.0
            if slot.failures:
                delay = min(FIRST_RESTART_DELAY_SECONDS * 2 ** (slot.failures - 1), MAX_RESTART_DELAY_SECONDS)
            slot.start_at = time.monotonic() + delay
            log.warning("child.ended", child=slot.child.name, child_pid=pid, ending=_ending(code), after=delay)

    def _refused(self, slot: _Slot, pid: int) -> None:
        """Do not restart a child that has refused to start: it would refuse again until something is changed."""
        if self._reload and slot.starts > 1:
            slot.refused = True
            log.error("child.refused", child=slot.child.name, child_pid=pid)
            return
        log.error("fleet.refused", child=slot.child.name, child_pid=pid, exit_code=int(ExitCode.CONFIG))
        self._exit_code = ExitCode.CONFIG
        self._stop()

    def _handle_deadlines(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.process is None and slot.start_at is not None and slot.start_at <= now:
                self._start(slot)
            elif slot.process is not None and slot.kill_at is not None and slot.kill_at <= now:
                log.warning("child.killed", child=slot.child.name, child_pid=slot.process.pid)
                slot.process.kill()
                slot.kill_at = now + 1

    def _kill_silent(self) -> None:
        while self._silent:
            pid, seconds = self._silent.popleft()
            for slot in self._slots:
                # A child that is stopping is killed at the end of its grace.
                if slot.process is None or slot.process.pid != pid or slot.kill_at is not None:
                    continue
                slot.process.kill()
                log.error("child.silent", child=slot.child.name, child_pid=pid, seconds=seconds)

    def _check_postgres(self) -> None:
        if self._postgres is None or self._stopping:
            return
        try:
            if self._postgres.ensure_guard():
                log.warning("postgres.guard_replaced")
        except DatabaseError as error:
            log.error("postgres.gone", error=str(error))
            self._exit_code = ExitCode.CONFIG
            self._stop()

    def _start(self, slot: _Slot) -> None:
        slot.start_at = slot.kill_at = None
        fds = [self._lifeline_read]
        command = [*slot.child.command, "--lifeline-fd", str(self._lifeline_read)]
        if self._postgres is not None:
            fds.append(self._postgres.holder_fd)
            command += ["--holder-fd", str(self._postgres.holder_fd)]
        if slot.child.probes is not None:
            fds.append(slot.child.probes.fileno())
            command += ["--health-fd", str(slot.child.probes.fileno())]
        if self._report is not None:
            # A new token for each process, so that the report of its end is never taken for its successor's.
            slot.token = new_process_token()
            command += ["--process-token", slot.token]
        slot.started = time.monotonic()
        slot.starts += 1
        try:
            # A process group of its own: Ctrl-C in a terminal signals only the supervisor, which sends the child one
            # signal. A second one would make the child stop at once.
            slot.process = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, pass_fds=fds, process_group=0
            )
        except OSError as error:
            slot.failures += 1
            slot.start_at = time.monotonic() + MAX_RESTART_DELAY_SECONDS
            log.error("child.not_started", child=slot.child.name, error=str(error), after=MAX_RESTART_DELAY_SECONDS)

    def _terminate(self, slot: _Slot) -> None:
        if slot.process is not None:
            slot.process.terminate()
            slot.kill_at = time.monotonic() + self._grace

    def _kill(self) -> None:
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()
                slot.process.wait()
                slot.process = None


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"

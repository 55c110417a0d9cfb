"""The supervisor of `dev` and `serve`: keeps a few child processes alive, and none after itself.

One thread, one loop, woken by signals and by requests from other threads. Guarantees:

- a child that ends is replaced, at once if it had been running for a while, with growing pauses if not;
- a child that is reported to be silent (`silence.py`) is killed, unless it is stopping within its grace;
- a child that refuses to start (exit code 78) ends the fleet with the same code: another process would refuse, too;
  under `dev`, a child that had started before waits for the next change of the project instead;
- the first SIGTERM, SIGINT or SIGHUP reaches every child as SIGTERM, and the supervisor waits for them;
- the second kills them, and so does the end of their grace;
- when the supervisor itself dies, however it dies, the children notice by their lifeline and stop.
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

STABLE = 10.0
"""Seconds after which a child's end no longer counts as a failure to start."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class Child:
    """One process to keep running. The supervisor adds `--lifeline-fd` and the like to its command.

    `probes` is a listening socket that the child answers probes on (`--health-fd`): the supervisor knows its address,
    and it stays the same when the child is replaced. A question that is asked before the child can answer waits there.
    """

    name: str
    command: Sequence[str]
    probes: socket.socket | None = None


@dataclass(frozen=True)
class ChildState:
    """What the supervisor knows of a child: its process, if there is one, and whether it is being replaced: on purpose,
    or because it has ended after it had run for a while. Not if the next process has to wait."""

    child: Child
    pid: int | None
    replacing: bool


class _Slot:
    """The place of one child: the process in it, or when the next one starts."""

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
        """`grace` is how many seconds a child may take to stop. `postgres` outlives the children. `reload`: somebody
        edits the project and calls `restart` after each change that loads. `report` is called with the token of each
        child (`--process-token`) that was killed or has failed; it must not block."""
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
        """Each child as it is now. May be called from any thread."""
        return [self.state(number) for number in range(len(self._slots))]

    def state(self, number: int) -> ChildState:
        """One child as it is now, by its place among them. May be called from any thread."""
        slot = self._slots[number]
        process = slot.process
        running = process is not None and process.returncode is None
        pid = process.pid if process and running else None
        between = pid is None and not slot.failures and not slot.refused
        return ChildState(slot.child, pid, slot.replacing or between)

    def restart(self, name: str) -> None:
        """Replace the child `name` gracefully, and start each that waits for a change. From any thread."""
        self._requests.append(name)
        self._wake()

    def kill_silent(self, pid: int, seconds: float) -> None:
        """Kill a child that has not answered for some seconds; it is replaced like any that ends. From any thread."""
        self._silent.append((pid, seconds))
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # It is woken already, or has ended.
            self._wake_write.send(b"\0")

    def run(self) -> ExitCode:
        """Start the children and see to them until a signal has asked for the end and all of them are gone."""
        previous = self._take_signals()
        try:
            for slot in self._slots:
                self._start(slot)
            while not self._stopping or any(slot.process for slot in self._slots):
                self._wait()
                self._obey_signals()
                self._obey_requests()
                self._reap()
                self._kill_silent()
                self._keep_deadlines()
                self._keep_postgres()
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
            # nohup has SIGHUP ignored, and means it.
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, count)
        # A handler is what makes the end of a child wake the loop.
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

    def _obey_signals(self) -> None:
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

    def _obey_requests(self) -> None:
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
            slot.failures = 0 if lived >= STABLE else slot.failures + 1
            pause = min(FIRST_PAUSE * 2 ** (slot.failures - 1), LONGEST_PAUSE) if slot.failures else 0.0
            slot.start_at = time.monotonic() + pause
            log.warning("child.ended", child=slot.child.name, child_pid=pid, ending=_ending(code), after=pause)

    def _refused(self, slot: _Slot, pid: int) -> None:
        """A child has said what must change first. Started again, it would only say so again."""
        if self._reload and slot.starts > 1:
            slot.refused = True
            log.error("child.refused", child=slot.child.name, child_pid=pid)
            return
        log.error("fleet.refused", child=slot.child.name, child_pid=pid, exit_code=int(ExitCode.CONFIG))
        self._exit_code = ExitCode.CONFIG
        self._stop()

    def _keep_deadlines(self) -> None:
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
                # One that was told to stop has its grace, and is killed at the end of it.
                if slot.process is None or slot.process.pid != pid or slot.kill_at is not None:
                    continue
                slot.process.kill()
                log.error("child.silent", child=slot.child.name, child_pid=pid, seconds=seconds)

    def _keep_postgres(self) -> None:
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
            # A new one for each process: nothing that is said of one that has ended is taken for its successor.
            slot.token = new_process_token()
            command += ["--process-token", slot.token]
        slot.started = time.monotonic()
        slot.starts += 1
        try:
            # A process group of its own: Ctrl-C in a terminal comes to the supervisor only, and the child is
            # told once. Two signals would mean: stop at once.
            slot.process = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, pass_fds=fds, process_group=0
            )
        except OSError as error:
            slot.failures += 1
            slot.start_at = time.monotonic() + LONGEST_PAUSE
            log.error("child.not_started", child=slot.child.name, error=str(error), after=LONGEST_PAUSE)

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

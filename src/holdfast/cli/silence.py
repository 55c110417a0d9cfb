"""Ends children that answer nothing any more, so that the supervisor replaces them.

Code that holds Python's global lock (a regular expression that backtracks without end, an extension written in C)
stops every thread of its process: the event loop, the heartbeat, the watchdog and the probes. Nothing inside the
process can end it, but the supervisor can.

Each child is asked over HTTP, a worker for /live on its socket of probes, the web process for /ok. Any answer counts,
and so does a connection that the child closes: both need a Python that runs. A child that has answered once, or a web
process that has begun to listen, and then stays silent for longer than the limit is killed. Before that it is starting,
and may import for as long as it likes.
"""

from __future__ import annotations

import socket
import threading
import time

import structlog

from holdfast.cli.supervisor import ChildState, Supervisor
from holdfast.lifecycle.descriptors import readable
from holdfast.settings import Settings

log = structlog.get_logger(__name__)

SILENCE_MARGIN_SECONDS = 10.0
"""Beyond the longest time that the rules of the worker itself may take: on a busy machine an answer takes a while."""
ASK_INTERVAL_SECONDS = 5.0
"""Between an answer and the next question."""
LOOK_SECONDS = 0.5
"""Between two looks at whether the answer has come, or whether another process is there to be asked."""

Address = tuple[str, int]


def silence_limit(settings: Settings) -> float | None:
    """Seconds that a child may be silent. None: for ever, which BLOCKED_LOOP_LIMIT_SECONDS=0 asks for.

    Not before the lease has expired: until then a worker may come back to its runs.
    """
    if settings.blocked_loop_limit == 0:
        return None
    return max(settings.lease, settings.blocked_loop_limit) + SILENCE_MARGIN_SECONDS


class SilenceWatch:
    """Asks each child in a thread of its own, from `start` to `stop`."""

    def __init__(self, supervisor: Supervisor, web: Address, limit: float) -> None:
        """`web` is where a child without a socket of probes answers. `limit` is in seconds."""
        self._supervisor = supervisor
        self._web = web
        self._limit = limit
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(number,), name=f"silence-{number}", daemon=True)
            for number in range(len(supervisor.states()))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self, number: int) -> None:
        answered: int | None = None
        ask_at = 0.0
        while not self._stopped.wait(LOOK_SECONDS):
            state = self._supervisor.state(number)
            if state.pid is None or (state.pid == answered and time.monotonic() < ask_at):
                continue
            if self._answers(number, state, started=state.pid == answered):
                answered, ask_at = state.pid, time.monotonic() + ASK_INTERVAL_SECONDS

    def _answers(self, number: int, asked: ChildState, *, started: bool) -> bool:
        """Wait for the answer of a process for as long as it lives, and kill it at the limit if it has `started`.

        The time that is counted is what this thread has seen pass. A machine or a container that was stopped as a whole
        and goes on has not been silent meanwhile.
        """
        connection: socket.socket | None = None
        silent = 0.0
        try:
            while not self._stopped.is_set() and self._supervisor.state(number).pid == asked.pid:
                connection = connection or self._question(asked)
                # The web process listens when it can answer. The socket of a worker has been listening since before.
                started = started or (connection is not None and asked.child.probes is None)
                if connection is not None and readable([connection], LOOK_SECONDS):
                    return True
                if connection is None:
                    self._stopped.wait(LOOK_SECONDS)
                silent += LOOK_SECONDS
                if started and silent >= self._limit and asked.pid is not None:
                    self._supervisor.kill_silent(asked.pid, silent)
                    return False
            return False
        finally:
            if connection is not None:
                connection.close()

    def _question(self, asked: ChildState) -> socket.socket | None:
        """A connection on which the child was asked. While it starts, it takes none, or leaves it in the queue."""
        probes = asked.child.probes
        address, path = (self._web, "/ok") if probes is None else (probes.getsockname(), "/live")
        try:
            connection = socket.create_connection(address, timeout=LOOK_SECONDS)
        except OSError:
            return None
        try:
            connection.sendall(f"GET {path} HTTP/1.0\r\nhost: {address[0]}\r\n\r\n".encode())
        except OSError:
            connection.close()
            return None
        return connection

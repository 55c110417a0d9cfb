"""Finds children that no longer answer, so that the supervisor kills and replaces them.

Code that holds Python's global interpreter lock (a regular expression that backtracks without end, an extension in C)
stops every thread of its process: the event loop, the heartbeat, the watchdog and the probes. Only another process can
end it.

Each child gets HTTP requests: a worker GET /live on its probe socket, the web process GET /ok. Any answer counts, and
so does a connection that the child closes, because both show that its interpreter runs. A child is killed if it has
answered before (or, for the web process, has begun to listen) and then does not answer for longer than the limit.
Before that the child is starting, and its imports may take any time.
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
"""Added to the time after which a worker would end itself, because on a busy machine an answer takes a while."""
REQUEST_INTERVAL_SECONDS = 5.0
"""The time between an answer and the next request."""
POLL_SECONDS = 0.5
"""How often to check whether an answer has arrived, or whether the process has been replaced."""

Address = tuple[str, int]


def silence_limit_seconds(settings: Settings) -> float | None:
    """How long a child may be silent; None means no limit (BLOCKED_LOOP_LIMIT_SECONDS=0).

    At least the lease: until it expires, a worker may recover and continue its runs.
    """
    if settings.blocked_loop_limit == 0:
        return None
    return max(settings.lease, settings.blocked_loop_limit) + SILENCE_MARGIN_SECONDS


class SilentChildrenWatch:
    """Sends requests to each child in a thread of its own, from `start` to `stop`."""

    def __init__(self, supervisor: Supervisor, web: Address, limit: float) -> None:
        """`web` is the address of the web process, the child without a probe socket. `limit` is in seconds."""
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
        next_request_at = 0.0
        while not self._stopped.wait(POLL_SECONDS):
            state = self._supervisor.state(number)
            if state.pid is None or (state.pid == answered and time.monotonic() < next_request_at):
                continue
            if self._answers(number, state, started=state.pid == answered):
                answered, next_request_at = state.pid, time.monotonic() + REQUEST_INTERVAL_SECONDS

    def _answers(self, number: int, child_state: ChildState, *, started: bool) -> bool:
        """Send a request and wait for the answer while the process lives. Kill the process at the limit if it has
        `started`.

        Counts the polls of this thread instead of reading a clock: when the whole machine or container was paused, the
        child was not silent.
        """
        connection: socket.socket | None = None
        silent = 0.0
        try:
            while not self._stopped.is_set() and self._supervisor.state(number).pid == child_state.pid:
                connection = connection or self._send_request(child_state)
                # The web process listens once it can answer. The socket of a worker listens before the worker starts.
                started = started or (connection is not None and child_state.child.probes is None)
                if connection is not None and readable([connection], POLL_SECONDS):
                    return True
                if connection is None:
                    self._stopped.wait(POLL_SECONDS)
                silent += POLL_SECONDS
                if started and silent >= self._limit and child_state.pid is not None:
                    self._supervisor.kill_silent(child_state.pid, silent)
                    return False
            return False
        finally:
            if connection is not None:
                connection.close()

    def _send_request(self, child_state: ChildState) -> socket.socket | None:
        """A connection on which a request was sent. None if the child, while it starts, takes no connection."""
        probes = child_state.child.probes
        address, path = (self._web, "/ok") if probes is None else (probes.getsockname(), "/live")
        try:
            connection = socket.create_connection(address, timeout=POLL_SECONDS)
        except OSError:
            return None
        try:
            connection.sendall(f"GET {path} HTTP/1.0\r\nhost: {address[0]}\r\n\r\n".encode())
        except OSError:
            connection.close()
            return None
        return connection

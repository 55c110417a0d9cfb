"""The heartbeat: a thread with its own connection. Graph code that blocks the event loop does not cost the lease.

It registers the worker and renews its lease. The answers contain what the worker must know: cancels, a drain, or that
it was declared lost. Between renewals it watches its own socket. The reaper notices a closed one as well, so the
heartbeat reconnects at once, within the reaper's grace.

The thread ends only with the worker. Each wait for the database has a limit, and everything that fails is tried again.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import psycopg
import structlog
from psycopg import Connection
from psycopg.rows import DictRow

from holdfast.db.answer_timeout import NoAnswer
from holdfast.db.connect import open_blocking_session, with_session_options
from holdfast.engine import lease
from holdfast.engine.lease import Registration, Renewal
from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.descriptors import Waitable, readable
from holdfast.lifecycle.service import ThreadService
from holdfast.settings import Settings

log = structlog.get_logger(__name__)

# Seconds from a worker's registration to its first renewal, at most.
FIRST_RENEWAL_SECONDS = 1.0
# Seconds that `stop` waits until the worker has resigned.
RESIGN_TIMEOUT_SECONDS = 5.0


class Heartbeat(ThreadService):
    """`deadline` is when, on this process's monotonic clock, the lease can no longer be relied on.

    `stop` resigns: the database knows then that the worker is gone. If the database is away, the lease expires.
    `on_renewal`, `on_lost` and `on_no_answer` are called on the event loop. `on_no_answer`: the server did not answer a
    renewal in time.
    """

    name = "heartbeat"
    stop_timeout_seconds = RESIGN_TIMEOUT_SECONDS

    def __init__(
        self,
        settings: Settings,
        registration: Registration,
        on_renewal: Callable[[UUID, Renewal], None],
        on_lost: Callable[[UUID], None],
        claims: Callable[[], int] = lambda: 0,
        problem: Callable[[], str | None] = lambda: None,
        on_no_answer: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._registration = registration
        self._on_renewal = on_renewal
        self._on_lost = on_lost
        self._claims = claims
        self._problem = problem
        self._on_no_answer = on_no_answer
        self._lock = threading.Lock()
        self._worker_id: UUID | None = None
        # The id that is being registered: the same until the database has answered.
        self._registering: UUID | None = None
        self._registered: asyncio.Future[UUID] = self._loop.create_future()
        self._deadline = 0.0
        # Whether a try to renew has failed since the last renewal.
        self._failing = False
        self._commands: list[str] = ["register"]
        # Written to when there is a command, to end the thread's sleep. Made at the start.
        self._wake_read: socket.socket | None = None
        self._wake_write: socket.socket | None = None
        self._halted = False
        self.draining = False
        """Whether `drain` was called."""

    @property
    def deadline(self) -> float:
        with self._lock:
            return self._deadline

    async def _start(self) -> None:
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        await super()._start()

    async def registered(self) -> UUID:
        """The worker's id, once the database knows it."""
        return await asyncio.shield(self._registered)

    def register_anew(self) -> None:
        """Give up the identity and take a new one; ids are never used twice."""
        self._registered = self._loop.create_future()
        self._command("register")

    def drain(self) -> None:
        """Show other processes that this worker claims nothing more."""
        self.draining = True
        self._command("drain")

    def keep_lease(self) -> None:
        """Do not resign at the stop. The lease ends by itself, and each run of the worker counts a crash."""
        self._halted = True

    def halt(self, timeout: float) -> None:
        """End the thread, from another one, and leave the lease as it is. Returns when no renewal can come any more, or
        after the timeout."""
        self._end_requested = self._halted = True
        self._command("halt")
        if self._thread is not None:
            self._thread.join(timeout)

    def _wake_to_end(self) -> None:
        self._command("halt" if self._halted else "resign")

    def _command(self, command: str) -> None:
        with self._lock:
            self._commands.append(command)
        if self._wake_write is not None:
            with suppress(OSError):  # It is closed when the thread has ended.
                self._wake_write.send(b"x")

    def _work(self) -> None:
        connection: Connection[DictRow] | None = None
        backoff = Backoff("heartbeat.outage", "heartbeat.recovered", cap=min(1.0, self._settings.heartbeat))
        try:
            while not self._loop.is_closed() and not self._halted:
                pause = self._settings.heartbeat
                known = self._worker_id if self._registering is None else None
                try:
                    reconnected = connection is None
                    connection = connection or open_blocking_session(self._settings, "heartbeat")
                    if not self._beat(connection, reconnected=reconnected):
                        return
                    backoff.succeeded()
                    if self._worker_id != known:
                        # When many workers start together, the next renewal brings those that registered later.
                        pause = min(pause, FIRST_RENEWAL_SECONDS)
                    self._sleep(connection, pause)
                except Exception as error:
                    # A session that worked until now was closed. Reconnect at once: the reaper has noticed, too.
                    cut = connection is not None and not reconnected
                    if connection is not None:
                        connection.close()
                    connection = None
                    self._try_failed(error, backoff, at_once=cut)
            log.debug("heartbeat.ended", reason="halted" if self._halted else "the event loop is closed")
        finally:
            if connection is not None:
                connection.close()
            for end in (self._wake_read, self._wake_write):
                if end is not None:
                    end.close()

    def _try_failed(self, error: Exception, backoff: Backoff, *, at_once: bool) -> None:
        """Report a failure, and wait before the next try unless it is to be made at once. Without a heartbeat the
        worker would lose its lease again and again, so nothing ends the thread, not even a defect."""
        if self._loop.is_closed():
            return
        self._failing = True
        if not isinstance(error, (psycopg.Error, OSError)):
            log.error("heartbeat.failed", exc_info=error)
        if isinstance(error, NoAnswer) and self._on_no_answer is not None:
            asyncio.run_coroutine_threadsafe(self._on_no_answer(), self._loop)
        pause = backoff.record_failure(error)
        if at_once:
            return
        try:
            self._sleep(None, pause)
        except Exception:
            time.sleep(pause)

    def _beat(self, connection: Connection[DictRow], *, reconnected: bool) -> bool:
        """Renew once, and execute the commands since the last renewal. False: the worker has resigned."""
        session = self._settings.session_url is not None
        with with_session_options(connection, self._settings):
            with self._lock:
                commands = list(self._commands)
            if "resign" in commands:
                if self._worker_id is not None:
                    lease.resign(connection, self._worker_id)
                return False
            if "register" in commands:
                if self._failing and self._worker_id is not None:
                    lease.give_up(connection, self._worker_id)
                renewal: Renewal | None = None
                while renewal is None:
                    self._worker_id = self._registering = self._registering or uuid4()
                    registration = replace(self._registration, worker_id=self._worker_id)
                    started = time.monotonic()
                    renewal = lease.register(connection, registration, self._settings.lease, session=session)
                    if renewal is None:
                        # The answer to an earlier try was lost, and the worker was declared lost meanwhile.
                        self._registering = None
            else:
                started = time.monotonic()
                assert self._worker_id is not None
                renewal = lease.renew(
                    connection,
                    self._worker_id,
                    self._settings.lease,
                    session=session,
                    reconnected=reconnected,
                    claims=self._claims(),
                    problem=self._problem(),
                )
            worker_id = self._worker_id
            assert worker_id is not None
            if "drain" in commands and renewal is not None:
                lease.drain(connection, worker_id)
        self._registering = None
        self._failing = False
        with self._lock:
            del self._commands[: len(commands)]
            if renewal is not None:
                self._deadline = started + self._settings.lease
        if renewal is None:
            self._loop.call_soon_threadsafe(self._on_lost, worker_id)
        else:
            if "register" in commands:
                self._loop.call_soon_threadsafe(self._resolve, worker_id)
            self._loop.call_soon_threadsafe(self._on_renewal, worker_id, renewal)
        return True

    def _resolve(self, worker_id: UUID) -> None:
        if not self._registered.done():
            self._registered.set_result(worker_id)

    def _sleep(self, connection: Connection[DictRow] | None, seconds: float) -> None:
        """Sleep until the next renewal is due, there is a command, or the server closes the connection."""
        assert self._wake_read is not None
        sources: list[int | Waitable] = [self._wake_read]
        if connection is not None and not connection.closed:
            sources.append(connection.fileno())
        if self._wake_read in readable(sources, seconds):
            self._wake_read.recv(4096)

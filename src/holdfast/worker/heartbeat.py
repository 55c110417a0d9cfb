"""The heartbeat: a thread and a connection of its own, so that no graph code can cost the worker its lease.

It registers the worker, renews its lease, and brings back what the database knows and the worker must: cancels, a
drain, or that it has been declared lost. Between renewals it watches its own socket, because a closed one is noticed
by others as well: it reconnects at once, within the grace that the reaper leaves it.

The thread ends only with the worker. Each wait for the database has a limit, and whatever fails is tried again.
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
from holdfast.settings import Settings

log = structlog.get_logger(__name__)

# Seconds from a worker's registration to its first renewal.
SOON = 1.0


class Heartbeat:
    """`deadline` is when, on this process's monotonic clock, the lease can no longer be relied on.

    `on_renewal`, `on_lost` and `on_no_answer` are called on the event loop. `on_no_answer`: the server did not answer a
    renewal in time.
    """

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
        self._settings = settings
        self._registration = registration
        self._on_renewal = on_renewal
        self._on_lost = on_lost
        self._claims = claims
        self._problem = problem
        self._on_silence = on_no_answer
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._worker_id: UUID | None = None
        # The id that is being registered: the same until the database has answered.
        self._registering: UUID | None = None
        self._registered: asyncio.Future[UUID] = self._loop.create_future()
        self._deadline = 0.0
        # Whether a try to renew has failed since the last renewal.
        self._failing = False
        self._commands: list[str] = ["register"]
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._started = self._asked_to_end = self._halted = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @property
    def deadline(self) -> float:
        with self._lock:
            return self._deadline

    @property
    def ended(self) -> bool:
        """Whether the thread has ended without having been asked to."""
        return self._started and not self._asked_to_end and not self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()
        self._started = True

    async def registered(self) -> UUID:
        """The worker's id, once the database knows it."""
        return await asyncio.shield(self._registered)

    def register_anew(self) -> None:
        """Give up the identity and take a new one; ids are never used twice."""
        self._registered = self._loop.create_future()
        self._command("register")

    def drain(self) -> None:
        self._command("drain")

    async def resign(self, timeout: float) -> None:
        """Leave, and end the thread. Bounded: a database that is away will see the lease expire."""
        self._asked_to_end = True
        self._command("resign")
        # Not by `to_thread`: user code may be blocking every thread there is.
        deadline = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def halt(self, timeout: float) -> None:
        """End the thread, from another one, and leave the lease as it is. Returns when no renewal can come any more, or
        after the timeout."""
        self._asked_to_end = self._halted = True
        self._command("halt")
        self._thread.join(timeout)

    def _command(self, command: str) -> None:
        with self._lock:
            self._commands.append(command)
        with suppress(OSError):  # Closed with the thread: there is nobody left to wake.
            self._wake_write.send(b"x")

    def _run(self) -> None:
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
                        # Where many are started together, those who came after us are there in a moment.
                        pause = min(pause, SOON)
                    self._sleep(connection, pause)
                except Exception as error:
                    # A session that worked until now was cut: reconnect at once, because upkeep has noticed, too.
                    cut = connection is not None and not reconnected
                    if connection is not None:
                        connection.close()
                    connection = None
                    self._failed(error, backoff, at_once=cut)
            log.debug("heartbeat.ended", reason="halted" if self._halted else "the event loop is closed")
        finally:
            if connection is not None:
                connection.close()
            self._wake_read.close()
            self._wake_write.close()

    def _failed(self, error: Exception, backoff: Backoff, *, at_once: bool) -> None:
        """Report what failed, and wait before the next try, unless that is to be made at once. Without a heartbeat the
        worker would lose its lease again and again, so nothing ends the thread, not even a defect."""
        if self._loop.is_closed():
            return
        self._failing = True
        if not isinstance(error, (psycopg.Error, OSError)):
            log.error("heartbeat.failed", exc_info=error)
        if isinstance(error, NoAnswer) and self._on_silence is not None:
            asyncio.run_coroutine_threadsafe(self._on_silence(), self._loop)
        pause = backoff.record_failure(error)
        if at_once:
            return
        try:
            self._sleep(None, pause)
        except Exception:
            time.sleep(pause)

    def _beat(self, connection: Connection[DictRow], *, reconnected: bool) -> bool:
        """One renewal, and whatever was asked for since the last. False: the thread's work is done."""
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
        """Until the next renewal is due, somebody asks for something, or the server hangs up."""
        sources: list[int | Waitable] = [self._wake_read]
        if connection is not None and not connection.closed:
            sources.append(connection.fileno())
        if self._wake_read in readable(sources, seconds):
            self._wake_read.recv(4096)

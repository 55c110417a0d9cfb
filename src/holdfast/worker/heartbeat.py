"""The heartbeat: a thread and a connection of its own, so that no graph code can cost the worker its lease.

It registers the worker, renews its lease, and brings back what the database knows and the worker must: cancels, a
drain, or that it has been declared lost. Between renewals it watches its own socket, because a closed one is noticed
by others as well: it reconnects at once, within the grace that the reaper leaves it.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from uuid import UUID, uuid4

import psycopg
import structlog
from psycopg import Connection
from psycopg.rows import DictRow

from holdfast.db.connect import open_blocking_session
from holdfast.engine import lease
from holdfast.engine.lease import Registration, Renewal
from holdfast.settings import Settings
from holdfast.telemetry.backoff import Backoff

log = structlog.get_logger(__name__)

# Seconds from a worker's registration to its first renewal.
SOON = 1.0


class Heartbeat:
    """`deadline` is when, on this process's monotonic clock, the lease can no longer be relied on.

    `on_renewal` and `on_lost` are called on the event loop.
    """

    def __init__(
        self,
        settings: Settings,
        registration: Registration,
        on_renewal: Callable[[UUID, Renewal], None],
        on_lost: Callable[[UUID], None],
        claims: Callable[[], int] = lambda: 0,
    ) -> None:
        self._settings = settings
        self._registration = registration
        self._on_renewal = on_renewal
        self._on_lost = on_lost
        self._claims = claims
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._worker_id: UUID | None = None
        self._registered: asyncio.Future[UUID] = self._loop.create_future()
        self._deadline = 0.0
        self._commands: list[str] = ["register"]
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @property
    def deadline(self) -> float:
        with self._lock:
            return self._deadline

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

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
        self._command("resign")
        # Not by `to_thread`: user code may be blocking every thread there is.
        deadline = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _command(self, command: str) -> None:
        with self._lock:
            self._commands.append(command)
        with suppress(OSError):  # Closed with the thread: there is nobody left to wake.
            self._wake_write.send(b"x")

    def _run(self) -> None:
        connection: Connection[DictRow] | None = None
        backoff = Backoff("heartbeat.outage", "heartbeat.recovered", cap=min(1.0, self._settings.heartbeat))
        try:
            while True:
                pause, known = self._settings.heartbeat, self._worker_id
                try:
                    reconnected = connection is None
                    connection = connection or open_blocking_session(self._settings, "heartbeat")
                    if not self._beat(connection, reconnected=reconnected):
                        return
                    backoff.succeeded()
                    if self._worker_id != known:
                        # Where many are started together, those who came after us are there in a moment.
                        pause = min(pause, SOON)
                except (psycopg.Error, OSError) as error:
                    pause = backoff.note(error)
                    if connection is not None:
                        connection.close()
                    connection = None
                self._sleep(connection, pause)
        except RuntimeError as error:
            # The event loop is gone: the process is ending without having asked us to.
            log.debug("heartbeat.ended", reason=str(error))
        finally:
            if connection is not None:
                connection.close()
            self._wake_read.close()
            self._wake_write.close()

    def _beat(self, connection: Connection[DictRow], *, reconnected: bool) -> bool:
        """One renewal, and whatever was asked for since the last. False: the thread's work is done."""
        session = self._settings.session_url is not None
        with nullcontext() if session else connection.transaction():
            if not session:
                connection.execute(f"SET LOCAL search_path TO {self._settings.db_schema}".encode())
            with self._lock:
                commands = list(self._commands)
            if "resign" in commands:
                if self._worker_id is not None:
                    lease.resign(connection, self._worker_id)
                return False
            if "register" in commands:
                self._worker_id = uuid4()
                registration = replace(self._registration, worker_id=self._worker_id)
                started = time.monotonic()
                renewal: Renewal | None = lease.register(
                    connection, registration, self._settings.lease, session=session
                )
            else:
                started = time.monotonic()
                assert self._worker_id is not None
                if "drain" in commands:
                    lease.drain(connection, self._worker_id)
                renewal = lease.renew(
                    connection,
                    self._worker_id,
                    self._settings.lease,
                    session=session,
                    reconnected=reconnected,
                    claims=self._claims(),
                )
        worker_id = self._worker_id
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
        sources: list[socket.socket | int] = [self._wake_read]
        if connection is not None and not connection.closed:
            sources.append(connection.fileno())
        readable, _, _ = select.select(sources, [], [], seconds)
        if self._wake_read in readable:
            self._wake_read.recv(4096)

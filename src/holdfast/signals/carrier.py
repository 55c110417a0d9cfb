"""The base of all carriers of hints: listeners, the queue of unsent hints, and the check that hints arrive.

Each process regularly publishes a ping on its own channel and waits for the echo. While the echo arrives, other hints
do, too. When it is missing, the process logs this once, polls, and reconnects until the echo is back. This also detects
a broken connection that neither side has closed.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import structlog

from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.cancelling import run_together
from holdfast.lifecycle.service import TaskService
from holdfast.settings import Settings
from holdfast.signals import Listener, Topic
from holdfast.telemetry.exceptions import describe, type_and_place

log = structlog.get_logger(__name__)

# The unsent hints that are kept while the carrier is unavailable. Old hints have no value, because processes poll.
MAX_UNSENT_HINTS = 10_000
# How long the echo of a ping may take.
ECHO_TIMEOUT_SECONDS = 5.0
# Further time, in case something has blocked the event loop and the echo has arrived but is not read.
LATE_ECHO_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Hint:
    """A hint to be sent. `topic` None: the ping of the process."""

    topic: Topic | None
    payload: str
    thread_id: UUID | None = None


PING = Hint(None, "")


class Carrier(TaskService):
    """The part of `Signals` that is common to all carriers. Hints are sent and received while it is started."""

    name = "signals"
    max_payload: int

    def __init__(self, settings: Settings, ping_interval: float) -> None:
        super().__init__()
        self._settings = settings
        self._ping_interval = ping_interval
        self._echo_timeout = min(ECHO_TIMEOUT_SECONDS, ping_interval)
        self._listeners: dict[Topic, list[Listener]] = defaultdict(list)
        self._name = uuid4().hex[:16]
        self._unsent: list[Hint] = []
        self._send_requested = asyncio.Event()
        self._echo_received = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._echo_or_reconnect = asyncio.Event()
        # Set when the next ping must be sent without waiting for the interval.
        self._ping_now = asyncio.Event()
        # The ping is not in the queue of unsent hints, because it must not be dropped with them.
        self._ping_due = False
        self._ping_sent = asyncio.Event()
        self._degraded_since: float | None = None

    # --- the interface ----------------------------------------------------------------------------

    @property
    def degraded(self) -> bool:
        return self._degraded_since is not None

    def listen(self, topic: Topic, listener: Listener) -> None:
        self._listeners[topic].append(listener)

    @abstractmethod
    def follow(self, thread_id: UUID, on_subscribed: Callable[[], None]) -> None: ...

    @abstractmethod
    def unfollow(self, thread_id: UUID) -> None: ...

    def publish(self, topic: Topic, payload: str, *, thread_id: UUID | None = None, max_delay: float = 0.0) -> None:
        hint = Hint(topic, payload, thread_id)
        if len(payload) > self.max_payload or len(payload.encode()) > self.max_payload or hint in self._unsent[-8:]:
            return
        if len(self._unsent) >= MAX_UNSENT_HINTS:
            del self._unsent[: MAX_UNSENT_HINTS // 2]
        self._unsent.append(hint)
        if max_delay:
            asyncio.get_running_loop().call_later(max_delay, self._send_requested.set)
        else:
            self._send_requested.set()

    async def _run(self) -> None:
        receiving = bool(self._listeners) and self._can_receive
        work = {"signals.send": self._send_all(receiving=receiving)}
        if receiving:
            work |= {"signals.receive": self._receive_all(), "signals.ping": self._ping()}
        await run_together(**work)

    # --- what each carrier implements -------------------------------------------------------------

    @property
    def _can_receive(self) -> bool:
        return True

    @property
    def _send_timeout(self) -> float:
        """The seconds that sending may take."""
        return self._echo_timeout

    @abstractmethod
    async def _send(self, hints: list[Hint]) -> None:
        """Send the hints. Raises one of `_transport_errors` if that fails or takes too long."""

    @abstractmethod
    async def _receive(self) -> None:
        """Connect, call `_connected`, then `_received` for each hint. Raises when the connection ends."""

    @abstractmethod
    def _end_connection(self) -> None:
        """Make `_receive` end. The connection does not answer, so this must not wait for an answer."""

    @property
    @abstractmethod
    def _transport_errors(self) -> tuple[type[BaseException], ...]:
        """The errors that an unavailable carrier raises, TimeoutError included."""

    def _connected(self) -> None:
        """Called by `_receive` when all hints from now on will be received. Earlier hints may be lost."""
        self._report_missed_hints()
        self._reconnected.set()
        self._echo_or_reconnect.set()
        self._ping_now.set()

    def _received(self, topic: Topic | None, payload: str | bytes) -> None:
        """Pass a hint to its listeners. Everyone who can reach the carrier can send any payload. A payload that makes a
        listener fail is dropped, as any hint may be, and the connection stays open."""
        if topic is None:
            self._echo_received.set()
            self._echo_or_reconnect.set()
            return
        try:
            hint = payload.decode() if isinstance(payload, bytes) else payload
            for listener in self._listeners[topic]:
                listener(hint)
        except Exception as error:
            log.debug("signals.not_understood", topic=topic, error=type_and_place(error), **self._log_fields)

    # --- the loops --------------------------------------------------------------------------------

    def _report_missed_hints(self) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener(None)

    async def _send_all(self, *, receiving: bool) -> None:
        backoff = Backoff(None, None)
        while True:
            await self._send_requested.wait()
            self._send_requested.clear()
            ping, self._ping_due = self._ping_due, False
            waiting, self._unsent = self._unsent + [PING] * ping, []
            if not waiting:
                continue
            try:
                async with asyncio.timeout(self._send_timeout):
                    await self._send(waiting)
            except self._transport_errors as error:
                # The hints are lost. Processes find what they announced by polling.
                self._set_degraded(error)
                await backoff.failed(error)
            else:
                backoff.succeeded()
                if not receiving:
                    self._clear_degraded()  # No echo will arrive to restore it.
            if ping:
                self._ping_sent.set()

    async def _receive_all(self) -> None:
        backoff = Backoff(None, None)
        while True:
            started = time.monotonic()
            try:
                await self._receive()
                error: BaseException = ConnectionError("the connection has ended")
            except self._transport_errors as failure:
                error = failure
            self._set_degraded(error)
            if time.monotonic() - started > self._ping_interval:
                backoff.succeeded()  # It worked for a while, so the next attempt follows at once.
            await backoff.failed(error)

    async def _ping(self) -> None:
        while True:
            self._reconnected.clear()
            self._echo_received.clear()
            self._echo_or_reconnect.clear()
            self._ping_sent.clear()
            self._ping_now.clear()
            self._ping_due = True
            self._send_requested.set()
            await self._ping_sent.wait()
            if await self._wait_for_echo():
                self._clear_degraded()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._ping_interval):
                        await self._ping_now.wait()
            elif not self._reconnected.is_set():
                self._set_degraded(TimeoutError("no echo of the process's own ping"))
                self._end_connection()

    async def _wait_for_echo(self) -> bool:
        """Wait for the echo of the ping; whether it arrived. Ends early after a reconnect: the new connection needs a
        new ping."""
        for pause in (self._echo_timeout, LATE_ECHO_SECONDS):
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._echo_or_reconnect.wait()
            self._echo_or_reconnect.clear()
            if self._echo_received.is_set() or self._reconnected.is_set():
                break
        return self._echo_received.is_set()

    def _set_degraded(self, error: BaseException) -> None:
        if self._degraded_since is None:
            self._degraded_since = time.monotonic()
            # When one connection fails, the other usually does, too. Ping at once, to detect it early.
            self._ping_now.set()
            log.warning("signals.degraded", error=describe(error), remedy="polling", **self._log_fields)
            self._report_missed_hints()

    def _clear_degraded(self) -> None:
        if self._degraded_since is not None:
            log.info("signals.restored", seconds=round(time.monotonic() - self._degraded_since, 3), **self._log_fields)
            self._degraded_since = None
            self._report_missed_hints()

    @property
    def _log_fields(self) -> dict[str, Any]:
        """The fields of log lines that identify the carrier's server."""
        return {}

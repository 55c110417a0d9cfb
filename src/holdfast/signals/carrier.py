"""What every carrier of hints has in common: who listens, what waits to be sent, and whether hints come through.

A process pings a channel of its own. While the echo comes, hints do; when it stops, the process says so once, polls,
and connects anew until the echo is back. A connection that is broken without anybody being told is noticed by that,
too.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import structlog

from holdfast.lifecycle.backoff import Backoff
from holdfast.lifecycle.cancelling import run_together
from holdfast.settings import Settings
from holdfast.signals import Listener, Topic
from holdfast.telemetry.exceptions import in_words, kind_and_place

log = structlog.get_logger(__name__)

# What may wait to be sent while the carrier is away. Old hints are worth nothing: there are polls for what they say.
MAX_WAITING = 10_000
# Seconds an echo may take.
ECHO_PATIENCE = 5.0
# Something may have blocked the event loop meanwhile, and the echo be waiting to be read.
LOOP_PATIENCE = 0.2


@dataclass(frozen=True, slots=True)
class Hint:
    """`topic` None is the process's ping to itself."""

    topic: Topic | None
    payload: str
    thread_id: UUID | None = None


PING = Hint(None, "")


class Carrier(ABC):
    """The part of `Signals` that does not depend on what carries the hints."""

    max_payload: int

    def __init__(self, settings: Settings, ping_interval: float) -> None:
        self._settings = settings
        self._ping_interval = ping_interval
        self._patience = min(ECHO_PATIENCE, ping_interval)
        self._listeners: dict[Topic, list[Listener]] = defaultdict(list)
        self._name = uuid4().hex[:16]
        self._waiting: list[Hint] = []
        self._wake = asyncio.Event()
        self._echo = asyncio.Event()
        self._joining = asyncio.Event()
        self._stirred = asyncio.Event()
        # Something has happened after which the next ping must not wait for its time.
        self._ping_early = asyncio.Event()
        # Not among those that wait: it must not be dropped with them.
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
    def follow(self, thread_id: UUID, joined: Callable[[], None]) -> None: ...

    @abstractmethod
    def unfollow(self, thread_id: UUID) -> None: ...

    def publish(self, topic: Topic, payload: str, *, thread_id: UUID | None = None, patience: float = 0.0) -> None:
        hint = Hint(topic, payload, thread_id)
        if len(payload) > self.max_payload or len(payload.encode()) > self.max_payload or hint in self._waiting[-8:]:
            return
        if len(self._waiting) >= MAX_WAITING:
            del self._waiting[: MAX_WAITING // 2]
        self._waiting.append(hint)
        if patience:
            asyncio.get_running_loop().call_later(patience, self._wake.set)
        else:
            self._wake.set()

    async def run(self) -> None:
        receiving = bool(self._listeners) and self._can_receive
        work = {"signals.send": self._send_all(receiving=receiving)}
        if receiving:
            work |= {"signals.receive": self._receive_all(), "signals.ping": self._ping()}
        await run_together(**work)

    # --- what a carrier does ----------------------------------------------------------------------

    @property
    def _can_receive(self) -> bool:
        return True

    @property
    def _send_patience(self) -> float:
        """Seconds that sending may take."""
        return self._patience

    @abstractmethod
    async def _send(self, hints: list[Hint]) -> None:
        """Send them. Raises when that failed, or took too long."""

    @abstractmethod
    async def _receive(self) -> None:
        """Connect, call `_joined`, and `_received` for whatever comes. Raises when the connection is at its end."""

    @abstractmethod
    def _hang_up(self) -> None:
        """Make `_receive` end. The connection does not answer, so nothing may be waited for."""

    @property
    @abstractmethod
    def _failures(self) -> tuple[type[BaseException], ...]:
        """What a carrier that is away raises, TimeoutError included."""

    def _joined(self) -> None:
        """Everything published from now on will be received. What was published before was not, perhaps."""
        self._missed()
        self._joining.set()
        self._stirred.set()
        self._ping_early.set()

    def _received(self, topic: Topic | None, payload: str | bytes) -> None:
        """Pass a hint on. Anybody who can reach the carrier can send anything. What a listener cannot use is lost, as
        any hint may be, and the connection goes on."""
        if topic is None:
            self._echo.set()
            self._stirred.set()
            return
        try:
            hint = payload.decode() if isinstance(payload, bytes) else payload
            for listener in self._listeners[topic]:
                listener(hint)
        except Exception as error:
            log.debug("signals.not_understood", topic=topic, error=kind_and_place(error), **self._place)

    # --- the loops --------------------------------------------------------------------------------

    def _missed(self) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener(None)

    async def _send_all(self, *, receiving: bool) -> None:
        backoff = Backoff(None, None)
        while True:
            await self._wake.wait()
            self._wake.clear()
            ping, self._ping_due = self._ping_due, False
            waiting, self._waiting = self._waiting + [PING] * ping, []
            if not waiting:
                continue
            try:
                async with asyncio.timeout(self._send_patience):
                    await self._send(waiting)
            except self._failures as error:
                # The hints are lost, which they may be. What they announced is found by polling.
                self._degrade(error)
                await backoff.failed(error)
            else:
                backoff.succeeded()
                if not receiving:
                    self._restore()  # There will be no echo to tell.
            if ping:
                self._ping_sent.set()

    async def _receive_all(self) -> None:
        backoff = Backoff(None, None)
        while True:
            started = time.monotonic()
            try:
                await self._receive()
                error: BaseException = ConnectionError("the connection has ended")
            except self._failures as failure:
                error = failure
            self._degrade(error)
            if time.monotonic() - started > self._ping_interval:
                backoff.succeeded()  # It was well for a while: a connection that breaks is replaced at once.
            await backoff.failed(error)

    async def _ping(self) -> None:
        while True:
            self._joining.clear()
            self._echo.clear()
            self._stirred.clear()
            self._ping_sent.clear()
            self._ping_early.clear()
            self._ping_due = True
            self._wake.set()
            await self._ping_sent.wait()
            if await self._echoed():
                self._restore()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._ping_interval):
                        await self._ping_early.wait()
            elif not self._joining.is_set():
                self._degrade(TimeoutError("no echo of the process's own ping"))
                self._hang_up()

    async def _echoed(self) -> bool:
        """Whether the echo came. Ends early when a new connection has been made: that one needs its own ping."""
        for pause in (self._patience, LOOP_PATIENCE):
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stirred.wait()
            self._stirred.clear()
            if self._echo.is_set() or self._joining.is_set():
                break
        return self._echo.is_set()

    def _degrade(self, error: BaseException) -> None:
        if self._degraded_since is None:
            self._degraded_since = time.monotonic()
            # A connection that fails is seldom alone. The receiving one would wait for the next ping to notice.
            self._ping_early.set()
            log.warning("signals.degraded", error=in_words(error), remedy="polling", **self._place)
            self._missed()

    def _restore(self) -> None:
        if self._degraded_since is not None:
            log.info("signals.restored", seconds=round(time.monotonic() - self._degraded_since, 3), **self._place)
            self._degraded_since = None
            self._missed()

    @property
    def _place(self) -> dict[str, Any]:
        """What a log line says of where the hints travel."""
        return {}

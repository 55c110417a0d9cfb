"""One contract for everything in a process that works until it is stopped.

    new ── start() ──▶ starting ──▶ running ── stop() ──▶ stopped
                          │            │
                          │            └── the work ends by itself: `failure` is set, `stop()` is still needed
                          └── start() raises: everything that was begun has been stopped

- `start` returns when the service works. A second call waits for the first one and changes nothing.
- If `start` raises, or is cancelled, the service is stopped: nothing of it is left running.
- `stop` may be called any number of times, at any time: before `start`, during it, from several tasks. Each call
  returns when the service has stopped, after at most `stop_timeout_seconds`. What does not end by then was cancelled,
  and is logged.
- A cancelled `stop` goes on by itself.
- A service is started once. `start` after `stop` raises ServiceStopped.
- A running service that ends by itself sets `failure` and calls the callbacks of `on_failure` on the event loop.

Connection pools are not services: they do no work by themselves. They are opened before, and closed after, the services
that use them. Nor are coroutines that are awaited within one service.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

import structlog

from holdfast.lifecycle.cancelling import cancel_all, run_together

log = structlog.get_logger(__name__)

# Seconds that `stop` takes at most, unless the service says otherwise.
STOP_TIMEOUT_SECONDS = 5.0
# Seconds between two looks whether a thread has ended. Not by `asyncio.to_thread`: graph code may occupy all threads.
THREAD_POLL_SECONDS = 0.01


class ServiceStopped(RuntimeError):
    """The service was stopped, so it cannot be started, or its start was interrupted."""


class EndedByItself(RuntimeError):
    """The work of a service has returned although it was not stopped."""


class Service(ABC):
    """See the module's description. A subclass implements `_start` and `_stop`."""

    name: str = "service"
    stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """Why the service has ended by itself."""
        self._failure_callbacks: list[Callable[[BaseException], None]] = []
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Whether `start` has succeeded."""
        starting = self._starting
        return starting is not None and starting.done() and not starting.cancelled() and starting.exception() is None

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping is not None

    async def start(self) -> None:
        if self._stopping is not None:
            raise ServiceStopped(f"{self.name} was stopped")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name=f"{self.name}.start")
        try:
            await asyncio.wait({self._starting})
        except asyncio.CancelledError:
            await self.stop()
            raise
        if self._starting.cancelled():
            raise ServiceStopped(f"{self.name} was stopped while it started")
        if (error := self._starting.exception()) is not None:
            await self.stop()
            raise error

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_in_time(), name=f"{self.name}.stop")
        await asyncio.shield(self._stopping)

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Call `callback` on the event loop when the service ends by itself. At once if it already has."""
        if self.failure is not None:
            callback(self.failure)
        else:
            self._failure_callbacks.append(callback)

    @abstractmethod
    async def _start(self) -> None:
        """Begin to work. May raise, and may be cancelled; `_stop` is called then, too."""

    @abstractmethod
    async def _stop(self) -> None:
        """End everything that `_start` has begun, as far as it came. Called once, also if `_start` was not."""

    def _ended_by_itself(self, error: BaseException) -> None:
        """The work has ended by itself. To be called on the event loop."""
        if self._stopping is not None or self.failure is not None:
            return
        self.failure = error
        for callback in self._failure_callbacks:
            callback(error)

    async def _stop_in_time(self) -> None:
        ending = asyncio.create_task(self._cancel_start_and_stop(), name=f"{self.name}.stop")
        await asyncio.wait({ending}, timeout=self.stop_timeout_seconds)
        if not ending.done():
            log.warning("service.stop_timed_out", service=self.name, seconds=self.stop_timeout_seconds)
            ending.cancel()
        elif (error := ending.exception()) is not None:
            # The other services of the process must still be stopped.
            log.error("service.stop_failed", service=self.name, exc_info=error)

    async def _cancel_start_and_stop(self) -> None:
        if self._starting is not None:
            await cancel_all([self._starting])
        await self._stop()


class TaskService(Service):
    """A service that is one task. A subclass implements `_run`, which works until it is cancelled."""

    _task: asyncio.Task[None] | None = None

    @abstractmethod
    async def _run(self) -> None:
        """Work until cancelled. What it returns or raises before is a failure of the service."""

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)
        self._task.add_done_callback(self._task_ended)

    async def _stop(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._ended_by_itself(error or EndedByItself(f"{self.name} has ended"))


class CoroutineService(TaskService):
    """A service that awaits what `work` returns until it is stopped."""

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self.name = name
        self._work = work

    async def _run(self) -> None:
        await self._work()


class ThreadService(Service):
    """A service that is one thread. A subclass implements `_work`, and `_wake_to_end`, after which `_work` returns."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._end_requested = False
        self._thread: threading.Thread | None = None

    @property
    def ended(self) -> bool:
        """Whether the thread has ended by itself. May be read from any thread."""
        return self._thread is not None and not self._end_requested and not self._thread.is_alive()

    @abstractmethod
    def _work(self) -> None:
        """Runs in the thread."""

    @abstractmethod
    def _wake_to_end(self) -> None:
        """Make `_work` return. Never blocks."""

    async def _start(self) -> None:
        self._thread = threading.Thread(target=self._work_and_report, name=self.name, daemon=True)
        self._thread.start()

    async def _stop(self) -> None:
        self._end_requested = True
        if self._thread is None:
            return
        self._wake_to_end()
        await thread_ended(self._thread)

    def _work_and_report(self) -> None:
        error: BaseException = EndedByItself(f"{self.name} has ended")
        try:
            self._work()
        except BaseException as raised:
            error = raised
            raise
        finally:
            if not self._end_requested:
                with suppress(RuntimeError):  # The loop is closed.
                    self._loop.call_soon_threadsafe(self._ended_by_itself, error)


class Services(Service):
    """Several services as one. They are started in order, and stopped in the opposite order, each within its own bound.
    When one of them ends by itself, so does this one, unless it is among `tolerated`."""

    def __init__(self, name: str, *services: Service, tolerated: Collection[Service] = ()) -> None:
        super().__init__()
        self.name = name
        self._services = services
        self._tolerated = tolerated
        self._begun: list[Service] = []
        # A little longer, so that each of them is bounded by its own.
        self.stop_timeout_seconds = sum(service.stop_timeout_seconds for service in services) + 1.0

    async def _start(self) -> None:
        for service in self._services:
            self._begun.append(service)
            if service not in self._tolerated:
                service.on_failure(self._ended_by_itself)
            await service.start()

    async def _stop(self) -> None:
        for service in reversed(self._begun):
            await service.stop()


async def run_until(service: Service, stop_requested: asyncio.Event) -> None:
    """Start a service, wait until a stop is requested or the service ends by itself, and stop it. Raises what kept it
    from starting, or why it has ended by itself."""
    ended = asyncio.Event()
    service.on_failure(lambda _: ended.set())
    try:
        await service.start()
        await run_together(requested=_wait(stop_requested), ended=_wait(ended))
    finally:
        await service.stop()
    if service.failure is not None:
        raise service.failure


async def thread_ended(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    while thread.is_alive():  # noqa: ASYNC110
        await asyncio.sleep(THREAD_POLL_SECONDS)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()

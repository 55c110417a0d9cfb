"""Back-off for loops: wait with jitter after a failure, log the start of an outage once, and log its end once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping

import structlog

from holdfast.telemetry.exceptions import describe

log = structlog.get_logger(__name__)


class Backoff:
    """The state of an outage. `failed` records a failure and sleeps; `succeeded` ends the outage.

    `outage` and `recovered` are the names of the log events; None: the caller logs. `about`: fields of both log lines.
    `base` is half of the first pause in seconds, `cap` the longest pause.
    """

    def __init__(
        self,
        outage: str | None,
        recovered: str | None,
        *,
        base: float = 0.05,
        cap: float = 1.0,
        about: Mapping[str, str] | None = None,
    ) -> None:
        self._about = about or {}
        self._outage = outage
        self._recovered = recovered
        self._base = base
        self._cap = cap
        self._failures = 0
        self._since = 0.0

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    def record_failure(self, error: BaseException) -> float:
        """Record a failure, log the first one, and return the seconds to wait."""
        if self._failures == 0:
            self._since = time.monotonic()
            if self._outage is not None:
                log.warning(self._outage, error=describe(error), **self._about)
        self._failures += 1
        pause = min(self._cap, self._base * 2.0 ** min(self._failures, 16))
        return pause * random.uniform(0.5, 1.0)  # noqa: S311

    async def failed(self, error: BaseException, *, at_most: float | None = None) -> None:
        """Record a failure and wait, no longer than `at_most` seconds. Raises CancelledError if the task is being
        cancelled: a connection that breaks at that moment raises its own error instead of CancelledError, and the loop
        would continue for ever."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        pause = self.record_failure(error)
        await asyncio.sleep(pause if at_most is None else min(pause, at_most))

    def succeeded(self) -> None:
        """End the outage, if there is one."""
        if self._failures:
            if self._recovered is not None:
                seconds = round(time.monotonic() - self._since, 3)
                log.info(self._recovered, seconds=seconds, failures=self._failures, **self._about)
            self._failures = 0

"""Processes batches of rows so that one bad row does not stop the others.

A statement on many rows fails as a whole if one of them cannot be processed, and a loop that repeats the statement
fails for ever. So a batch that fails is repeated row by row. A row that fails alone is set aside for a while. A timeout
counts as a failure: a row may be large, or locked by another transaction.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.time_limit import time_limit
from holdfast.telemetry.exceptions import describe
from holdfast.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

# The time until a row that failed is tried again. It doubles with each failure of the row.
FIRST_RETRY_DELAY_SECONDS = 30.0
MAX_RETRY_DELAY_SECONDS = 3600.0
# The share of DATABASE_TIMEOUT that one try may take, and the multiple of it after which no further row is begun. The
# batch and its first rows are tried within the second limit, so each call processes a row or sets one aside.
TRY_TIMEOUT_SHARE = 0.25
BATCH_TIMEOUT_FACTOR = 2.0

Result = TypeVar("Result")


@dataclass
class _Failed:
    until: float
    failures: int = 1


class RowsSetAside:
    """The rows that a loop has failed to process and skips for a while.

    They are kept in the process, not in the database: another process that takes over the loop tries each of them once.
    """

    def __init__(
        self,
        duty: str,
        column: str,
        metrics: Metrics,
        *,
        first_delay: float = FIRST_RETRY_DELAY_SECONDS,
        max_delay: float = MAX_RETRY_DELAY_SECONDS,
    ) -> None:
        """`column` identifies the rows. `first_delay`: seconds until a row is tried again after its first failure.
        `max_delay`: the maximum after further failures."""
        self._duty = duty
        self._column = column
        self._metrics = metrics
        self._first_delay = first_delay
        self._max_delay = max_delay
        self._failed: dict[Any, _Failed] = {}

    def ids(self) -> list[Any]:
        """The rows to skip now."""
        now = time.monotonic()
        # Forget rows that have not failed again: they have been processed or deleted.
        expired = [row_id for row_id, failed in self._failed.items() if failed.until + MAX_RETRY_DELAY_SECONDS < now]
        for row_id in expired:
            del self._failed[row_id]
        return [row_id for row_id, failed in self._failed.items() if failed.until > now]

    def put(self, row: DictRow, error: Exception) -> None:
        """Skip a row for a while, and log its error."""
        row_id = row[self._column]
        failures = self._failed[row_id].failures + 1 if row_id in self._failed else 1
        pause = min(self._max_delay, self._first_delay * 2.0 ** min(failures - 1, 16))
        self._failed[row_id] = _Failed(time.monotonic() + pause, failures)
        self._metrics.rows_set_aside.add()
        log.error(
            "upkeep.row_set_aside",
            duty=self._duty,
            row=str(row_id),
            run_id=_text(row.get("run_id")),
            thread_id=_text(row.get("thread_id")),
            delivery_id=_text(row.get("delivery_id")),
            cron_id=_text(row.get("cron_id")),
            interrupt_id=_text(row.get("interrupt_id")),
            error=describe(error),
            seconds=pause,
        )


@asynccontextmanager
async def ignore_failures(database: Database) -> AsyncIterator[None]:
    """A block that writes to a row which may be bad. Suppresses all errors in the block, and its timeout after
    TRY_TIMEOUT_SHARE of DATABASE_TIMEOUT. Raises only the errors of an outage."""
    try:
        async with time_limit(database, TRY_TIMEOUT_SHARE * database.settings.database_timeout):
            yield
    except Exception as error:
        if is_outage(error):
            raise


def _text(value: object) -> str | None:
    return None if value is None else str(value)


async def process_rows(
    database: Database,
    rows: Sequence[DictRow],
    work: Callable[[Sequence[DictRow]], Awaitable[list[Result]]],
    aside: RowsSetAside | None,
    *,
    seconds: float | None = None,
    within: float | None = None,
) -> list[Result]:
    """Process rows together with `work`, which is one transaction. If that fails or takes too long, process them row by
    row. Returns the results of `work`.

    A row that fails alone, or takes too long, is set aside. `seconds` limits one call of `work`; the default is
    TRY_TIMEOUT_SHARE of DATABASE_TIMEOUT. After `within` seconds, by default BATCH_TIMEOUT_FACTOR times
    DATABASE_TIMEOUT, no further row is begun: the caller will find the remaining rows again.

    Raises the error of an outage if no row has been processed. With `aside` None, raises all errors of `work`.
    """
    if aside is None:
        return await work(rows)
    timeout = database.settings.database_timeout
    seconds = TRY_TIMEOUT_SHARE * timeout if seconds is None else seconds
    end = time.monotonic() + (BATCH_TIMEOUT_FACTOR * timeout if within is None else within)
    try:
        async with time_limit(database, seconds):
            return await work(rows)
    except Exception as error:
        if is_outage(error):
            raise
        if len(rows) == 1:
            aside.put(rows[0], error)
            return []
    results: list[Result] = []
    for row in rows:
        try:
            async with time_limit(database, seconds):
                results += await work([row])
        except Exception as error:
            if is_outage(error):
                if results:
                    break
                raise
            aside.put(row, error)
        if time.monotonic() >= end:
            break
    return results

"""Batches in which one bad row hurts only itself.

A statement over many rows fails as a whole when one of them cannot be processed, and a loop that repeats it fails for
ever. So a batch that fails is repeated row by row, and a row that fails alone is set aside for a while. To take too
long is a failure, too: a row may be large, or locked by somebody.
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
from holdfast.telemetry.exceptions import in_words
from holdfast.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

# Seconds until a row that failed is tried again: twice as long each time.
FIRST_PAUSE_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 3600.0
# Of DATABASE_TIMEOUT: how long one try may take. The batch and the first rows of it are tried before the loop, which
# has at least twice DATABASE_TIMEOUT, is given up: so each call processes a row, or sets one aside.
TRY_TIMEOUT_SHARE = 0.25
BATCH_TIMEOUT_FACTOR = 2.0

Result = TypeVar("Result")


@dataclass
class _Failed:
    until: float
    failures: int = 1


class RowsSetAside:
    """The rows that one loop has failed to process, for as long as they are passed over.

    Kept by the process, not in the database: another process that takes over the loop tries each of them once.
    """

    def __init__(
        self,
        duty: str,
        column: str,
        metrics: Metrics,
        *,
        first_pause: float = FIRST_PAUSE_SECONDS,
        longest_pause: float = LONGEST_PAUSE_SECONDS,
    ) -> None:
        """`column` identifies the rows. `first_pause`: seconds until a row that has failed once is tried again;
        `longest_pause`: the same of one that has failed often."""
        self._duty = duty
        self._column = column
        self._metrics = metrics
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._failed: dict[Any, _Failed] = {}

    def ids(self) -> list[Any]:
        """The rows to pass over now."""
        now = time.monotonic()
        # What was not set aside again long after its time is processed, or gone.
        over = [row_id for row_id, failed in self._failed.items() if failed.until + LONGEST_PAUSE_SECONDS < now]
        for row_id in over:
            del self._failed[row_id]
        return [row_id for row_id, failed in self._failed.items() if failed.until > now]

    def put(self, row: DictRow, error: Exception) -> None:
        """Pass over a row for a while, and report it."""
        row_id = row[self._column]
        failures = self._failed[row_id].failures + 1 if row_id in self._failed else 1
        pause = min(self._longest_pause, self._first_pause * 2.0 ** min(failures - 1, 16))
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
            error=in_words(error),
            seconds=pause,
        )


@asynccontextmanager
async def ignore_failures(database: Database) -> AsyncIterator[None]:
    """A block that writes to a row which may be bad. What fails in it, or takes longer than TRY_TIMEOUT_SHARE of
    DATABASE_TIMEOUT, is given up without a word; only what an outage raises is raised."""
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
    """Process rows together with `work`, a transaction; row by row if that fails or takes too long. Returns what `work`
    returned.

    A row that fails alone, or takes too long, is set aside. `seconds` is how long one call of `work` may take: by
    default TRY_TIMEOUT_SHARE of DATABASE_TIMEOUT. After `within` seconds, by default twice DATABASE_TIMEOUT, no other
    row is begun: the caller finds the rest again. Raises when the database is away and no row is processed; without
    `aside`, what `work` raises.
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

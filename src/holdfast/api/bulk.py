"""Requests about many rows: one that cannot be processed delays the others for a while, and does not stop them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from uuid import UUID

import psycopg
import structlog

from holdfast.db.connect import Database
from holdfast.db.outages import is_outage
from holdfast.db.time_limit import TooSlow, time_limit
from holdfast.errors import Conflict, RequestError

log = structlog.get_logger(__name__)

# Of DATABASE_TIMEOUT: how long one row may take. A pooled statement may take three of them (`db/connect.py`), and its
# connection is lost then, which would pass for an outage.
DATABASE_TIMEOUTS_PER_ROW = 2.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Processed(Generic[Result]):
    """`done`: what came of the rows that were processed, by their ids. `failed`: what was raised for the others."""

    done: dict[UUID, Result] = field(default_factory=dict)
    failed: dict[UUID, Exception] = field(default_factory=dict)

    def raise_first(self) -> None:
        """Raise what was raised for the first row that could not be processed, if any. For answers that cannot say
        which rows failed."""
        for error in self.failed.values():
            raise error


async def process_each(
    database: Database, row_ids: Iterable[UUID], work: Callable[[UUID], Awaitable[Result]]
) -> Processed[Result]:
    """Process rows one after the other, each by a call of `work`. A row that fails or takes too long fails alone. What
    an outage raises is raised at once."""
    processed = Processed[Result]()
    seconds = DATABASE_TIMEOUTS_PER_ROW * database.settings.database_timeout
    for row_id in row_ids:
        try:
            async with time_limit(database, seconds):
                processed.done[row_id] = await work(row_id)
        except RequestError as refusal:
            processed.failed[row_id] = refusal
        except Exception as error:
            if isinstance(error, TimeoutError):
                # Of `time_limit`: the server does not answer either. As the API answers an outage.
                raise psycopg.OperationalError("The database does not answer.") from error
            if is_outage(error):
                raise
            log.warning("request.row_failed", row_id=str(row_id), exc_info=error)
            processed.failed[row_id] = Conflict(f"{row_id}: {error}") if isinstance(error, TooSlow) else error
    return processed

"""Process many rows in one request. A row that cannot be processed delays the others for a limited time and does not
stop them."""

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

# The time limit of one row, in multiples of DATABASE_TIMEOUT. It must be below three: after three of them, a pooled
# statement loses its connection (`db/connect.py`), which would be treated as an outage.
DATABASE_TIMEOUTS_PER_ROW = 2.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Processed(Generic[Result]):
    """`done`: the results of the processed rows, by their ids. `failed`: the exceptions of the other rows."""

    done: dict[UUID, Result] = field(default_factory=dict)
    failed: dict[UUID, Exception] = field(default_factory=dict)

    def raise_first(self) -> None:
        """Raise the exception of the first row that failed, if any. For routes whose response cannot list failed
        rows."""
        for error in self.failed.values():
            raise error


async def process_each(
    database: Database, row_ids: Iterable[UUID], work: Callable[[UUID], Awaitable[Result]]
) -> Processed[Result]:
    """Process rows one after the other, each by a call of `work`. An error or a timeout of one row does not affect the
    others. The errors of an outage are raised at once."""
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
                # Raised by `time_limit` when the server does not answer its cancel request either. The API answers it
                # like an outage.
                raise psycopg.OperationalError("The database does not answer.") from error
            if is_outage(error):
                raise
            log.warning("request.row_failed", row_id=str(row_id), exc_info=error)
            processed.failed[row_id] = Conflict(f"{row_id}: {error}") if isinstance(error, TooSlow) else error
    return processed

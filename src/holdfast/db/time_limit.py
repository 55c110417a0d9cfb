"""A time limit for work on a few rows. When it ends, a test statement shows whether the rows or the server are slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.db.connect import Database

_limit: ContextVar[asyncio.Timeout | None] = ContextVar("holdfast_time_limit", default=None)


class TooSlow(Exception):
    """The work took too long although the server answers: the rows are large, or another transaction has locked one of
    them. This is not an outage (`db/outages.py`): other rows can be processed."""


@asynccontextmanager
async def time_limit(database: Database, seconds: float | None) -> AsyncIterator[None]:
    """Cancel the block after `seconds`; None: never. Waiting for a connection of the pool does not count, because the
    rows do not cause it.

    After a timeout, executes a test statement. Raises TooSlow if the server answers it, else the error of the outage.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            token = _limit.set(limit)
            try:
                yield
            finally:
                _limit.reset(token)
    except TimeoutError:
        if not limit.expired():
            raise
        async with asyncio.timeout(database.settings.database_timeout), database.connection() as connection:
            await connection.execute("SELECT 1")
        raise TooSlow(f"It took longer than {seconds:g} seconds: it is large, or somebody has locked it.") from None


@contextmanager
def paused_time_limit() -> Iterator[None]:
    """A block that does not count for the time limit of the task, if it has one."""
    limit = _limit.get()
    end = None if limit is None else limit.when()
    if limit is None or end is None:
        yield
        return
    loop = asyncio.get_running_loop()
    left = end - loop.time()
    # RuntimeError: the limit has ended. A task that was started in its block may still be running.
    with suppress(RuntimeError):
        limit.reschedule(None)
    try:
        yield
    finally:
        with suppress(RuntimeError):
            limit.reschedule(loop.time() + left)

"""A time limit for work on a few rows, and who is to blame when it is over: the rows, or the server."""

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
    """The work took too long while the server answers: the rows are large, or somebody has locked one of them. No
    outage (`db/outages.py`): other rows may be processed."""


@asynccontextmanager
async def time_limit(database: Database, seconds: float | None) -> AsyncIterator[None]:
    """Cancel what is done within this block after `seconds`; None: never. The wait for a connection of the pool does
    not count: no row is to blame for it.

    Raises TooSlow if the server answers then, and otherwise what an outage raises.
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
    """A block whose time does not count for the limit of the task, if it has one."""
    limit = _limit.get()
    end = None if limit is None else limit.when()
    if limit is None or end is None:
        yield
        return
    loop = asyncio.get_running_loop()
    left = end - loop.time()
    # RuntimeError: the limit is over. A task that was started within its block may go on after it.
    with suppress(RuntimeError):
        limit.reschedule(None)
    try:
        yield
    finally:
        with suppress(RuntimeError):
            limit.reschedule(loop.time() + left)

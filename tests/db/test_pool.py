"""The pool of a process, when those who use it are cancelled."""

from __future__ import annotations

import asyncio

from holdfast.db.connect import Database
from holdfast.settings import Settings


async def test_a_connection_is_not_lost_with_whoever_is_cancelled_while_giving_it_back(settings: Settings) -> None:
    """As happens to many at once when many readers of streams leave at once."""
    database = Database(settings.model_copy(update={"pool_max": 1, "database_timeout": 5.0}), "test")
    await database.open()
    done = asyncio.Event()

    async def use() -> None:
        async with database.connection() as connection:
            await connection.execute("SELECT 1")
            await done.wait()

    try:
        user = asyncio.create_task(use())
        while not database.pool.get_stats().get("requests_num"):
            await asyncio.sleep(0.01)
        async with database.pool._lock:  # Somebody else is giving one back, or getting one, at the moment.
            done.set()
            for _ in range(5):
                await asyncio.sleep(0)
            user.cancel()
            await asyncio.wait({user})
        async with database.connection() as connection:
            await connection.execute("SELECT 1")
    finally:
        await database.close()

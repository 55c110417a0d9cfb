"""Sessions use generic plans, and discard them after a number of transactions or seconds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from uuid import uuid4

import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow

from holdfast.db.connect import Database, open_session
from holdfast.db.generic_plans import REPLAN_AFTER_SECONDS, REPLAN_AFTER_TRANSACTIONS, PlanRefresh
from holdfast.engine.group_commit import GroupCommitter
from holdfast.engine.new_run import NewThread
from holdfast.settings import Settings

# The prepared statements of the session, with the number of executions with a generic and with a custom plan.
PLANNED = """
SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE %s
"""


@pytest.fixture
async def session(settings: Settings) -> AsyncIterator[AsyncConnection[DictRow]]:
    async with await open_session(settings, "test", generic_plans=True) as connection:
        yield connection


async def planned(connection: AsyncConnection[DictRow], text: str) -> list[DictRow]:
    return await (await connection.execute(PLANNED, (f"%{text}%",))).fetchall()


async def test_session_uses_generic_plan(session: AsyncConnection[DictRow]) -> None:
    for _ in range(10):
        await session.execute("SELECT 1 FROM run WHERE run_id = ANY(%s::uuid[])", ([uuid4()],))
    [row] = await planned(session, "SELECT 1 FROM run WHERE")
    assert row["custom_plans"] == 0
    assert row["generic_plans"] > 5


async def grow(session: AsyncConnection[DictRow]) -> Callable[[], Awaitable[int]]:
    """Create a table that has grown since a statement on it was planned. Returns a function for the row estimate of the
    plan."""
    await session.execute("CREATE TEMPORARY TABLE grown (number integer)")
    await session.execute("PREPARE asked(integer) AS SELECT * FROM grown WHERE number > $1")

    async def expected() -> int:
        row = await (await session.execute("EXPLAIN (FORMAT JSON) EXECUTE asked(1)")).fetchone()
        assert row is not None
        return int(row["QUERY PLAN"][0]["Plan"]["Plan Rows"])

    await expected()
    await session.execute("INSERT INTO grown SELECT generate_series(1, 100000)")
    return expected


async def test_plans_are_discarded_after_number_of_transactions(session: AsyncConnection[DictRow]) -> None:
    """Until the table is analysed, nothing else makes the session plan its statements again."""
    plans = PlanRefresh()
    expected = await grow(session)
    before = await expected()
    for _ in range(REPLAN_AFTER_TRANSACTIONS):
        await plans.before_transaction(session)
    assert await expected() == before
    await plans.before_transaction(session)
    assert await expected() > before


async def test_plans_are_discarded_after_max_age(
    session: AsyncConnection[DictRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sessions may have made the table grow while this one was idle."""
    now = 0.0
    monkeypatch.setattr("holdfast.db.generic_plans.monotonic", lambda: now)
    plans = PlanRefresh()
    expected = await grow(session)
    before = await expected()
    await plans.before_transaction(session)
    await plans.before_transaction(session)
    assert await expected() == before
    now += REPLAN_AFTER_SECONDS + 1
    await plans.before_transaction(session)
    after = await expected()
    assert after > before
    await session.execute("INSERT INTO grown SELECT generate_series(1, 100000)")
    await plans.before_transaction(session)
    assert await expected() == after, "the plans are new"


async def test_intake_uses_generic_plans(database: Database) -> None:
    """Also after the plans were discarded: the statements stay prepared."""
    narrow = Database(database.settings.model_copy(update={"pool_min": 1, "pool_max": 1}), "test")
    await narrow.open()
    committer = GroupCommitter(narrow)
    for _ in range(REPLAN_AFTER_TRANSACTIONS + 20):
        assert await committer.create_thread(NewThread(uuid4(), {})) is not None
    async with narrow.connection() as connection:
        rows = await planned(connection, "INSERT INTO thread")
    await narrow.close()
    assert [row["custom_plans"] for row in rows] == [0]

"""`buffered_pipeline` sends its statements together and returns the same results as single statements."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection, AsyncPipeline, waiting
from psycopg.rows import DictRow, dict_row

from holdfast.db.buffered_pipeline import buffered_pipeline


@pytest.fixture
async def connection(database_url: str) -> AsyncConnection[DictRow]:
    return await AsyncConnection.connect(database_url, autocommit=True, row_factory=dict_row, prepare_threshold=2)


async def test_results_can_be_read_after_the_block(connection: AsyncConnection[DictRow]) -> None:
    async with connection:
        for _ in range(4):  # Prepared from the third time on.
            async with buffered_pipeline(connection):
                asked = [await connection.execute("SELECT %s::int AS n", (number,)) for number in range(20)]
            assert [(await cursor.fetchall())[0]["n"] for cursor in asked] == list(range(20))


async def test_statement_does_not_wait(connection: AsyncConnection[DictRow], monkeypatch: pytest.MonkeyPatch) -> None:
    waits = 0
    original = waiting.wait_async

    async def counted(generator: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal waits

        def steps() -> Any:
            nonlocal waits
            state = None
            while True:
                try:
                    wanted = generator.send(state)
                except StopIteration as end:
                    return end.value
                waits += 1
                state = yield wanted

        return await original(steps(), *arguments, **options)

    monkeypatch.setattr(waiting, "wait_async", counted)
    async with connection:
        async with buffered_pipeline(connection):
            await connection.execute("SELECT 1")
            assert waits == 0
        assert waits > 0


async def test_pipeline_larger_than_network_buffers(connection: AsyncConnection[DictRow]) -> None:
    """Statements and results that exceed all buffers do not deadlock client and server."""
    async with connection:
        async with buffered_pipeline(connection):
            asked = [await connection.execute("SELECT %s::text AS said", ("x" * 1_000_000,)) for _ in range(20)]
        assert {len((await cursor.fetchall())[0]["said"]) for cursor in asked} == {1_000_000}


async def test_first_error_is_raised_at_end_of_block(connection: AsyncConnection[DictRow]) -> None:
    async with connection:
        passed = []

        async def divide() -> None:
            async with buffered_pipeline(connection):
                for statement in (b"BEGIN", b"SELECT 1/0", b"SELECT nothing", b"COMMIT"):
                    await connection.execute(statement)
                    passed.append(statement)

        with pytest.raises(psycopg.errors.DivisionByZero):
            await divide()
        assert len(passed) == 4
        await connection.rollback()
        cursor = await connection.execute("SELECT 1 AS n")
        assert await cursor.fetchone() == {"n": 1}


async def test_exception_in_block_is_raised(connection: AsyncConnection[DictRow]) -> None:
    async with connection:

        async def fail() -> None:
            async with buffered_pipeline(connection):
                await connection.execute("BEGIN")
                raise KeyError

        with pytest.raises(KeyError):
            await fail()
        await connection.rollback()
        assert connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE


async def test_nested_pipeline_is_sent_by_outer_one(connection: AsyncConnection[DictRow]) -> None:
    async with connection, connection.pipeline() as outer:
        async with buffered_pipeline(connection):
            cursor = await connection.execute("SELECT 1 AS n")
            assert type(outer) is AsyncPipeline
        assert await cursor.fetchone() == {"n": 1}

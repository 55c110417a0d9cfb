"""What the database holds about runs and threads, for assertions; and runs to put there."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID, uuid4

import orjson
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.new_run import CreatedRun, NewRun
from holdfast.engine.submit import create_run
from holdfast.graphs.assistants import assistant_id
from holdfast.streams.log import LogEvent, read_after
from tests.support.waiting import until

TERMINAL = ("success", "error", "timeout", "interrupted")


async def post_run(
    database: Database, graph_id: str, *, thread_id: UUID | None = None, temporary: bool = False, **kwargs: Any
) -> CreatedRun:
    """Create a run the way the API does; `kwargs` are those of the run."""
    new = NewRun(
        thread_id=thread_id or uuid4(),
        assistant_id=assistant_id(graph_id),
        graph_id=graph_id,
        kwargs={"stream_mode": ["values"], "durability": "async", **kwargs},
        create_thread=True,
        temporary=temporary,
    )
    return await create_run(database, new)


async def run_row(database: Database, run_id: UUID) -> DictRow:
    rows = await query(database, "SELECT * FROM run WHERE run_id = %s", run_id)
    assert rows, f"run {run_id} is not there"
    return rows[0]


async def thread_row(database: Database, thread_id: UUID) -> DictRow:
    return (await query(database, "SELECT * FROM thread WHERE thread_id = %s", thread_id))[0]


async def query(database: Database, statement: str, *parameters: Any) -> list[DictRow]:
    async with database.connection() as connection:
        return await (await connection.execute(statement.encode(), parameters)).fetchall()


async def run_ended(database: Database, run_id: UUID) -> DictRow:
    """The run's row, once it is terminal."""

    async def ended() -> DictRow | None:
        row = await run_row(database, run_id)
        return row if row["status"] in TERMINAL else None

    return cast(DictRow, await until(ended, f"the end of run {run_id}"))


async def thread_events(database: Database, thread_id: UUID) -> list[LogEvent]:
    """The thread's whole log, which must be gapless from 1."""
    events: list[LogEvent] = []
    more = True
    async with database.connection() as connection:
        while more:
            portion, more = await read_after(connection, thread_id, len(events), 10_000)
            events += portion
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return events


async def run_events(database: Database, thread_id: UUID, run_id: UUID) -> list[LogEvent]:
    return [event for event in await thread_events(database, thread_id) if event.run_id == run_id]


def attempts_told(events: list[LogEvent]) -> list[int]:
    """The attempts that watchers of a run heard of, in order."""
    return [orjson.loads(event.data)["attempt"] for event in events if event.kind == "metadata"]


def payloads(events: list[LogEvent], kind: str) -> list[Any]:
    return [orjson.loads(event.data) for event in events if event.kind == kind]

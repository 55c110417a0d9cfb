"""A run from beginning to end in this process, against whatever database the settings name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.engine.new_run import NewRun
from holdfast.engine.submit import create_run
from holdfast.graphs.assistants import assistant_id
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.lifecycle.service import run_until
from holdfast.settings import Settings
from holdfast.streams.log import LogEvent, read_after
from holdfast.worker.main import Worker

EXAMPLES = Path(__file__).parents[2] / "examples" / "langgraph.json"


@asynccontextmanager
async def working(settings: Settings, config: Path = EXAMPLES) -> AsyncIterator[Worker]:
    """A worker with the graphs of a project, for the length of the block."""
    worker = Worker(settings, GraphCatalog.load(load_config(config)))
    task = asyncio.create_task(run_until(worker, worker.stop_requested))
    try:
        yield worker
    finally:
        worker.request_stop()
        await task


async def post(database: Database, graph_id: str, input: Any = None, thread_id: UUID | None = None, **new: Any) -> UUID:
    """Create a run, on a new thread unless one is given."""
    kwargs = {"input": input, "command": None, "config": {}, "stream_mode": ["values"], **new.pop("kwargs", {})}
    created = await create_run(
        database,
        NewRun(
            thread_id=thread_id or uuid4(),
            assistant_id=assistant_id(graph_id),
            graph_id=graph_id,
            kwargs=kwargs,
            create_thread=True,
            **new,
        ),
    )
    async with database.connection() as connection:
        await connection.execute("SELECT pg_notify(%s, '')", (f"{database.settings.db_schema}_work",))
    run_id: UUID = created.run["run_id"]
    return run_id


async def ended(database: Database, run_id: UUID, seconds: float = 60) -> DictRow:
    """The run's row once it has ended."""
    async with asyncio.timeout(seconds):
        while True:
            async with database.connection() as connection:
                cursor = await connection.execute("SELECT * FROM run WHERE run_id = %s", (run_id,))
                row = await cursor.fetchone()
            assert row is not None
            if row["finished_at"] is not None:
                return row
            await asyncio.sleep(0.02)


async def events_of(database: Database, run: DictRow) -> list[LogEvent]:
    async with database.connection() as connection:
        return [
            event
            for event in (await read_after(connection, run["thread_id"], 0)).events
            if event.run_id == run["run_id"]
        ]

"""The same graph in a plain process: no queue, no events, no lease. What LangGraph itself costs.

Prints one JSON object per batch: seconds of CPU and of the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import uvloop
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.pregel import Pregel

from bench.cost import INPUT
from holdfast.cli.supervised_child import join_supervisor
from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import load_settings


async def _batch(
    catalog: GraphCatalog, database: Database, saver: str, runs: int, concurrency: int
) -> dict[str, float]:
    def checkpointer() -> BaseCheckpointSaver[Any] | None:
        match saver:
            case "stock":
                return AsyncPostgresSaver(cast(Any, database.pool))
            case "memory":
                return InMemorySaver()
            case _:
                return None

    async def drive(graph: Pregel[Any, Any, Any, Any]) -> None:
        config: dict[str, Any] = {"configurable": {"thread_id": str(uuid4())}}
        async for _ in graph.astream(INPUT, cast(Any, config), stream_mode="values"):
            pass

    waiting = iter(range(runs))

    async def slot() -> None:
        for _ in waiting:
            opened = catalog.open("five", config={}, access_context="threads.create_run", checkpointer=checkpointer())
            async with opened as graph:
                await drive(graph)

    cpu, clock = time.process_time(), time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(slot())
    return {"cpu": time.process_time() - cpu, "seconds": time.monotonic() - clock}


async def _main(given: argparse.Namespace) -> None:
    database = Database(load_settings(), "bare")
    await database.open()
    catalog = GraphCatalog.load(load_config(given.config, os.environ))
    for number in range(given.batches + 1):
        found = await _batch(catalog, database, given.saver, given.runs, given.concurrency)
        if number:  # The first warms up.
            print(json.dumps(found), flush=True)
    await database.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--saver", choices=["stock", "memory", "none"], required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int)
    given = parser.parse_args()
    join_supervisor(given.lifeline_fd, None, grace=10)
    uvloop.run(_main(given))


if __name__ == "__main__":
    main()

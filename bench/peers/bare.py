"""The limit: the same graphs in a plain process, without any server. `python -m bench.peers.bare --help`.

Once without a checkpointer, once with LangGraph's stock Postgres one, as its documentation sets it up: a pool of
connections, autocommit, and a saver for each run, because the runs that share a saver wait for each other.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any, cast
from uuid import uuid4

import uvloop
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from bench.peers.project import graphs
from bench.peers.scenarios import STREAMS, Scenario, check_events, check_values, request
from bench.peers.window import Counter, Window, busy

POOL = 20
SCENARIOS = tuple(scenario for scenario in Scenario if scenario not in (Scenario.STATELESS, Scenario.DRAIN))
FIRST_EVENTS = 100


class Bare:
    def __init__(self, scenario: Scenario, pool: AsyncConnectionPool[Any] | None) -> None:
        self._scenario = scenario
        self._pool = pool
        self._graph = getattr(graphs, request(scenario, 0)["assistant_id"])

    def _prepare(self) -> tuple[Any, Any]:
        saver = AsyncPostgresSaver(cast(Any, self._pool)) if self._pool is not None else None
        return self._graph.copy({"checkpointer": saver}), {"configurable": {"thread_id": str(uuid4())}}

    async def perform(self, number: int) -> None:
        graph, config = self._prepare()
        values = await graph.ainvoke(request(self._scenario, number)["input"], config)
        check_values(self._scenario, number, values)

    async def stream(self, counter: Counter) -> None:
        graph, config = self._prepare()
        contents = []
        mode = STREAMS[self._scenario][2]
        async for content in graph.astream(request(self._scenario, 0)["input"], config, stream_mode=mode):
            counter.events += 1
            contents.append([{"content": content[0].content}] if mode == "messages" else content)
        check_events(self._scenario, contents)

    async def first_event(self, number: int) -> float:
        graph, config = self._prepare()
        began, first = time.perf_counter(), 0.0
        async for _ in graph.astream(request(self._scenario, number)["input"], config, stream_mode="values"):
            first = first or time.perf_counter() - began
        return first


async def measure(given: argparse.Namespace) -> Window:
    async with AsyncExitStack() as stack:
        pool = None
        if given.database_url:
            options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
            connections = AsyncConnectionPool[Any](given.database_url, max_size=POOL, open=False, kwargs=options)
            pool = await stack.enter_async_context(connections)
            await AsyncPostgresSaver(cast(Any, pool)).setup()
        bare = Bare(given.scenario, pool)
        if given.scenario is Scenario.FIRST_EVENT:
            window = Window()
            for number in range(FIRST_EVENTS + 5):
                took = await bare.first_event(number)
                if number >= 5:
                    window.latencies.append(took)
            return window
        counter = Counter()
        perform = (lambda _: bare.stream(counter)) if given.scenario.streams else bare.perform
        return await busy(
            perform,
            concurrency=given.concurrency,
            seconds=given.seconds,
            warm_up=given.warm_up,
            look=time.process_time,
            counter=counter,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", type=Scenario, choices=SCENARIOS, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm-up", type=float, required=True)
    parser.add_argument("--database-url")
    print(json.dumps(asdict(uvloop.run(measure(parser.parse_args())))))


if __name__ == "__main__":
    main()

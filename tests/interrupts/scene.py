"""A thread whose runs are executed one by one, as the test says, and graphs for it."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

from langgraph.graph import START, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import interrupt

from holdfast.db.connect import Database
from holdfast.engine.outcome import Released
from tests.interrupts.decisions import Decisions
from tests.interrupts.without_worker import SHOWN, end, waiting
from tests.support.records import post_run, query
from tests.support.station import Station

NEW_TURN = {"decisions": ["new turn"]}
DUE = "UPDATE run SET ready_at = now() WHERE status = 'pending' AND ready_at IS NOT NULL RETURNING 1"


def inside(graph: Pregel[Any, Any, Any, Any], depth: int) -> Pregel[Any, Any, Any, Any]:
    for _ in range(depth):
        graph = StateGraph(Decisions).add_node("inner", graph).add_edge(START, "inner").compile()
    return graph


def turns() -> Pregel[Any, Any, Any, Any]:
    """A graph whose first turn asks, and whose second works and asks something else."""

    async def begin(state: Decisions) -> Decisions:
        return {} if "new turn" in state["decisions"] else {"decisions": [f"first {interrupt('first?')}"]}

    failures = [1]

    async def work(state: Decisions) -> Decisions:
        if failures and "new turn" in state["decisions"]:
            failures.pop()
            raise ConnectionError("away for a moment")
        return {"decisions": [f"delete {interrupt('really delete?')}"]}

    return StateGraph(Decisions).add_sequence([begin, work]).add_edge(START, "begin").compile()


class Scene:
    """A thread, and a worker that executes what the test says."""

    def __init__(self, database: Database, station: Station) -> None:
        self.database = database
        self.station = station
        self.thread_id = uuid4()

    async def queue(self, **kwargs: Any) -> UUID:
        created = await post_run(self.database, "graph", thread_id=self.thread_id, **kwargs)
        run_id: UUID = created.run["run_id"]
        return run_id

    async def run(self, **kwargs: Any) -> UUID:
        run_id = await self.queue(**kwargs)
        await self.station.execute_next()
        return run_id

    async def release(self, **kwargs: Any) -> UUID:
        """Run an attempt, after which the run waits for the next."""
        run_id = await self.queue(**kwargs)
        await self.retry()
        return run_id

    async def retry(self) -> None:
        _, outcome = await self.station.execute_next()
        assert isinstance(outcome, Released), outcome

    async def due(self) -> None:
        await query(self.database, DUE)

    async def end(self, how: str) -> None:
        """End the run that was released."""
        if how == "poison":
            await self.due()
            await self.station.claim()
            await query(self.database, "UPDATE worker SET status = 'lost' RETURNING 1")
        await end(self.database, self.thread_id, how)
        await query(self.database, "UPDATE worker SET status = 'online' RETURNING 1")

    async def answer(self, answers: dict[str, str], **kwargs: Any) -> UUID:
        """Answer all that waits, by id."""
        ids = await waiting(self.database)
        return await self.run(command={"resume": {ids[asked]: answers[asked] for asked in ids}}, **kwargs)

    async def asks(self) -> set[str]:
        """What waits, which is what the thread shows."""
        found = set(await waiting(self.database))
        [thread] = await query(self.database, SHOWN)
        assert set(thread["questions"]) == found
        return found

    async def decided(self) -> list[str]:
        [thread] = await query(self.database, "SELECT values FROM thread")
        return sorted(thread["values"]["decisions"])

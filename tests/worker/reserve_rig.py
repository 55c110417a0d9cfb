"""The wakes of workers that share a host, on a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from uuid import UUID

from holdfast.engine.lease import Peer
from holdfast.engine.ready import ReadyRun, announce_ready, announce_taken
from holdfast.worker.wakes import Wakes

GRAPH = frozenset(["graph"])


def worker(number: int) -> UUID:
    """In this order they are ordinary."""
    return UUID(int=1000 + number)


def host(cores: int | None, workers: range, name: str = "here", graphs: frozenset[str] = GRAPH) -> dict[UUID, Peer]:
    return {worker(number): Peer(graphs, name, cores) for number in workers}


class Clock:
    """A loop whose time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.now  # type: ignore[method-assign]

    def do(self, what: Callable[[], None]) -> None:
        async def inside() -> None:
            what()
            await asyncio.sleep(0)

        self.loop.run_until_complete(inside())

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.do(lambda: None)
        self.loop.close()

    def advance(self, seconds: float) -> None:
        """In small steps, so that a timer which sets another is not late."""
        for _ in range(round(seconds * 1000)):
            self.now += 0.001
            self.do(lambda: None)


class Seen:
    """The wakes of one worker of a fleet, and when it was woken."""

    def __init__(self, clock: Clock, me: int, peers: Mapping[UUID, Peer]) -> None:
        self._clock = clock
        self.woken: list[float] = []
        self.asked = 0
        self.began = clock.now
        self.me = worker(me)
        # Whether the host has time to spare.
        self.spare = True
        self.degraded = False
        self.wakes = Wakes(
            peers[self.me].graphs,
            self._wake,
            self._ask,
            spare=lambda: self.spare,
            degraded=lambda: self.degraded,
        )
        self.wakes.meet(self.me, peers)

    def _wake(self) -> None:
        self.woken.append(round(self._clock.now - self.began, 3))

    def _ask(self) -> None:
        self.asked += 1

    def publish(self, topic: str, payload: str, **_: object) -> None:
        self._clock.do(lambda: self.wakes.hint(payload))

    def hear(self, *run_ids: UUID, graph: str | None = "graph", after: float = 0) -> None:
        announce_ready(self, [ReadyRun(run_id, graph, after) for run_id in run_ids])  # type: ignore[arg-type]

    def hear_taken(self, *run_ids: UUID) -> None:
        announce_taken(self, [str(run_id) for run_id in run_ids], patience=0)  # type: ignore[arg-type]

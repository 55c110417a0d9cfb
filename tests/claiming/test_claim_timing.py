"""A new run is claimed at once, and does not wake the whole fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest

from holdfast.claiming.claim_loop import TAKEN_HINT_MAX_DELAY_SECONDS
from holdfast.claiming.claim_timing import STEP_SECONDS, ClaimTiming, run_ids_of
from holdfast.db.connect import Database
from holdfast.engine.ready import ANONYMOUS_HINT, ReadyRun, announce_perhaps_ready, announce_ready, announce_taken
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.signals.postgres import PostgresSignals
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, line
from tests.support.records import post_run, query, run_ended
from tests.support.waiting import until_true

WORKERS = 50
GRAPH = frozenset(["graph"])
OTHER = frozenset(["another"])


class Idler:
    """A worker's claim loop without its worker: it looks when it is woken, and takes what is in the queue."""

    def __init__(self, fleet: IdleFleet, worker_id: UUID, *, busy: bool, graphs: Collection[str]) -> None:
        self.worker_id = worker_id
        self.busy = busy
        self.looks = 0
        self._fleet = fleet
        self._wake = asyncio.Event()
        self.timing = ClaimTiming(graphs, self._wake.set, lambda: None, step_seconds=fleet.step)
        self.signals = fleet.signals
        self.signals.listen("work", self.timing.on_hint)

    @property
    def at_rest(self) -> bool:
        """Neither meaning to look nor looking: what it looks for may be known to be taken meanwhile."""
        wake: Any = self._wake
        return not self.timing.claim_started() and bool(wake._waiters) and not wake.is_set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.busy:
                self.timing.skip_turns()
                continue
            hints = self.timing.claim_started()
            async with self._fleet.database.connection() as connection:
                await connection.execute("SELECT 1")
            self.looks += 1
            taken, self._fleet.queue = self._fleet.queue, []
            answered = self.timing.claim_finished(hints, emptied=True)
            announce_taken(
                self.signals, taken + [name for name in answered if name.startswith(ANONYMOUS_HINT)], max_delay=0.001
            )
            self._fleet.taken += taken


class IdleFleet:
    """Fifty of them over real signals."""

    def __init__(self, database: Database, step: float) -> None:
        self.database = database
        self.step = step
        # One listening session serves all, as if each had its own.
        self.signals = PostgresSignals(database)
        self.queue: list[str] = []
        self.taken: list[str] = []
        self.idlers: list[Idler] = []

    @property
    def looks(self) -> int:
        return sum(idler.looks for idler in self.idlers)

    async def at_rest(self) -> None:
        """Wait until nobody looks any more."""
        await until_true(lambda: all(idler.at_rest for idler in self.idlers), "the fleet is at rest")

    def ranked(self, name: str) -> list[Idler]:
        """Those who look first, first."""
        return sorted(self.idlers, key=lambda idler: idler.timing.delay(name))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PostgresSignals]:
        idlers = [Idler(self, uuid4(), busy=False, graphs=["graph"]) for _ in range(WORKERS)]
        self.idlers = idlers
        heard: list[str | None] = []
        for idler in idlers:
            idler.timing.set_workers(idler.worker_id, {other.worker_id: GRAPH for other in idlers})
        ear = self.signals
        ear.listen("events", heard.append)
        await ear.start()
        tasks = [asyncio.create_task(idler.run()) for idler in idlers]
        try:
            await until_true(lambda: bool(heard), "the fleet listens")
            await until_true(lambda: all(idler.looks for idler in idlers), "everybody has looked once")
            await self.at_rest()
            yield ear
        finally:
            await cancel_all(tasks)
            await ear.stop()


async def test_new_run_costs_idle_fleet_at_most_two_claims(database: Database) -> None:
    fleet = IdleFleet(database, step=30)
    async with fleet.running() as signals:
        for number in range(1, 11):
            run_id, before = uuid4(), fleet.looks
            fleet.queue.append(str(run_id))
            announce_ready(signals, [ReadyRun(run_id, "graph")])
            await until_true(lambda number=number: len(fleet.taken) == number, "it is taken")  # type: ignore[misc]
            await fleet.at_rest()
            assert 1 <= fleet.looks - before <= 2
        assert sum(idler.looks > 1 for idler in fleet.idlers) > 5, "not always the same"


async def test_later_workers_claim_when_first_workers_are_busy(database: Database) -> None:
    fleet = IdleFleet(database, step=1)
    async with fleet.running() as signals:
        run_id = uuid4()
        first = fleet.ranked(str(run_id))
        for idler in first[:4]:
            idler.busy = True
        # The turn of the others does not come while the test runs, however slow the machine is.
        for idler in first[8:]:
            idler.timing._step_seconds = 300
        before, of_busy = fleet.looks, [idler.looks for idler in first[:4]]
        fleet.queue.append(str(run_id))
        announce_ready(signals, [ReadyRun(run_id, "graph")])
        await until_true(lambda: fleet.taken == [str(run_id)], "somebody takes it")
        assert [idler.looks for idler in first[:4]] == of_busy
        await fleet.at_rest()
        assert fleet.looks - before <= 4


async def test_anonymous_hint_costs_idle_fleet_at_most_two_claims(database: Database) -> None:
    fleet = IdleFleet(database, step=30)
    async with fleet.running() as signals:
        before = fleet.looks
        announce_perhaps_ready(signals)
        await until_true(lambda: fleet.looks > before, "somebody looks")
        await fleet.at_rest()
        assert fleet.looks - before <= 2


# --- one worker alone, without a carrier ------------------------------------------------------------------------------


class Alone:
    def __init__(self, peers: int = 0, graphs: frozenset[str] = GRAPH) -> None:
        self.woken = 0
        self.asked = 0
        self.timing = ClaimTiming(graphs, self._wake, self._ask)
        self.me = UUID(int=7)
        self.meet(*[GRAPH] * peers)

    def meet(self, *graphs: frozenset[str]) -> None:
        """Other workers that have these graphs."""
        peers = {UUID(int=100 + number): of_peer for number, of_peer in enumerate(graphs)}
        self.timing.set_workers(self.me, peers | {self.me: self.timing._graphs})

    def _wake(self) -> None:
        self.woken += 1

    def _ask(self) -> None:
        self.asked += 1

    def hear(self, *runs: ReadyRun) -> None:
        announce_ready(self, runs)  # type: ignore[arg-type]

    def publish(self, topic: str, payload: str, **_: object) -> None:
        self.timing.on_hint(payload)

    def patient_name(self) -> UUID:
        """A run for which others come first."""
        return next(run for number in range(1000) if self.timing.delay(str(run := UUID(int=number)), "graph") > 0)


async def test_single_worker_claims_at_once() -> None:
    alone = Alone()
    alone.hear(ReadyRun(uuid4(), "graph"))
    assert alone.woken == 1


async def test_hint_for_graph_of_other_workers_is_ignored() -> None:
    alone = Alone()
    alone.hear(ReadyRun(uuid4(), "another"))
    assert alone.woken == 0


async def test_workers_without_the_graph_do_not_count_in_rank() -> None:
    alone = Alone()
    alone.meet(*[OTHER] * 50)
    assert {alone.timing.delay(str(uuid4()), "graph") for _ in range(100)} == {0}


async def test_hint_without_graph_ranks_workers_that_share_a_graph() -> None:
    alone = Alone(graphs=GRAPH | {"rare"})
    alone.meet(*[OTHER] * 50)
    assert {alone.timing.delay(str(uuid4())) for _ in range(100)} == {0}
    alone.meet(*[GRAPH] * 50)
    assert len({alone.timing.delay(str(uuid4())) for _ in range(100)}) > 1
    assert {alone.timing.delay(str(uuid4()), "rare") for _ in range(100)} == {0}


@pytest.mark.parametrize(
    ("others", "published"),
    [
        ([], False),
        ([GRAPH], False),
        ([GRAPH, GRAPH], True),
        ([GRAPH, OTHER], False),
        ([GRAPH, OTHER, GRAPH | OTHER], True),
    ],
)
async def test_taken_runs_are_published_only_if_other_workers_may_wait(
    others: list[frozenset[str]], published: bool
) -> None:
    """Two workers look at once, so among two none waits."""
    alone = Alone()
    alone.meet(*others)
    assert alone.timing.others_wait == published


def test_taken_runs_are_published_before_next_group_claims() -> None:
    assert 2 * TAKEN_HINT_MAX_DELAY_SECONDS < STEP_SECONDS


async def test_workers_claim_in_groups_of_two_two_four_and_eight() -> None:
    peers = {UUID(int=1000 + number): GRAPH for number in range(16)}
    fleet = [ClaimTiming(GRAPH, lambda: None, lambda: None, step_seconds=1) for _ in peers]
    for timing, worker_id in zip(fleet, peers, strict=True):
        timing.set_workers(worker_id, peers)
    for name in (str(uuid4()) for _ in range(10)):
        turns = sorted(timing.delay(name, "graph") for timing in fleet)
        assert turns == [0] * 2 + [1] * 2 + [2] * 4 + [3] * 8


async def test_lost_or_unknown_hints_cause_claim_and_schedule_query() -> None:
    alone = Alone(peers=9)
    for number, payload in enumerate([None, "", "0.500", "[]", '{"ready": 3}'], 1):
        alone.timing.on_hint(payload)
        assert (alone.woken, alone.asked) == (number, number)


async def test_taken_run_is_not_claimed_for() -> None:
    alone = Alone(peers=9)
    taken, kept = alone.patient_name(), uuid4()
    alone.hear(ReadyRun(taken, "graph"))
    assert alone.woken == 0
    announce_taken(alone, [str(taken)], max_delay=0)  # type: ignore[arg-type]
    assert str(taken) not in alone.timing.claim_started()
    alone.hear(ReadyRun(kept, "graph", after=0.01))
    await until_true(lambda: alone.woken == 1, "the other one is, when it is due")


async def test_worker_claims_in_its_turn_when_run_is_not_taken() -> None:
    alone = Alone(peers=9)
    alone.hear(ReadyRun(alone.patient_name(), "graph"))
    assert alone.woken == 0
    await until_true(lambda: alone.woken == 1, "its turn comes")
    alone.timing.skip_turns()
    assert alone.timing.claim_started() == []


async def test_too_many_scheduled_runs_cause_schedule_query() -> None:
    alone = Alone()
    alone.hear(*(ReadyRun(UUID(int=number), "graph", after=3600) for number in range(1, 1002)))
    assert alone.asked == 1


# What nobody sends, or another version might.
STRANGE = {
    "no JSON": "{",
    "number": "5",
    "list": "[1]",
    "name as long as an id": f'{{"ready": [["{"x" * 36}", null, 0]]}}',
    "name is a number": '{"ready": [[5, null, 0]]}',
    "taken by another name": f'{{"taken": ["{"x" * 36}", [], {{}}]}}',
    "graph is a list": f'{{"ready": [["{UUID(int=1)}", [], 0]]}}',
    "due never": f'{{"ready": [["{UUID(int=1)}", null, 1e300]]}}',
    "due in words": f'{{"ready": [["{UUID(int=1)}", null, "soon"]]}}',
    "too few": f'{{"ready": [["{UUID(int=1)}"]]}}',
    "many digits": f'{{"ready": [["{UUID(int=1)}", null, {"9" * 1000}]]}}',
    "id in another form": f'{{"ready": [["{{{UUID(int=1).hex}}}", null, 0]]}}',
    "deep": "[" * 5_000,
}


@pytest.mark.parametrize("payload", STRANGE)
async def test_claim_timing_accepts_malformed_hints(payload: str) -> None:
    timing = ClaimTiming(["graph"], lambda: None, lambda: None)
    timing.on_hint(STRANGE[payload])
    assert set(run_ids_of(timing.claim_started())) <= {UUID(int=1)}


@pytest.mark.parametrize("payload", STRANGE)
async def test_worker_executes_runs_after_malformed_hints(database_url: str, database: Database, payload: str) -> None:
    async def work(state: Words) -> dict[str, Any]:
        return {"words": ["done"]}

    # A look that takes from tenants in turn is one that reads the names of hints.
    tenant = "UPDATE run SET tenant_id = 'one' WHERE run_id = %s RETURNING 1"
    await query(database, "INSERT INTO tenant (tenant_id) VALUES ('one') ON CONFLICT DO NOTHING RETURNING 1")
    async with running_worker(quick_settings(database_url), catalog_of(graph=line(work))) as worker:
        for topic in ("work", "cancel", "events", "webhooks"):
            await query(database, "SELECT pg_notify(%s, %s)", f"holdfast_{topic}", STRANGE[payload])
        for _ in range(2):
            created = await post_run(database, "graph", input=GO)
            await query(database, tenant, created.run["run_id"])
            for topic in ("work", "cancel"):
                await query(database, "SELECT pg_notify(%s, %s)", f"holdfast_{topic}", STRANGE[payload])
            assert (await run_ended(database, created.run["run_id"]))["status"] == "success"
        assert not worker.signals.degraded

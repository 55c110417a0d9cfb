"""A worker of the reserve does not listen while its host has no time to spare, unless runs are left standing."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from holdfast.db.connect import Database
from holdfast.engine.upcoming import Front
from holdfast.settings import Settings
from holdfast.worker.dozing import ASK, AWAKE, LOOK, TOO_LONG, Dozing, ask_front
from holdfast.worker.wakes import LONGEST
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import Words, line
from tests.support.records import post_run, query, run_ended
from tests.support.waiting import until_true
from tests.worker.reserve_rig import Clock, Seen, host

# A look at the host, and at what there is to hear.
MOMENT = LOOK + 0.03


class Sleeper:
    """A worker's dozing, on a busy host."""

    def __init__(self, clock: Clock, me: int = 1) -> None:
        self._clock = clock
        self.seen = Seen(clock, me, host(1, range(2)))
        self.seen.spare = False
        self.degraded = False
        self.occupied = False
        self.spare = False
        self.looks = 0
        self.slept = 0
        self._deaf = False
        # When it became ready what is at the front of the queue, by which name; None: nothing is.
        self.front: tuple[UUID, float] | None = None
        self.asked: list[float] = []
        dozing = Dozing(
            self,  # type: ignore[arg-type]
            self.seen.wakes,
            lambda: self.occupied,
            self._look,
            self._ask,
            lambda: self.spare,
        )
        self._clock.do(lambda: self._begin(dozing))

    def _begin(self, dozing: Dozing) -> None:
        self.task = asyncio.ensure_future(dozing.run())

    def _look(self) -> None:
        self.looks += 1

    async def _ask(self) -> Front | None:
        self.asked.append(self._clock.now)
        return None if self.front is None else Front(self.front[0], self._clock.now - self.front[1])

    def stand(self, number: int, seconds: float = 0.0) -> None:
        """A run is at the front of the queue, and has been for so long."""
        self.front = UUID(int=number), self._clock.now - seconds

    @property
    def deaf(self) -> bool:
        return self._deaf

    @deaf.setter
    def deaf(self, deaf: bool) -> None:
        if self._deaf is not deaf:
            self.slept += deaf
            self._deaf = deaf
            self.seen.wakes.hint(None)

    def be_woken(self) -> None:
        """By somebody else."""

        def wake() -> None:
            self.deaf = False

        self._clock.do(wake)

    def pass_time(self, seconds: float) -> float:
        """How many of them it was deaf."""
        deaf = 0
        steps = round(seconds * 100)
        for _ in range(steps):
            self._clock.advance(0.01)
            deaf += self.deaf
        assert not self.task.done()
        return deaf / 100


@pytest.fixture
def sleeper(clock: Clock) -> Sleeper:
    return Sleeper(clock)


def test_it_is_deaf_all_the_time_and_asks_each_second(sleeper: Sleeper) -> None:
    sleeper.pass_time(MOMENT)
    assert sleeper.deaf
    assert sleeper.pass_time(10) == 10
    assert len(sleeper.asked) in (9, 10)
    assert sleeper.looks == 0
    assert sleeper.seen.woken == []


@pytest.mark.parametrize("why_not", ["there is time to spare", "it has runs", "no hints come", "ordinary"])
def test_it_listens_if_there_is_a_reason_to(clock: Clock, why_not: str) -> None:
    sleeper = Sleeper(clock, me=0 if why_not == "ordinary" else 1)
    sleeper.spare = why_not == "there is time to spare"
    sleeper.occupied = why_not == "it has runs"
    sleeper.degraded = why_not == "no hints come"
    assert sleeper.pass_time(5) == 0


def test_it_wakes_up_when_there_is_time_to_spare(sleeper: Sleeper) -> None:
    sleeper.pass_time(MOMENT)
    sleeper.spare = True
    assert sleeper.pass_time(5) <= MOMENT


def test_it_wakes_up_when_it_has_a_run(sleeper: Sleeper) -> None:
    sleeper.pass_time(MOMENT)
    sleeper.occupied = True
    sleeper.be_woken()
    assert sleeper.pass_time(5) == 0
    sleeper.occupied = False
    assert sleeper.pass_time(5) > 4


def test_a_run_that_nobody_takes_is_looked_for(sleeper: Sleeper) -> None:
    """Also on a busy host: those that were ordinary may be what keeps it busy, and get nothing done."""
    sleeper.pass_time(MOMENT)
    sleeper.stand(1)
    sleeper.pass_time(ASK + LONGEST + LOOK + 0.05)
    assert sleeper.looks == 1
    assert not sleeper.deaf, "it listens on"
    sleeper.front = None
    assert sleeper.pass_time(AWAKE - 1) == 0
    assert sleeper.pass_time(5) > 3, "and goes to sleep again"


def test_a_run_that_has_just_come_is_left_to_the_others(sleeper: Sleeper) -> None:
    """And so is one that was standing when it asked, and is gone a moment later."""
    sleeper.pass_time(MOMENT)
    for number in range(40):
        sleeper.stand(number, seconds=LONGEST + 0.1 if number % 2 else 0.0)
        assert sleeper.pass_time(LOOK) == LOOK
    assert sleeper.looks == 0
    apart = [round(later - sooner, 2) for sooner, later in pairwise(sleeper.asked)]
    assert set(apart) == {ASK, LOOK}, "it asks again soon after one that was standing"


@pytest.mark.parametrize("too_slow", [True, False])
def test_it_looks_although_others_take_if_runs_stand_for_too_long(sleeper: Sleeper, too_slow: bool) -> None:
    sleeper.pass_time(MOMENT)
    for number in range(80):
        sleeper.stand(number, seconds=TOO_LONG + (0.1 if too_slow else -LOOK - 0.1))
        assert sleeper.pass_time(LOOK) == LOOK
    assert sleeper.looks in ((8, 9, 10) if too_slow else (0,)), "every two seconds"


async def test_what_is_at_the_front_of_the_queue(database: Database) -> None:
    async def post(seconds: float, priority: int = 0) -> UUID:
        run_id: UUID = (await post_run(database, "line", input={"words": []})).run["run_id"]
        await query(
            database,
            "UPDATE run SET ready_at = now() - make_interval(secs => %s), priority = %s WHERE run_id = %s RETURNING 1",
            seconds,
            priority,
            run_id,
        )
        return run_id

    assert await ask_front(database) is None
    await post(-60)
    await post(-60, priority=5)
    assert await ask_front(database) is None, "nothing is due yet"
    await post(10)
    oldest = await post(20)
    found = await ask_front(database)
    assert found is not None
    assert found.run_id == oldest
    assert 20 <= found.seconds < 60
    urgent = await post(1, priority=3)
    found = await ask_front(database)
    assert found is not None
    assert found.run_id == urgent


async def test_while_the_database_is_away_nothing_is_known_to_stand(settings: Settings) -> None:
    away = settings.model_copy(update={"database_url": "postgresql://127.0.0.1:1/none", "database_timeout": 0.1})
    database = Database(away, "test")
    await database.pool.open()
    try:
        assert await ask_front(database) is None
    finally:
        await database.close()


def test_what_was_left_to_others_is_not_looked_for_while_nothing_is_heard_of_it(sleeper: Sleeper) -> None:
    sleeper.pass_time(LOOK - 0.02)
    sleeper.seen.hear(UUID(int=1))
    sleeper.pass_time(0.05)
    assert sleeper.deaf
    assert sleeper.seen.wakes.looking() == []


async def test_a_worker_that_takes_a_run_listens_from_then_on(database_url: str, database: Database) -> None:
    """It may be told to cancel it."""
    reached, go = asyncio.Event(), asyncio.Event()

    async def wait(state: Words) -> dict[str, Any]:
        reached.set()
        await go.wait()
        return {"words": ["done"]}

    async with running_worker(quick_settings(database_url), catalog_of(line=line(wait))) as worker:
        await until_true(lambda: worker._worker_id is not None, "it is online")
        worker.signals.deaf = True
        created = await post_run(database, "line", input={"words": []})
        await asyncio.wait_for(reached.wait(), 30)
        assert not worker.signals.deaf
        go.set()
        await run_ended(database, created.run["run_id"])

"""A worker of the reserve does not listen while others take the runs and its host has no time to spare."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from uuid import UUID

import pytest

from holdfast.db.connect import Database
from holdfast.settings import Settings
from holdfast.worker.dozing import AWAKE, DEAF, IN_A_ROW, LOOK, Dozing, left_standing
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
    """A worker's dozing, on a busy host, and others who take a run every 10 ms."""

    def __init__(self, clock: Clock, me: int = 1) -> None:
        self._clock = clock
        self.seen = Seen(clock, me, host(1, range(2)))
        self.seen.spare = False
        self.degraded = False
        self.occupied = False
        self.others_take = True
        self.spare = False
        self.looks = 0
        self.slept = 0
        self._deaf = False
        self._told = 10_000
        self.standing = 0.0
        self.asked = 0
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

    async def _ask(self) -> float:
        self.asked += 1
        return self.standing

    @property
    def deaf(self) -> bool:
        return self._deaf

    @deaf.setter
    def deaf(self, deaf: bool) -> None:
        if self._deaf and not deaf:
            self.seen.wakes.hint(None)
        self.slept += deaf and not self._deaf
        self._deaf = deaf

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
            if self.others_take and not self.deaf:
                self._told += 1
                self.seen.hear_taken(UUID(int=self._told))
        assert not self.task.done()
        return deaf / 100


@pytest.fixture
def sleeper(clock: Clock) -> Sleeper:
    return Sleeper(clock)


def test_it_is_deaf_nearly_all_the_time(sleeper: Sleeper) -> None:
    sleeper.pass_time(MOMENT)
    assert sleeper.deaf
    assert sleeper.pass_time(10) > 9.5
    assert sleeper.slept >= 9, "it has heard them take in between"


@pytest.mark.parametrize(
    "why_not", ["there is time to spare", "it has runs", "no hints come", "nobody takes", "ordinary"]
)
def test_it_listens_if_there_is_a_reason_to(clock: Clock, why_not: str) -> None:
    sleeper = Sleeper(clock, me=0 if why_not == "ordinary" else 1)
    sleeper.spare = why_not == "there is time to spare"
    sleeper.occupied = why_not == "it has runs"
    sleeper.degraded = why_not == "no hints come"
    sleeper.others_take = why_not != "nobody takes"
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


def test_when_nobody_takes_any_more_it_is_its_turn(clock: Clock, sleeper: Sleeper) -> None:
    """Also on a busy host: those that were ordinary may be what keeps it busy, and get nothing done."""
    sleeper.pass_time(MOMENT)
    assert sleeper.slept == 1
    sleeper.others_take = False
    sleeper.seen.began, sleeper.seen.woken = clock.now, []
    sleeper.pass_time(DEAF + LONGEST + 0.05)
    assert len(sleeper.seen.woken) == 1
    assert not sleeper.deaf, "it listens on"
    assert sleeper.pass_time(5) == 0
    assert AWAKE > LONGEST, "it does not go to sleep before it knows"


@pytest.mark.parametrize("too_slow", [True, False])
def test_it_looks_although_others_take_if_they_leave_runs_standing(sleeper: Sleeper, too_slow: bool) -> None:
    sleeper.standing = DEAF * IN_A_ROW + (0.1 if too_slow else -0.1)
    sleeper.pass_time(20.5)
    assert sleeper.asked in (20 // (DEAF * IN_A_ROW), 20 // (DEAF * IN_A_ROW) - 1)
    assert sleeper.looks == (sleeper.asked if too_slow else 0)
    assert sleeper.seen.woken == [], "and not for another reason"


async def test_for_how_long_runs_have_been_left_standing(database: Database) -> None:
    assert await left_standing(database) == 0
    for seconds in (-60, 20, 10):
        created = await post_run(database, "line", input={"words": []})
        await query(
            database,
            "UPDATE run SET ready_at = now() - make_interval(secs => %s) WHERE run_id = %s RETURNING run_id",
            seconds,
            created.run["run_id"],
        )
    assert 20 <= await left_standing(database) < 60


async def test_while_that_cannot_be_asked_they_may_have_been_for_any_time(settings: Settings) -> None:
    away = settings.model_copy(update={"database_url": "postgresql://127.0.0.1:1/none", "database_timeout": 0.1})
    database = Database(away, "test")
    await database.pool.open()
    try:
        assert await left_standing(database) == math.inf
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

"""Workers beyond their host's cores leave runs to the others, and take what these leave standing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
import uvloop

from holdfast.db.connect import Database
from holdfast.engine.lease import Peer
from holdfast.engine.ready import OCCASION
from holdfast.worker.main import TAKEN_PATIENCE
from holdfast.worker.reserve import LOOK_AGAIN, OVERLOADED
from holdfast.worker.wakes import LONGEST, MAX_REMEMBERED, PATIENCE, STEP, Wakes
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import Words, line
from tests.support.records import post_run, run_ended
from tests.support.waiting import until_true
from tests.worker.reserve_rig import GRAPH, Clock, Seen, host, worker

RUN, OTHER = UUID(int=501), UUID(int=502)


# --- who is a reserve -------------------------------------------------------------------------------------------------


def ordinary(clock: Clock, peers: Mapping[UUID, Peer], graph: str | None = "graph") -> list[int]:
    """Those who look before any reserve does. Of up to four."""
    found = []
    for number in [peer.int - 1000 for peer in peers if graph is None or graph in peers[peer].graphs]:
        seen = Seen(clock, number, peers)
        seen.hear(RUN, graph=graph)
        clock.advance(PATIENCE - 0.005)
        found += [number] if seen.woken else []
    return found


def test_as_many_are_ordinary_as_the_host_has_cores(clock: Clock) -> None:
    assert ordinary(clock, host(2, range(4))) == [0, 1]
    assert ordinary(clock, host(1, range(4))) == [0]
    assert ordinary(clock, host(4, range(2))) == [0, 1]


def test_each_host_has_its_own(clock: Clock) -> None:
    peers = {**host(1, range(2), "here"), **host(1, range(2, 4), "there")}
    assert ordinary(clock, peers) == [0, 2]


def test_cores_that_are_not_shared_count_for_themselves(clock: Clock) -> None:
    """Each worker pinned to a core of its own, and one too many."""
    pinned = [replace(peer, cpus=cpu) for peer, cpu in zip(host(1, range(3)).values(), "010", strict=True)]
    peers = dict(zip(host(1, range(3)), pinned, strict=True))
    assert ordinary(clock, peers) == [0, 1]
    # One of an older version does not say which it has: perhaps one of these.
    assert ordinary(clock, {**peers, **host(None, range(3, 4))}) == [0, 1, 2, 3]


def test_the_fewest_cores_count(clock: Clock) -> None:
    assert ordinary(clock, {**host(8, range(2)), **host(1, range(2, 3))}) == [0]


def test_a_host_of_which_not_everybody_says_its_cores_has_none(clock: Clock) -> None:
    peers = {**host(1, range(1)), **host(None, range(1, 2))}
    assert ordinary(clock, peers) == [0, 1]
    # Nor for the graphs of the others.
    older = {**host(1, range(2)), **host(None, range(2, 3), graphs=frozenset(["another"]))}
    assert ordinary(clock, older) == [0, 1]
    assert ordinary(clock, {**host(1, range(2)), **host(None, range(2, 3), "there")}) == [0, 2]


def test_only_those_who_have_the_graph_count(clock: Clock) -> None:
    both, other = frozenset(["graph", "other"]), frozenset(["other"])
    peers = {**host(1, range(1)), **host(1, range(1, 2), graphs=both), **host(1, range(2, 3), graphs=other)}
    assert ordinary(clock, peers, "graph") == [0]
    assert ordinary(clock, peers, "other") == [1]


def test_the_only_one_that_has_a_graph_is_no_reserve_for_it(clock: Clock) -> None:
    peers = {**host(1, range(3)), **host(1, range(3, 4), graphs=frozenset(["rare"]))}
    assert ordinary(clock, peers, "rare") == [3]


def test_what_may_be_of_any_graph_is_left_only_to_those_who_have_them_all(clock: Clock) -> None:
    peers = {**host(1, range(2)), **host(1, range(2, 3), graphs=frozenset(["graph", "rare"]))}
    assert ordinary(clock, peers, None) == [0, 2]


def test_one_that_leaves_is_succeeded(clock: Clock) -> None:
    seen = Seen(clock, 1, host(1, range(2)))
    seen.hear(RUN)
    assert seen.woken == []
    seen.wakes.meet(seen.me, host(1, range(1, 2)))
    seen.hear(OTHER)
    assert seen.woken == [0]


def test_ordinary_workers_take_turns_among_themselves(clock: Clock) -> None:
    """As if the reserve was not there."""
    few, many = host(4, range(4)), host(4, range(40))
    for number in range(4):
        with_reserve, without = Seen(clock, number, many).wakes, Seen(clock, number, few).wakes
        names = [str(UUID(int=name)) for name in range(100)]
        assert [with_reserve.delay(name, "graph") for name in names] == [without.delay(name, "graph") for name in names]
    assert {Seen(clock, 0, many).wakes.delay(str(UUID(int=name)), "graph") for name in range(100)} == {0, STEP}


def test_those_for_whom_others_come_first_are_told_what_is_taken(clock: Clock) -> None:
    assert Seen(clock, 0, host(1, range(2))).wakes.in_company
    assert not Seen(clock, 1, host(1, range(2))).wakes.in_company, "the other does not wait for us"
    assert not Seen(clock, 0, host(2, range(2))).wakes.in_company
    assert not Seen(clock, 0, {**host(1, range(1)), **host(1, range(1, 2), "there")}).wakes.in_company
    assert not Seen(
        clock, 0, {**host(1, range(1)), **host(1, range(1, 2), graphs=frozenset(["rare"]))}
    ).wakes.in_company
    assert Seen(clock, 0, host(8, range(3))).wakes.in_company
    assert not Seen(
        clock, 0, {**host(8, range(2)), **host(8, range(2, 4), graphs=frozenset(["rare"]))}
    ).wakes.in_company
    assert PATIENCE > 2 * TAKEN_PATIENCE, "the word must have come by then"


def test_a_reserve_that_does_not_listen_is_not_told(clock: Clock) -> None:
    """It does not while the host has no time to spare. Of another host's time nobody knows."""

    def told(peers: Mapping[UUID, Peer], *, spare: bool) -> bool:
        seen = Seen(clock, 0, peers)
        seen.spare = spare
        return seen.wakes.in_company

    assert told(host(2, range(4)), spare=True)
    assert not told(host(2, range(4)), spare=False)
    assert told({**host(1, range(1)), **host(1, range(1, 3), "there")}, spare=False)
    assert told(host(3, range(4)), spare=False), "ordinary ones take turns"


# --- when it looks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def seen(clock: Clock) -> Seen:
    """The only reserve of its host."""
    return Seen(clock, 1, host(1, range(2)))


def test_what_is_taken_it_does_not_look_for(clock: Clock, seen: Seen) -> None:
    seen.hear(RUN)
    assert seen.wakes.looking() == [str(RUN)]
    seen.hear_taken(RUN)
    clock.advance(1)
    assert seen.woken == []
    assert seen.wakes.looking() == []


def test_when_nothing_is_taken_for_a_moment_it_looks(clock: Clock, seen: Seen) -> None:
    seen.hear(RUN)
    clock.advance(1)
    assert seen.woken == [pytest.approx(PATIENCE, abs=0.002)]


def test_while_others_take_it_rests(clock: Clock, seen: Seen) -> None:
    seen.hear(RUN, OTHER)
    clock.advance(0.04)
    seen.hear_taken(OTHER)
    clock.advance(0.04)
    seen.hear_taken(UUID(int=999))
    clock.advance(0.04)
    assert seen.woken == []
    clock.advance(1)
    assert seen.woken == [pytest.approx(0.08 + PATIENCE, abs=0.002)]


def test_it_does_not_rest_for_long(clock: Clock, seen: Seen) -> None:
    seen.hear(RUN)
    for number in range(100):
        clock.advance(0.01)
        seen.hear_taken(UUID(int=2000 + number))
    assert seen.woken == [pytest.approx(LONGEST, abs=0.002)]


def test_while_others_take_and_the_host_is_busy_it_rests_longer(clock: Clock, seen: Seen) -> None:
    seen.spare = False
    seen.hear(RUN)
    for number in range(150):
        clock.advance(0.01)
        seen.hear_taken(UUID(int=2000 + number))
    assert seen.woken == []
    # The moment that there is something to help with, almost.
    seen.spare = True
    clock.advance(LOOK_AGAIN + 0.002)
    assert len(seen.woken) == 1


def test_a_busy_host_is_no_reason_to_leave_a_run_for_ever(clock: Clock, seen: Seen) -> None:
    seen.spare = False
    seen.hear(RUN)
    for number in range(300):
        clock.advance(0.01)
        seen.hear_taken(UUID(int=2000 + number))
    assert seen.woken == [pytest.approx(LONGEST * OVERLOADED, abs=LOOK_AGAIN)]


def test_what_stands_still_on_a_busy_host_is_taken_a_little_later(clock: Clock, seen: Seen) -> None:
    seen.spare = False
    seen.hear(RUN)
    clock.advance(1)
    assert seen.woken == [pytest.approx(LONGEST, abs=0.002)]


def test_with_room_for_more_it_leaves_that_to_others_too(clock: Clock, seen: Seen) -> None:
    clock.do(seen.wakes.more)
    assert seen.woken == []
    clock.advance(1)
    assert seen.woken == [pytest.approx(PATIENCE, abs=0.002)]
    other = Seen(clock, 0, host(1, range(2)))
    clock.do(other.wakes.more)
    assert other.woken == [0]


def test_what_it_may_have_missed_is_left_to_others_too(clock: Clock, seen: Seen) -> None:
    clock.do(lambda: seen.wakes.hint(None))
    assert (seen.asked, seen.woken) == (1, [])
    clock.advance(1)
    assert seen.woken == [pytest.approx(PATIENCE, abs=0.002)]
    other = Seen(clock, 0, host(1, range(2)))
    clock.do(lambda: other.wakes.hint(None))
    assert other.woken == [0]


def test_while_hints_do_not_come_through_it_does_not_wait_for_any(clock: Clock, seen: Seen) -> None:
    seen.degraded = True
    clock.do(lambda: seen.wakes.hint(None))
    assert seen.woken == [0]


def test_what_it_took_itself_says_nothing_about_the_others(clock: Clock, seen: Seen) -> None:
    seen.wakes.telling([str(OTHER)])
    seen.hear(RUN)
    clock.advance(0.04)
    seen.hear_taken(OTHER)
    clock.advance(1)
    assert seen.woken == [pytest.approx(PATIENCE, abs=0.002)]
    # The next time somebody else must have taken it.
    seen.began = clock.now
    seen.hear(RUN)
    seen.wakes.passed()
    seen.hear(RUN)
    clock.advance(0.04)
    seen.hear_taken(OTHER)
    clock.advance(1)
    assert seen.woken[1:] == [pytest.approx(0.04 + PATIENCE, abs=0.002)]


def test_what_it_told_is_not_remembered_for_ever(seen: Seen) -> None:
    for number in range(10 * MAX_REMEMBERED):
        seen.wakes.telling([str(number)])
    assert len(seen.wakes._told) <= MAX_REMEMBERED + 1


def test_a_burst_is_one_look(clock: Clock, seen: Seen) -> None:
    runs = [UUID(int=3000 + number) for number in range(300)]
    seen.hear(*runs)
    clock.advance(0.02)
    seen.hear_taken(*runs[:100])
    clock.advance(1)
    assert len(seen.woken) == 1
    names = seen.wakes.looking()
    assert sorted(names) == sorted(str(run) for run in runs[100:])
    assert seen.wakes.looked(names, drained=True) == names
    assert seen.wakes.looking() == []


def test_a_look_for_another_reason_settles_what_it_rests_for(clock: Clock, seen: Seen) -> None:
    seen.hear(RUN)
    assert seen.wakes.looked(seen.wakes.looking(), drained=True) == [str(RUN)]
    clock.advance(1)
    assert seen.woken == []


def test_a_turn_that_comes_at_once_is_no_trouble_on_the_loop_that_workers_have() -> None:
    """uvloop makes something else than a timer of it."""

    async def hear_several() -> list[str]:
        looking = asyncio.Event()
        wakes = Wakes(["graph"], looking.set, lambda: None, patience=0, spare=lambda: True)
        wakes.meet(worker(1), host(1, range(2)))
        for run_id in (RUN, OTHER):
            wakes.hint(f'{{"ready": [["{run_id}", "graph", 0]]}}')
        await asyncio.wait_for(looking.wait(), 60)
        return wakes.looking()

    assert uvloop.run(hear_several()) == [str(RUN), str(OTHER)]


def test_reserves_take_turns_as_well(clock: Clock) -> None:
    peers = host(2, range(12))
    reserve = [Seen(clock, number, peers) for number in range(2, 12)]
    for one in reserve:
        one.hear(RUN)
    clock.advance(1)
    firsts = sorted(one.woken[0] for one in reserve)
    groups = [0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
    assert firsts == [pytest.approx(PATIENCE + STEP * group, abs=0.002) for group in groups]
    assert {len(one.woken) for one in reserve} == {1}
    # And when they do not rest any longer.
    for one in reserve:
        one.began, one.woken = clock.now, []
        one.wakes.passed()
        one.hear(RUN)
    for _ in range(100):
        clock.advance(0.01)
        for one in reserve:
            one.hear_taken(OTHER)
    firsts = sorted(one.woken[0] for one in reserve)
    assert firsts == [pytest.approx(LONGEST + STEP * group, abs=0.002) for group in groups]


def test_a_turn_that_comes_sooner_than_the_one_waited_for_is_not_late(clock: Clock) -> None:
    seen = Seen(clock, 2, host(2, range(12)))
    runs = sorted((UUID(int=number) for number in range(100)), key=lambda run: seen.wakes.delay(str(run), "graph"))
    seen.hear(runs[-1])
    seen.hear(runs[0])
    clock.advance(1)
    late = seen.wakes.delay(str(runs[-1]), "graph")
    assert late > PATIENCE
    assert seen.woken == [pytest.approx(PATIENCE, abs=0.002), pytest.approx(late, abs=0.002)]


def test_what_is_due_later_is_left_to_the_others_when_it_is(clock: Clock, seen: Seen) -> None:
    seen.hear(RUN, after=1.0)
    clock.advance(1.03)
    assert seen.woken == []
    clock.advance(1)
    assert seen.woken == [pytest.approx(1 + PATIENCE, abs=0.003)]
    # Without a hint, too: the moment is added to the pause until it is due.
    assert seen.wakes.delay(str(OTHER), "graph") == PATIENCE


def test_hints_it_does_not_understand_make_it_look_at_once(seen: Seen) -> None:
    for number, payload in enumerate(["", '{"ready": 3}'], 1):
        seen.wakes.hint(payload)
        assert (len(seen.woken), seen.asked) == (number, number)


def test_an_occasion_is_settled_by_others_or_looked_for(clock: Clock, seen: Seen) -> None:
    for name in (f"{OCCASION}1", f"{OCCASION}2"):
        seen.publish("work", f'{{"ready": [["{name}", null, 0]]}}')
    seen.publish("work", f'{{"taken": ["{OCCASION}1"]}}')
    clock.advance(1)
    assert len(seen.woken) == 1
    assert seen.wakes.looking() == [f"{OCCASION}2"]


# --- a whole worker ---------------------------------------------------------------------------------------------------


async def test_a_worker_knows_its_own_word_when_it_hears_it(database_url: str, database: Database) -> None:
    async def say(state: Words) -> dict[str, Any]:
        return {"words": ["said"]}

    # It is told who is there by the test, not by a renewal.
    settings = quick_settings(database_url, lease=1000.0, heartbeat=300.0)
    async with running_worker(settings, catalog_of(graph=line(say))) as running:
        heard: list[str | None] = []
        running.signals.listen("work", heard.append)
        await until_true(lambda: running._worker_id is not None, "the worker is online")
        assert running._worker_id is not None
        # Others take turns with it: they are told however busy the host is.
        running._wakes.meet(running._worker_id, {**host(8, range(3)), running._worker_id: Peer(GRAPH, "here", 8)})
        created = await post_run(database, "graph", input={"words": []})
        await run_ended(database, created.run["run_id"])
        await until_true(lambda: any("taken" in (payload or "") for payload in heard), "it hears that it has taken it")
        assert running._wakes._rest._taken_at == 0, "it would rest because of itself"
        assert not running._wakes._told

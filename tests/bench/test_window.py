"""What counts, and what does not."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from bench.peers.scenarios import EVENTS, Scenario, check_events, check_values
from bench.peers.window import Counter, WrongAnswer, busy, percentile


async def test_whole_waves_are_counted_and_the_first_is_not() -> None:
    """Runs that all end together, three at a time: any other number would have cut a wave in two."""
    waves = asyncio.Barrier(3)
    counter = Counter()
    ended = 0

    async def perform(number: int) -> None:
        nonlocal ended
        counter.events += 7
        # Those who have begun another wave when it is over wait for one who does not come.
        with suppress(TimeoutError, asyncio.BrokenBarrierError):
            await asyncio.wait_for(waves.wait(), 5.0)
        ended += 1

    window = await busy(perform, concurrency=3, seconds=0, warm_up=0, waves=4, look=lambda: ended, counter=counter)
    assert window.runs == 12
    assert len(window.latencies) == 12
    # Of each wave the last to end finds that the others have begun the next.
    assert window.events == 12 * 7
    assert (window.before, window.after) == (3, 15)
    assert window.rate == pytest.approx(12 / window.seconds)


async def test_the_window_is_as_long_as_it_has_to_be() -> None:
    async def perform(number: int) -> None:
        await asyncio.sleep(0.001)

    window = await busy(perform, concurrency=2, seconds=3.0, warm_up=0)
    assert window.seconds >= 3.0
    assert window.runs > 4


async def test_window_ends_with_a_wrong_answer() -> None:
    async def perform(number: int) -> None:
        await asyncio.sleep(0)
        if number == 5:
            raise WrongAnswer("5")

    with pytest.raises(ExceptionGroup) as raised:
        await busy(perform, concurrency=2, seconds=60, warm_up=0)
    assert raised.group_contains(WrongAnswer)


async def test_a_server_that_is_stuck_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.window.PATIENCE", 0.05)

    async def perform(number: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        await busy(perform, concurrency=2, seconds=0, warm_up=0)
    assert raised.group_contains(TimeoutError)


def test_percentiles_of_few_values() -> None:
    assert percentile([3.0], 99) == 3
    assert percentile([1.0, 2.0, 9.0], 50) == 2
    assert percentile([1.0, 2.0, 9.0], 99) == pytest.approx(8.86)


def test_values_have_to_be_right() -> None:
    check_values(Scenario.THREAD, 4, {"number": 4, "result": 8})
    for wrong in (None, {}, {"number": 4}, {"number": 5, "result": 10}, {"number": 4, "result": 8, "__error__": "x"}):
        with pytest.raises(WrongAnswer):
            check_values(Scenario.THREAD, 4, wrong)
    for wrong in (None, {}, {"messages": [], "step": 5}):
        with pytest.raises(WrongAnswer):
            check_values(Scenario.FIVE, 4, wrong)


@pytest.mark.parametrize("scenario", [Scenario.TOKENS, Scenario.MESSAGES], ids=str)
def test_every_event_has_to_be_there_once_and_in_order(scenario: Scenario) -> None:
    def content(number: int) -> object:
        return {"number": number} if scenario is Scenario.TOKENS else [{"content": f"{number} said"}, {}]

    whole = [content(number) for number in range(EVENTS)]
    check_events(scenario, whole)
    for wrong in ([], whole[:-1], [*whole, whole[-1]], [whole[1], whole[0], *whole[2:]]):
        with pytest.raises(WrongAnswer):
            check_events(scenario, wrong)

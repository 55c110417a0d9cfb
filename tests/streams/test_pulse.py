"""Regular calls for many."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial

from holdfast.streams.pulse import Pulse


async def test_every_member_is_called_again_and_again_until_it_leaves() -> None:
    pulse, calls = Pulse(0.2), [0, 0, 0]

    def beat(number: int) -> None:
        calls[number] += 1

    with ExitStack() as staying:
        for number in (0, 1):
            staying.enter_context(pulse.beating(partial(beat, number)))
        with pulse.beating(lambda: beat(2)):
            async with asyncio.timeout(60):
                while min(calls) < 3:
                    await asyncio.sleep(0.01)
        left = calls[2]
        async with asyncio.timeout(60):
            while calls[0] < left + 3:
                await asyncio.sleep(0.01)
        assert calls[2] == left
        assert abs(calls[0] - calls[1]) <= 1, "those who came together are called together"


async def test_a_loop_that_was_held_up_leaves_nobody_out_and_calls_nobody_twice() -> None:
    pulse, calls = Pulse(0.2), []
    with pulse.beating(lambda: calls.append("first")):
        await asyncio.sleep(0.06)
        with pulse.beating(lambda: calls.append("second")):
            calls.clear()  # On a slow machine its time may have come already.
            pulse._ring_to(pulse._next + 3 * len(pulse._slots))
            assert sorted(calls) == ["first", "second"]


async def test_the_first_call_comes_a_whole_interval_after_joining_and_nobody_left_means_no_timer() -> None:
    pulse, loop, called = Pulse(0.3), asyncio.get_running_loop(), asyncio.Event()
    joined = loop.time()
    with pulse.beating(called.set):
        async with asyncio.timeout(60):
            await called.wait()
        assert loop.time() - joined >= 0.3 - 0.1
    assert pulse._timer is None

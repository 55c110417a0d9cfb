"""SharedHeartbeat: periodic callbacks with one timer."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial

from holdfast.streams.shared_heartbeat import SharedHeartbeat


async def test_callback_is_called_periodically_until_block_ends() -> None:
    heartbeat, calls = SharedHeartbeat(0.2), [0, 0, 0]

    def beat(number: int) -> None:
        calls[number] += 1

    with ExitStack() as staying:
        for number in (0, 1):
            staying.enter_context(heartbeat.calling(partial(beat, number)))
        with heartbeat.calling(lambda: beat(2)):
            async with asyncio.timeout(60):
                while min(calls) < 3:
                    await asyncio.sleep(0.01)
        left = calls[2]
        async with asyncio.timeout(60):
            while calls[0] < left + 3:
                await asyncio.sleep(0.01)
        assert calls[2] == left
        assert abs(calls[0] - calls[1]) <= 1, "callbacks that were added together are called together"


async def test_blocked_loop_calls_each_callback_once() -> None:
    heartbeat, calls = SharedHeartbeat(0.2), []
    with heartbeat.calling(lambda: calls.append("first")):
        await asyncio.sleep(0.06)
        with heartbeat.calling(lambda: calls.append("second")):
            calls.clear()  # On a slow machine it may have been called already.
            heartbeat._call_due(heartbeat._next + 3 * len(heartbeat._slots))
            assert sorted(calls) == ["first", "second"]


async def test_first_call_comes_after_a_whole_interval() -> None:
    heartbeat, loop, called = SharedHeartbeat(0.3), asyncio.get_running_loop(), asyncio.Event()
    joined = loop.time()
    with heartbeat.calling(called.set):
        async with asyncio.timeout(60):
            await called.wait()
        assert loop.time() - joined >= 0.3 - 0.1
    assert heartbeat._timer is None

"""TimedEvent: waiting for an event or a timeout."""

from __future__ import annotations

import asyncio

from holdfast.streams.timed_event import SharedTimers, TimedEvent


async def test_event_wakes_current_and_later_waiters() -> None:
    event, timers = TimedEvent(), SharedTimers()
    late = asyncio.get_running_loop().time() + 60
    waiting = [asyncio.create_task(event.wait(timers, late)) for _ in range(3)]
    waiting.append(asyncio.create_task(event.wait()))
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    event.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)
        await event.wait(timers, late)


async def test_wait_ends_at_its_timeout_and_not_before() -> None:
    event, timers, loop = TimedEvent(), SharedTimers(), asyncio.get_running_loop()
    async with asyncio.timeout(60):
        for delay in (0.0, 0.01, 0.12):
            until = loop.time() + delay
            await asyncio.gather(*(event.wait(timers, until) for _ in range(3)))
            assert loop.time() >= until


async def test_waiters_with_similar_timeouts_share_one_timer() -> None:
    event, timers = TimedEvent(), SharedTimers()
    until = asyncio.get_running_loop().time() + 60
    waiting = [asyncio.create_task(event.wait(timers, until)) for _ in range(100)]
    await asyncio.sleep(0)
    [due] = timers._due.values()
    assert len(due) == 100
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    event.set()
    await asyncio.wait(waiting)
    assert not due

"""Waiting for a change or a moment."""

from __future__ import annotations

import asyncio

from holdfast.streams.changes import Alarms, Change


async def test_a_change_wakes_all_who_wait_for_it_and_whoever_comes_later() -> None:
    change, alarms = Change(), Alarms()
    late = asyncio.get_running_loop().time() + 60
    waiting = [asyncio.create_task(change.wait(alarms, late)) for _ in range(3)]
    waiting.append(asyncio.create_task(change.wait()))
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    change.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)
        await change.wait(alarms, late)


async def test_an_alarm_wakes_at_its_time_and_not_before_although_nothing_changed() -> None:
    change, alarms, loop = Change(), Alarms(), asyncio.get_running_loop()
    async with asyncio.timeout(60):
        for delay in (0.0, 0.01, 0.12):
            until = loop.time() + delay
            await asyncio.gather(*(change.wait(alarms, until) for _ in range(3)))
            assert loop.time() >= until


async def test_many_who_wait_for_about_the_same_time_share_a_timer_and_leave_nothing_behind() -> None:
    change, alarms = Change(), Alarms()
    until = asyncio.get_running_loop().time() + 60
    waiting = [asyncio.create_task(change.wait(alarms, until)) for _ in range(100)]
    await asyncio.sleep(0)
    [due] = alarms._due.values()
    assert len(due) == 100
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    change.set()
    await asyncio.wait(waiting)
    assert not due

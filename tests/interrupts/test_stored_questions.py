"""Runs that have asked something and end without a worker: the thread asks it."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from holdfast.db.connect import Database
from holdfast.errors import LeaseLost
from holdfast.settings import Settings
from tests.interrupts.decisions import Decisions, ask_once, ask_twice
from tests.interrupts.without_worker import ENDS, SHOWN, end, side_by_side, waiting
from tests.support.catalogs import catalog_of
from tests.support.records import post_run, query
from tests.support.station import Station, open_station
from tests.support.waiting import until

STORED = "SELECT 1 FROM checkpoint_writes WHERE position(%s IN blob) > 0"


async def hang(state: Decisions) -> Decisions:
    await asyncio.Event().wait()
    return {}


async def execute_until(station: Station, stored: str) -> None:
    """Begin an attempt, and lose its worker when something is stored."""
    [attempt] = await station.claim()
    executing = asyncio.create_task(station.executor.execute(attempt))

    async def is_stored() -> bool:
        return bool(await query(station.database, STORED, stored))

    await until(is_stored, "the question is stored")
    attempt.stop(LeaseLost("the worker died"))
    assert await executing is None
    await query(station.database, "UPDATE worker SET status = 'lost' RETURNING 1")


@pytest.mark.parametrize("how", ENDS)
async def test_question_that_follows_another_is_shown_and_can_be_answered(
    settings: Settings, database: Database, how: str
) -> None:
    thread_id, catalog = uuid4(), catalog_of(graph=side_by_side(ask_twice, ask_once))
    async with open_station(settings, database, catalog) as station:
        await post_run(database, "graph", thread_id=thread_id, input={"decisions": []})
        await station.execute_next()
        ids = await waiting(database)
        resume = {ids["first?"]: "one", ids["beside?"]: "hang"}
        await post_run(database, "graph", thread_id=thread_id, command={"resume": resume})
        await execute_until(station, "second?")
    await end(database, thread_id, how)

    ids = await waiting(database)
    assert set(ids) == {"second?", "beside?"}
    [thread] = await query(database, SHOWN)
    assert thread["resting_status"] == ("interrupted" if how == "cancelled" else "error")
    assert set(thread["questions"]) == {"second?", "beside?"}
    async with open_station(settings, database, catalog) as station:
        resume = {ids["second?"]: "two", ids["beside?"]: "ok"}
        await post_run(database, "graph", thread_id=thread_id, command={"resume": resume})
        await station.execute_next()
    [thread] = await query(database, "SELECT values FROM thread")
    assert sorted(thread["values"]["decisions"]) == ["beside ok", "first one", "second two"]
    assert await waiting(database) == {}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("readable", [True, False], ids=["readable", "unreadable"])
async def test_first_question_is_shown_if_it_can_be_read(
    settings: Settings, database: Database, how: str, readable: bool
) -> None:
    thread_id, catalog = uuid4(), catalog_of(graph=side_by_side(ask_once, hang))
    async with open_station(settings, database, catalog) as station:
        await post_run(database, "graph", thread_id=thread_id, input={"decisions": []})
        await execute_until(station, "beside?")
    if not readable:
        await query(database, "UPDATE checkpoint_writes SET blob = '\\x91c1' WHERE idx = -3 RETURNING 1")
    await end(database, thread_id, how)

    expected = ["beside?"] if readable else []
    assert list(await waiting(database)) == expected
    [thread] = await query(database, SHOWN)
    assert (thread["resting_status"], thread["questions"]) == (
        "interrupted" if how == "cancelled" else "error",
        expected,
    )

"""Past states go when they are old enough; what a thread needs to go on stays, however old it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, TypedDict
from uuid import UUID, uuid4

import pytest
from langgraph.checkpoint.base.id import uuid6
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from psycopg.rows import DictRow

from holdfast.db.connect import Database
from holdfast.lifecycle.service import run_until
from holdfast.resources import history
from holdfast.resources.checkpoints import PooledSaver
from holdfast.resources.history import count_old, first_id, prune_next, written_at
from holdfast.settings import Settings
from holdfast.worker.main import Worker
from tests.support.ageing import age_thread
from tests.support.catalogs import catalog_of
from tests.support.smoke import ended, post

DAY = 86_400.0


class Notes(TypedDict, total=False):
    notes: Annotated[list[str], lambda old, new: [*old, *new]]
    # Written once, and referred to by every checkpoint after.
    title: dict[str, str]


def titled(_: Notes) -> Notes:
    return {"title": {"of": "the first run"}, "notes": ["titled"]}


def noted(_: Notes) -> Notes:
    return {"notes": ["noted"]}


def asked(_: Notes) -> Notes:
    return {"notes": [str(interrupt("what next?"))]}


def inner(*, asks: bool) -> Any:
    new: Any = StateGraph(Notes)
    built = new.add_node("first", noted).add_node("second", asked if asks else noted)
    return built.add_edge(START, "first").add_edge("first", "second").add_edge("second", END).compile()


def outer(*, asks: bool) -> Any:
    new: Any = StateGraph(Notes)
    built = new.add_node("before", noted).add_node("inside", inner(asks=asks)).add_node("after", noted)
    built = built.add_edge(START, "before").add_edge("before", "inside").add_edge("inside", "after")
    return built.add_edge("after", END).compile()


def plain() -> Any:
    new: Any = StateGraph(Notes)
    built = new.add_node("entitle", titled).add_node("note", noted).add_node("again", noted)
    built = built.add_conditional_edges(START, lambda state: "note" if state.get("title") else "entitle")
    return built.add_edge("entitle", "note").add_edge("note", "again").add_edge("again", END).compile()


GRAPHS = {"plain": plain(), "asking": outer(asks=True), "calling": outer(asks=False)}


@asynccontextmanager
async def working(settings: Settings) -> AsyncIterator[None]:
    worker = Worker(settings, catalog_of(**GRAPHS))
    task = asyncio.create_task(run_until(worker, worker.stop_requested))
    try:
        yield
    finally:
        worker.request_stop()
        await task


async def ran(database: Database, graph_id: str, thread_id: UUID, **new: Any) -> DictRow:
    return await ended(database, await post(database, graph_id, {"notes": ["given"]}, thread_id, **new))


async def rows(database: Database, statement: str, *parameters: object) -> list[DictRow]:
    async with database.connection() as connection:
        return await (await connection.execute(statement.encode(), parameters)).fetchall()


async def checkpoints(database: Database, thread_id: UUID) -> list[DictRow]:
    return await rows(database, "SELECT * FROM checkpoints WHERE thread_id = %s ORDER BY checkpoint_id", str(thread_id))


async def states(database: Database, thread_id: UUID) -> list[Any]:
    """The values of every state that is left, the newest first: all of it can be read."""
    saver = PooledSaver(database)
    config: Any = {"configurable": {"thread_id": str(thread_id), "checkpoint_ns": ""}}
    return [one.checkpoint["channel_values"] async for one in saver.alist(config)]


async def nothing_hangs(database: Database, thread_id: UUID) -> None:
    """No writes and no blobs are left of checkpoints that are gone, and no parent is named that is."""
    left = {(row["checkpoint_ns"], row["checkpoint_id"]) for row in await checkpoints(database, thread_id)}
    referred = {
        (row["checkpoint_ns"], channel, str(version))
        for row in await checkpoints(database, thread_id)
        for channel, version in row["checkpoint"]["channel_versions"].items()
    }
    for row in await checkpoints(database, thread_id):
        parent = row["parent_checkpoint_id"]
        assert parent is None or (row["checkpoint_ns"], parent) in left
    for row in await rows(database, "SELECT * FROM checkpoint_writes WHERE thread_id = %s", str(thread_id)):
        assert (row["checkpoint_ns"], row["checkpoint_id"]) in left
    for row in await rows(database, "SELECT * FROM checkpoint_blobs WHERE thread_id = %s", str(thread_id)):
        assert (row["checkpoint_ns"], row["channel"], row["version"]) in referred


async def pruned(database: Database) -> int:
    """Prune whatever is due, and say how many checkpoints went."""
    gone = 0
    while (one := await prune_next(database, DAY)) is not None:
        gone += one.checkpoints
    return gone


def test_the_time_of_a_checkpoint_is_in_its_id() -> None:
    before = datetime.now(UTC)
    ids = [str(uuid6(clock_seq=step)) for step in range(100)]
    assert first_id(before) <= min(ids)
    assert max(ids) < first_id(datetime.now(UTC).replace(year=2100))
    for one in ids:
        assert abs((written_at(one) - before).total_seconds()) < 60
        assert first_id(written_at(one)) <= one


async def test_old_states_go_and_the_latest_stays(settings: Settings, database: Database) -> None:
    thread_id, other = uuid4(), uuid4()
    async with working(settings):
        await ran(database, "plain", thread_id)
        await ran(database, "plain", other)
        whole = len(await checkpoints(database, thread_id))
        latest = (await states(database, thread_id))[0]
        assert await pruned(database) == 0, "it is young"
        await age_thread(database, thread_id, days=2)
        assert await count_old(database, DAY) == whole - 1
        assert await pruned(database) == whole - 1 >= 4
        assert await states(database, thread_id) == [latest]
        await nothing_hangs(database, thread_id)
        assert len(await checkpoints(database, other)) == whole
        assert await count_old(database, DAY) == 0
        again = await ran(database, "plain", thread_id)
    assert again["status"] == "success"
    final = (await states(database, thread_id))[0]
    assert final["title"] == {"of": "the first run"}
    assert final["notes"] == ["given", "titled", "noted", "noted", "given", "noted", "noted"]


async def test_young_states_stay_with_all_they_refer_to(settings: Settings, database: Database) -> None:
    thread_id = uuid4()
    async with working(settings):
        await ran(database, "plain", thread_id)
        await age_thread(database, thread_id, days=2)
        await ran(database, "plain", thread_id)
    before = await states(database, thread_id)
    gone = await pruned(database)
    assert 0 < gone < len(before)
    # The first run's last state is not the latest any more.
    assert await states(database, thread_id) == before[: len(before) - gone]
    assert all(state["title"] == {"of": "the first run"} for state in await states(database, thread_id))
    await nothing_hangs(database, thread_id)


async def test_what_is_left_is_looked_at_again_when_it_comes_of_age(settings: Settings, database: Database) -> None:
    thread_id = uuid4()
    async with working(settings):
        await ran(database, "plain", thread_id)
        await age_thread(database, thread_id, days=2)
        await ran(database, "plain", thread_id)
    assert await pruned(database) > 0
    left = len(await checkpoints(database, thread_id))
    assert left > 1
    assert await prune_next(database, DAY) is None, "it is not looked at for nothing"
    await age_thread(database, thread_id, days=2)
    assert await pruned(database) == left - 1
    await age_thread(database, thread_id, days=2)
    assert await prune_next(database, DAY) is None, "nor when there is nothing left to do"


async def test_a_look_in_the_middle_of_a_run_that_was_quick_is_not_the_last(
    settings: Settings, database: Database
) -> None:
    """When the first of its checkpoints are old and the last are not, the rest comes of age in a moment."""
    thread_id = uuid4()
    async with working(settings):
        await ran(database, "plain", thread_id)
    middle = (await checkpoints(database, thread_id))[2]["checkpoint_id"]
    async with database.transaction() as connection:
        # As it will be at that moment.
        ttl = 3600.0
        at = written_at(middle)
        outcome = await history._prune(connection, thread_id, datetime.fromtimestamp(at.timestamp() + ttl, tz=UTC), ttl)
    assert 0 < outcome.checkpoints <= 2
    [thread] = await rows(
        database, "SELECT history_from < state_updated_at AS due FROM thread WHERE thread_id = %s", thread_id
    )
    assert thread["due"], "it is still to be looked at"
    await age_thread(database, thread_id, days=2)
    await pruned(database)
    assert len(await checkpoints(database, thread_id)) == 1


async def test_an_interrupt_can_be_answered_after_any_time(settings: Settings, database: Database) -> None:
    thread_id = uuid4()
    async with working(settings):
        run = await ran(database, "asking", thread_id)
        [thread] = await rows(database, "SELECT status FROM thread WHERE thread_id = %s", thread_id)
        assert thread["status"] == "interrupted", run
        namespaces = {row["checkpoint_ns"] for row in await checkpoints(database, thread_id)}
        assert len(namespaces) == 2
        await age_thread(database, thread_id, days=2)
        assert await pruned(database) > 0
        assert {row["checkpoint_ns"] for row in await checkpoints(database, thread_id)} == namespaces
        await nothing_hangs(database, thread_id)
        kwargs = {"input": None, "command": {"resume": "sleep"}}
        answered = await ended(database, await post(database, "asking", None, thread_id, kwargs=kwargs))
    assert answered["status"] == "success"
    assert (await states(database, thread_id))[0]["notes"][-2:] == ["sleep", "noted"]


async def test_a_call_of_a_subgraph_goes_with_the_checkpoint_it_was_called_from(
    settings: Settings, database: Database
) -> None:
    thread_id = uuid4()
    async with working(settings):
        await ran(database, "asking", thread_id)
        kwargs = {"input": None, "command": {"resume": "sleep"}}
        await ended(database, await post(database, "asking", None, thread_id, kwargs=kwargs))
        assert len({row["checkpoint_ns"] for row in await checkpoints(database, thread_id)}) == 2
        await age_thread(database, thread_id, days=2)
        await pruned(database)
    assert [row["checkpoint_ns"] for row in await checkpoints(database, thread_id)] == [""]
    await nothing_hangs(database, thread_id)


async def test_a_thread_with_an_unfinished_run_is_left_alone(settings: Settings, database: Database) -> None:
    thread_id = uuid4()
    async with working(settings):
        await ran(database, "plain", thread_id)
    whole = await checkpoints(database, thread_id)
    await post(database, "plain", {"notes": []}, thread_id)
    await age_thread(database, thread_id, days=2)
    assert await prune_next(database, DAY) is None
    assert len(await checkpoints(database, thread_id)) == len(whole)


LEFT_ALONE = {
    "deltas": "UPDATE checkpoints SET metadata = metadata || '{\"counters_since_delta_snapshot\": {}}'",
    "snapshots": "UPDATE checkpoints SET checkpoint = jsonb_set(checkpoint, '{channel_values,title}', 'true') "
    "WHERE checkpoint -> 'channel_versions' ? 'title'",
    "dead letter": "UPDATE run SET dead_letter = 'poison', status = 'error'",
    "other ids": "UPDATE checkpoints SET checkpoint_id = overlay(checkpoint_id PLACING '4' FROM 15)",
}


@pytest.mark.parametrize("why", LEFT_ALONE)
async def test_what_cannot_be_pruned_is_left_whole_and_not_looked_at_for_ever(
    settings: Settings, database: Database, why: str
) -> None:
    thread_id = uuid4()
    async with working(settings):
        await ran(database, "plain", thread_id)
    whole = len(await checkpoints(database, thread_id))
    await age_thread(database, thread_id, days=2)
    async with database.transaction() as connection:
        await connection.execute(LEFT_ALONE[why].encode())
    assert await count_old(database, DAY) == 0
    assert await pruned(database) == 0
    assert len(await checkpoints(database, thread_id)) == whole
    assert await prune_next(database, DAY) is None


async def test_a_long_history_goes_in_several_transactions(settings: Settings, database: Database) -> None:
    thread_id = uuid4()
    async with working(settings):
        await ran(database, "calling", thread_id)
    await age_thread(database, thread_id, days=2)
    latest = (await states(database, thread_id))[0]
    gone = []
    while (one := await prune_next(database, DAY, at_once=2)) is not None:
        gone.append(one.checkpoints)
        assert (await states(database, thread_id))[0] == latest
        await nothing_hangs(database, thread_id)
    assert len(gone) >= 3
    assert max(gone) == 2
    assert len(await checkpoints(database, thread_id)) == 1

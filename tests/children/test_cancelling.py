"""Who stops a run stops its children, and theirs: at once, and if not then by upkeep."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from uuid import UUID

import httpx
import pytest
from psycopg.rows import DictRow

import holdfast
from holdfast.db.connect import Database
from holdfast.engine.cancel import cancel_runs
from holdfast.graphs.catalog import GraphCatalog
from holdfast.settings import Settings
from tests.children.family import child, children_of, fan, has_children, runs_below, waits
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Gate, Words, line
from tests.support.records import post_run, query, run_ended, run_row, thread_row
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.waiting import until, until_true


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, pool_max=8, port=free_port())


class Three:
    """Three generations; the youngest stand at a gate."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.catalog: GraphCatalog = catalog_of(
            parent=fan("a", "b", graph="middle"), middle=fan("x"), child=child(self.gate), echo=child()
        )


async def generations(database: Database, run_id: UUID) -> list[DictRow]:
    """All runs below one, once the youngest of three generations run."""
    for row in await has_children(database, run_id, 2):
        for below in await has_children(database, row["run_id"]):

            async def runs(run_id: UUID = below["run_id"]) -> bool:
                return bool((await run_row(database, run_id))["status"] == "running")

            await until(runs, "the youngest run")
        await waits(database, row["run_id"])
    await waits(database, run_id)
    middle = await runs_below(database, run_id)
    return [*middle, *[row for one in middle for row in await runs_below(database, one["run_id"])]]


async def all_interrupted(database: Database, rows: list[DictRow]) -> None:
    for row in rows:
        assert (await run_ended(database, row["run_id"]))["status"] == "interrupted"


async def nothing_is_left(database: Database) -> None:
    async def swept() -> bool:
        return not await query(database, "SELECT 1 FROM abandoned")

    await until(swept, "upkeep has seen to it")


@pytest.mark.parametrize("action", ["interrupt", "rollback"])
async def test_a_request_cancels_all_generations(settings: Settings, database: Database, action: str) -> None:
    three = Three()
    # Nobody does upkeep: it is the request that cancels.
    async with answering(settings, three.catalog) as client, running_worker(settings, three.catalog, upkeep=False):
        await _no_upkeep(database)
        created = await post_run(database, "parent", input=GO)
        run = created.run
        below = await generations(database, run["run_id"])
        assert len(below) == 4
        await until_true(lambda: three.gate.visits == 2, "the youngest are at the gate")
        path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/cancel"
        assert (await client.post(path, params={"action": action})).status_code == 202
        # A parent that waits ends at once: nobody executes it.
        left = await query(database, "SELECT status FROM run WHERE run_id = %s", run["run_id"])
        assert [row["status"] for row in left] == (["interrupted"] if action == "interrupt" else [])
        await all_interrupted(database, below)
    assert three.gate.stopped == 2
    assert (await thread_row(database, run["thread_id"]))["status"] != "busy"
    if action == "rollback":
        assert await children_of(database, run["run_id"]) == []


async def _no_upkeep(database: Database) -> None:
    """Have nothing left for upkeep to do: a web process does it, too."""
    async with database.connection() as connection:
        await connection.execute("CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        await connection.execute("CREATE TRIGGER lose BEFORE INSERT ON abandoned FOR EACH ROW EXECUTE FUNCTION lose()")


@pytest.mark.parametrize("strategy", ["interrupt", "rollback"])
async def test_run_that_replaces_the_parent_cancels_its_children(
    settings: Settings, database: Database, strategy: str
) -> None:
    three = Three()
    async with answering(settings, three.catalog) as client, running_worker(settings, three.catalog, upkeep=False):
        await _no_upkeep(database)
        run = (await post_run(database, "parent", input=GO)).run
        below = await generations(database, run["run_id"])
        body = {"assistant_id": "echo", "input": GO, "multitask_strategy": strategy}
        answered = await client.post(f"/threads/{run['thread_id']}/runs/wait", json=body)
        assert answered.json()["words"][-1] == "done"
        await all_interrupted(database, below)


async def test_upkeep_cancels_what_a_crash_left(settings: Settings, database: Database) -> None:
    three = Three()
    async with running_worker(settings, three.catalog):
        run = (await post_run(database, "parent", input=GO)).run
        below = await generations(database, run["run_id"])
        # Committed, and then the process that did it was gone.
        await cancel_runs(database, run["thread_id"], [run["run_id"]], "rollback")
        await all_interrupted(database, below)
        await nothing_is_left(database)


async def test_a_parent_that_runs_takes_its_children_with_it(settings: Settings, database: Database) -> None:
    gate, own = Gate(), Gate()

    async def spread(state: Words) -> dict[str, Any]:
        await holdfast.spawn("child", GO, key="a")
        return await own(state)

    catalog = catalog_of(parent=line(spread), child=child(gate))
    async with answering(settings, catalog) as client, running_worker(settings, catalog):
        run = (await post_run(database, "parent", input=GO)).run
        await gate.reached.wait()
        await own.reached.wait()
        path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/cancel"
        assert (await client.post(path)).status_code == 202
        assert (await run_ended(database, run["run_id"]))["status"] == "interrupted"
        await all_interrupted(database, await runs_below(database, run["run_id"]))
        await nothing_is_left(database)
    assert (own.stopped, gate.stopped) == (1, 1)


@pytest.mark.parametrize("how", ["in a group", "caught"])
async def test_spawn_in_a_run_that_is_to_stop_ends_it_as_cancelled(
    settings: Settings, database: Database, how: str
) -> None:
    """The cancel is stored, and its hint has not arrived. What `spawn` raises may be in a group, or be caught."""

    async def parent(state: Words) -> dict[str, Any]:
        await query(database, "UPDATE run SET cancel_action = 'interrupt' WHERE status = 'running' RETURNING 1")
        spawning = holdfast.spawn("child", {"words": ["one"]}, key="one")
        if how == "caught":
            with suppress(Exception):
                await spawning
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(spawning)
        return {"words": ["went on"]}

    async with running_worker(settings, catalog_of(parent=line(parent), child=child())):
        created = await post_run(database, "parent", input=GO)
        run = await run_ended(database, created.run["run_id"])
    assert (run["status"], run["error"]["error"]) == ("interrupted", "UserInterrupt")
    assert await runs_below(database, run["run_id"]) == []


async def test_time_runs_out_for_a_parent_that_waits(settings: Settings, database: Database) -> None:
    async def spread(state: Words) -> dict[str, Any]:
        await holdfast.gather(holdfast.spawn("child", GO, key="a", after_seconds=3600))
        return {}

    short = settings.model_copy(update={"run_timeout": 1.0})
    async with running_worker(short, catalog_of(parent=line(spread), child=child())):
        run = (await post_run(database, "parent", input=GO)).run
        ended = await run_ended(database, run["run_id"])
        assert (ended["status"], ended["error"]["error"]) == ("timeout", "RunTimeout")
        await all_interrupted(database, await runs_below(database, run["run_id"]))


async def test_a_failed_parent_leaves_its_children_alone(settings: Settings, database: Database) -> None:
    gate = Gate()

    async def spread(state: Words) -> dict[str, Any]:
        await holdfast.spawn("child", GO, key="a")
        raise ValueError("no good")

    async with running_worker(settings, catalog_of(parent=line(spread), child=child(gate))):
        run = (await post_run(database, "parent", input=GO)).run
        assert (await run_ended(database, run["run_id"]))["status"] == "error"
        await gate.reached.wait()
        gate.opened.set()
        [below] = await runs_below(database, run["run_id"])
        assert (await run_ended(database, below["run_id"]))["status"] == "success"


async def test_a_cancelled_child_is_a_failure_for_its_parent(settings: Settings, database: Database) -> None:
    gate = Gate()
    catalog = catalog_of(parent=fan("a", return_exceptions=True), child=child(gate))
    async with answering(settings, catalog) as client, running_worker(settings, catalog):
        run = (await post_run(database, "parent", input=GO)).run
        await gate.reached.wait()
        await waits(database, run["run_id"])
        [below] = await runs_below(database, run["run_id"])
        await _cancel(client, below)
        ended = await run_ended(database, run["run_id"])
    assert (await thread_row(database, ended["thread_id"]))["values"]["words"] == ["go", "a!interrupted"]


async def _cancel(client: httpx.AsyncClient, run: DictRow) -> None:
    answered = await client.post(f"/threads/{run['thread_id']}/runs/{run['run_id']}/cancel")
    assert answered.status_code == 202

"""Families as clients see them: by HTTP, by the command line, and with somebody else's eyes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.settings import Settings
from tests.children.family import child, fan, runs_below, waits
from tests.cli.processes import holdfast
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Gate
from tests.support.records import run_ended
from tests.support.servers import free_port
from tests.support.serving import answering, serving

AUTH_PROJECT = Path(__file__).parents[1] / "support" / "auth_project" / "langgraph.json"


@pytest.fixture
def settings(database_url: str) -> Settings:
    return quick_settings(database_url, pool_max=8, port=free_port())


async def json_of(request: Any, status: int = 200) -> Any:
    answered = await request
    assert answered.status_code == status, answered.text
    return answered.json()


async def post(client: httpx.AsyncClient, assistant: str = "parent") -> dict[str, Any]:
    body = {"assistant_id": assistant, "input": GO, "if_not_exists": "create"}
    run: dict[str, Any] = await json_of(client.post(f"/threads/{uuid4()}/runs", json=body))
    return run


def path_of(run: dict[str, Any]) -> str:
    return f"/threads/{run['thread_id']}/runs/{run['run_id']}"


async def command(settings: Settings, *arguments: str) -> str:
    environ = {**os.environ, "HOLDFAST_URL": f"http://127.0.0.1:{settings.port}", "COLUMNS": "200"}
    done = await asyncio.to_thread(
        subprocess.run, holdfast(*arguments), env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout + done.stderr)


async def test_children_can_be_seen_while_they_run_and_after(settings: Settings, database: Database) -> None:
    gate = Gate()
    catalog = catalog_of(parent=fan("a", graph="middle"), middle=fan("x"), child=child(gate))
    async with serving(settings, catalog) as client:
        run = await post(client)
        assert "parent_run_id" not in run
        await gate.reached.wait()
        [middle] = await runs_below(database, run["run_id"])
        await waits(database, middle["run_id"])
        await waits(database, run["run_id"])
        shown = await json_of(client.get(path_of(run)))
        assert (shown["status"], shown["waiting_for"]) == ("pending", "its children")
        [listed] = await json_of(client.get(f"{path_of(run)}/children"))
        assert (listed["key"], listed["graph_id"], listed["status"], listed["awaited"]) == (
            "a",
            "middle",
            "pending",
            True,
        )
        assert (listed["run_id"], listed["children"], listed["ended_at"]) == (str(middle["run_id"]), 1, None)
        assert (await json_of(client.get(path_of(listed))))["parent_run_id"] == run["run_id"]
        assert (await json_of(client.get(f"/threads/{listed['thread_id']}")))["status"] == "busy"

        shown = await command(settings, "runs", "children", run["run_id"])
        assert [line.split()[1:] for line in shown.splitlines()[1:]] == [
            ["pending", "middle", "a"],
            ["running", "child", "x"],
        ]
        gate.opened.set()
        await run_ended(database, run["run_id"])
        [listed] = await json_of(client.get(f"{path_of(run)}/children"))
        assert (listed["status"], listed["error"]) == ("success", None)
        assert listed["ended_at"] is not None
        assert await json_of(client.get(f"{path_of(run)}/children", params={"offset": 1})) == []
        printed = await command(settings, "runs", "children", run["run_id"], "--json")
        told = [json.loads(line) for line in printed.splitlines()]
        assert [(one["depth"], one["key"], one["status"]) for one in told] == [(1, "a", "success"), (2, "x", "success")]
        assert "No children" in await command(settings, "runs", "children", told[1]["run_id"])


async def test_the_stream_of_a_parent_goes_on_over_the_wait(settings: Settings, database: Database) -> None:
    gate = Gate()
    async with serving(settings, catalog_of(parent=fan("a"), child=child(gate))) as client:
        body = {"assistant_id": "parent", "input": GO, "stream_mode": ["values", "updates"]}
        names: list[str] = []
        async with client.stream("POST", "/runs/stream", json=body) as stream:
            run_id = stream.headers["content-location"].rsplit("/", 1)[-1]
            opening = asyncio.create_task(_open_when_waiting(database, run_id, gate))
            async for line in stream.aiter_lines():
                assert "__interrupt__" not in line
                if line.startswith("event: "):
                    names.append(line.removeprefix("event: "))
            await opening
    # Resuming says the values once more, as it does after a take-over.
    assert names == ["metadata", "values", "metadata", "values", "updates", "values"]


async def _open_when_waiting(database: Database, run_id: Any, gate: Gate) -> None:
    await waits(database, run_id)
    gate.opened.set()


async def test_children_of_unknown_run_are_not_found(settings: Settings) -> None:
    async with answering(settings, catalog_of(parent=fan("a"), child=child())) as client:
        run = await post(client)
        assert await json_of(client.get(f"{path_of(run)}/children")) == []
        await json_of(client.get(f"/threads/{run['thread_id']}/runs/{uuid4()}/children"), 404)
        await json_of(client.get(f"/threads/{uuid4()}/runs/{run['run_id']}/children"), 404)
        await json_of(client.get(f"{path_of(run)}/children", params={"limit": 0}), 422)


@pytest.fixture
async def guarded(settings: Settings) -> AsyncIterator[str]:
    """A server where each user sees what is theirs."""
    project = load_config(AUTH_PROJECT)
    graphs = catalog_of(parent=fan("a"), child=child())
    catalog = GraphCatalog(_with_auth(graphs, project), graphs._loaded)
    async with answering(settings, catalog) as client, running_worker(settings, catalog):
        yield str(client.base_url)


def _with_auth(graphs: GraphCatalog, project: ProjectConfig) -> ProjectConfig:
    return replace(graphs.project, raw=project.raw, directory=project.directory, path=project.path)


async def test_child_is_visible_only_to_callers_who_see_its_parent(guarded: str, database: Database) -> None:
    def client_of(token: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=guarded, headers={"authorization": f"Bearer {token}"}, timeout=30)

    async with client_of("alice") as alice, client_of("bob") as bob:
        run = await post(alice)
        await run_ended(database, run["run_id"])
        [listed] = await json_of(alice.get(f"{path_of(run)}/children"))
        thread = await json_of(alice.get(f"/threads/{listed['thread_id']}"))
        assert thread["metadata"]["owner"] == "alice"
        assert (await json_of(alice.get(path_of(listed))))["kwargs"]["config"]["configurable"]["user_id"] == "alice"
        await json_of(bob.get(f"{path_of(run)}/children"), 404)
        await json_of(bob.get(f"/threads/{listed['thread_id']}"), 404)
        await json_of(bob.get(path_of(listed)), 404)

"""What assistants say about their graphs, what they lend to runs, and the assistants that graphs have by themselves."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.config import get_config
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from holdfast.db.connect import Database
from holdfast.graphs.assistants import assistant_id
from holdfast.graphs.catalog import GraphCatalog
from holdfast.resources.assistants import ensure_system_assistants
from holdfast.settings import Settings
from tests.support.assistants import ECHO, make, ok
from tests.support.catalogs import catalog_of
from tests.support.serving import serving

SCHEMAS = {"input_schema", "output_schema", "state_schema", "config_schema", "context_schema"}


class Seen(TypedDict, total=False):
    context: dict[str, Any]
    options: dict[str, Any]
    tags: list[str]


@dataclass
class Strict:
    """Refuses keys it does not know."""

    model: str = "none"
    tone: str = "none"


def look(state: Seen, runtime: Runtime[Strict]) -> Seen:
    config = get_config()
    return {
        "context": {"model": runtime.context.model, "tone": runtime.context.tone},
        "options": {key: config["configurable"].get(key) for key in ("model", "tone", "langgraph_auth_user")},
        "tags": config.get("tags") or [],
    }


seeing = StateGraph(Seen, context_schema=Strict).add_node(look).add_edge(START, "look").compile(name="The Seer")


def nested(levels: int) -> Any:
    builder = StateGraph(Seen).add_node("leaf", lambda state: state)
    builder.add_edge(START, "leaf")
    if levels:
        builder.add_node("inner", nested(levels - 1)).add_edge("leaf", "inner")
    return builder.compile()


class Opaque:
    """Nothing that JSON Schema knows."""


class Odd(TypedDict, total=False):
    thing: Opaque


odd = StateGraph(Odd).add_node("only", lambda state: state).add_edge(START, "only").compile()


class Plain(typing.TypedDict, total=False):
    """Before Python 3.12 pydantic, and with it LangGraph, has no schema for this kind of state."""

    words: list[str]


plain = StateGraph(Plain).add_node("only", lambda state: state).add_edge(START, "only").compile()


def factory(config: RunnableConfig) -> Any:
    return nested(1) if config["configurable"]["depth"] == 1 else nested(0)


@pytest.fixture
async def special(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A server with the graphs of this module."""
    graphs: dict[str, Any] = {"seeing": seeing, "deep": nested(2), "odd": odd, "plain": plain, "made": factory}
    async with serving(settings, catalog_of(**graphs)) as client:
        yield client


async def test_C55_what_an_assistant_says_about_its_graph(web: httpx.AsyncClient) -> None:
    own = await make(web, graph_id="parent")
    for named in ("parent", str(assistant_id("parent")), own["assistant_id"]):
        schemas = await ok(web.get(f"/assistants/{named}/schemas"))
        assert set(schemas) == {"graph_id", *SCHEMAS}
        assert schemas["graph_id"] == "parent"
        for name in ("input_schema", "output_schema", "state_schema"):
            assert set(schemas[name]["properties"]) == {"topic", "notes", "text"}, name
        assert (schemas["context_schema"], schemas["config_schema"]["properties"]) == (None, {})

        closed = await ok(web.get(f"/assistants/{named}/graph"))
        assert {node["id"] for node in closed["nodes"]} == {"__start__", "research", "write", "__end__"}
        assert {(edge["source"], edge["target"]) for edge in closed["edges"]} == {
            ("__start__", "research"),
            ("research", "write"),
            ("write", "__end__"),
        }
        for xray in ("true", "1"):
            opened = await ok(web.get(f"/assistants/{named}/graph?xray={xray}"))
            assert "research:search" in {node["id"] for node in opened["nodes"]}

        for path in ("", "/research"):
            inside = await ok(web.get(f"/assistants/{named}/subgraphs{path}?recurse=true"))
            assert list(inside) == ["research"]
            assert set(inside["research"]) == SCHEMAS
            assert set(inside["research"]["state_schema"]["properties"]) == {"topic", "notes"}
        assert await ok(web.get(f"/assistants/{named}/subgraphs/nothing")) == {}


async def test_drawing_opens_as_many_levels_as_asked_for(special: httpx.AsyncClient) -> None:
    leaves = {"0": 1, "false": 1, "1": 2, "2": 3, "true": 3, "yes": 3}
    for xray, expected in leaves.items():
        drawn = await ok(special.get(f"/assistants/deep/graph?xray={xray}"))
        assert sum(node["id"].endswith("leaf") for node in drawn["nodes"]) == expected, xray
    assert list(await ok(special.get("/assistants/deep/subgraphs"))) == ["inner"]
    assert list(await ok(special.get("/assistants/deep/subgraphs?recurse=true"))) == ["inner", "inner|inner"]
    assert list(await ok(special.get("/assistants/deep/subgraphs/inner%7Cinner"))) == ["inner|inner"]


async def test_what_cannot_be_described_is_null_and_what_cannot_be_built_is_said(special: httpx.AsyncClient) -> None:
    assert await ok(special.get("/assistants/odd/schemas")) == {
        "graph_id": "odd",
        "input_schema": None,
        "output_schema": None,
        "state_schema": None,
        "config_schema": {"title": "Configurable", "type": "object", "properties": {}},
        "context_schema": None,
    }
    await ok(special.get("/assistants/odd/graph"))
    described = await ok(special.get("/assistants/plain/schemas"))
    for name in ("input_schema", "output_schema", "state_schema"):
        assert described[name]["properties"]["words"]["items"] == {"type": "string"}, name
    for path in ("schemas", "graph", "subgraphs"):
        assert "depth" in (await ok(special.get(f"/assistants/made/{path}"), 422))["detail"]
    for depth, expected in ((0, []), (1, ["inner"])):
        made = await make(special, graph_id="made", context={"depth": depth})
        assert list(await ok(special.get(f"/assistants/{made['assistant_id']}/subgraphs"))) == expected
    options = (await ok(special.get("/assistants/seeing/schemas")))["context_schema"]
    assert set(options["properties"]) == {"model", "tone"}


async def test_a_run_takes_what_it_does_not_say_from_its_assistant(special: httpx.AsyncClient) -> None:
    standing = {"tags": ["standing"], "recursion_limit": 7, "metadata": {"from": "config", "a": "config"}}
    made = await make(
        special,
        graph_id="seeing",
        config={**standing, "configurable": {"model": "m1", "tone": "t1"}},
        metadata={"from": "assistant", "b": "assistant", "c": "assistant", "d": "assistant"},
    )
    thread = await ok(special.post("/threads", json={"metadata": {"c": "thread", "d": "thread"}}))

    async def run(**body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        path = f"/threads/{thread['thread_id']}/runs"
        posted = await ok(special.post(path, json={"assistant_id": made["assistant_id"], "input": {}, **body}))
        return posted, await ok(special.get(f"{path}/{posted['run_id']}/join"))

    posted, values = await run()
    assert posted["assistant_id"] == made["assistant_id"]
    assert posted["kwargs"]["config"]["recursion_limit"] == 7
    assert values["context"] == {"model": "m1", "tone": "t1"}
    assert values["options"] == {"model": "m1", "tone": "t1", "langgraph_auth_user": None}
    assert values["tags"] == ["standing"]

    posted, values = await run(
        context={"tone": "t2", "langgraph_auth_user": "root"},
        config={"tags": ["mine"], "metadata": {"d": "request config", "e": "request config", "run_id": "x"}},
        metadata={"e": "request", "assistant_id": "x", "thread_id": "x"},
    )
    assert values["context"] == {"model": "m1", "tone": "t2"}
    assert values["options"] == {"model": "m1", "tone": "t2", "langgraph_auth_user": None}
    assert values["tags"] == ["mine"]
    assert posted["metadata"] == {
        "from": "config",
        "a": "config",
        "b": "assistant",
        "c": "thread",
        "d": "request config",
        "e": "request",
        "graph_id": "seeing",
        "assistant_id": made["assistant_id"],
    }

    # What the graph's context does not know stays in `configurable`.
    posted, values = await run(config={"configurable": {"model": "m3", "other": 1}})
    assert values["context"] == {"model": "m3", "tone": "t1"}
    assert values["options"] == {"model": "m3", "tone": "t1", "langgraph_auth_user": None}
    assert posted["kwargs"]["config"]["configurable"]["other"] == 1

    await ok(special.patch(f"/assistants/{made['assistant_id']}", json={"context": {"tone": "t4"}}))
    _, values = await run()
    assert values["context"] == {"model": "none", "tone": "t4"}
    both = {"config": {"configurable": {"model": "x"}}, "context": {"tone": "y"}, "assistant_id": made["assistant_id"]}
    await ok(special.post(f"/threads/{thread['thread_id']}/runs", json=both), 400)


async def test_a_graphs_own_assistant_stays_while_the_graph_does(web: httpx.AsyncClient, database: Database) -> None:
    for named in ("echo", ECHO):
        await ok(web.delete(f"/assistants/{named}"), 409)
        await ok(web.patch(f"/assistants/{named}", json={"graph_id": "steps"}), 409)
    assert (await ok(web.patch("/assistants/echo", json={"name": "Mine", "graph_id": "echo"})))["version"] == 2

    await ensure_system_assistants(database, catalog_of(gone=odd))
    leftover = str(assistant_id("gone"))
    assert (await ok(web.get(f"/assistants/{leftover}")))["graph_id"] == "gone"
    await ok(web.get("/assistants/gone"), 422)
    await ok(web.post("/runs", json={"assistant_id": leftover}), 404)
    for path in ("graph", "schemas", "subgraphs"):
        await ok(web.get(f"/assistants/{leftover}/{path}"), 404)
    await ok(web.delete(f"/assistants/{leftover}"), 204)


async def test_processes_that_start_together_agree_on_the_graphs_assistants(database: Database) -> None:
    names = [f"graph{n}" for n in range(40)]
    catalogs = [catalog_of(**dict.fromkeys(order, odd)) for order in (names, names[::-1])]
    await asyncio.gather(*(ensure_system_assistants(database, catalog) for catalog in catalogs * 6))
    async with database.connection() as connection:
        for table in ("assistant", "assistant_version"):
            cursor = await connection.execute(f"SELECT assistant_id, version, metadata FROM {table}")
            rows = await cursor.fetchall()
            assert {row["assistant_id"] for row in rows} == {assistant_id(name) for name in names}
            assert len(rows) == len(names)
            assert all((row["version"], row["metadata"]) == (1, {"created_by": "system"}) for row in rows)


async def test_a_graphs_assistant_follows_the_project_until_somebody_changes_it(
    settings: Settings, database: Database
) -> None:
    def renamed(name: str) -> GraphCatalog:
        return catalog_of(seeing=seeing.copy({"name": name}), plain=odd)

    async with serving(settings, renamed("First")) as client:
        assert [(await ok(client.get(f"/assistants/{one}")))["name"] for one in ("seeing", "plain")] == [
            "First",
            "plain",
        ]
        await ensure_system_assistants(database, renamed("Second"))
        seen = await ok(client.get("/assistants/seeing"))
        assert (seen["name"], seen["version"]) == ("Second", 1)
        assert [one["name"] for one in await ok(client.post("/assistants/seeing/versions"))] == ["Second"]
        changed = await ok(client.patch("/assistants/seeing", json={"name": "Ours", "context": {"model": "m"}}))
        await ensure_system_assistants(database, renamed("Third"))
        assert await ok(client.get("/assistants/seeing")) == changed
        assert (await ok(client.post("/assistants/seeing/latest", json={"version": 1})))["name"] == "Second"

        # A process that does not know the graph may delete its assistant as a leftover: it comes back when needed.
        async with database.connection() as connection:
            await connection.execute("DELETE FROM assistant")
        assert (await ok(client.get("/assistants/seeing")))["version"] == 1

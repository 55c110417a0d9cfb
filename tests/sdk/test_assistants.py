"""The Python SDK's assistants, asynchronous and not, and RemoteGraph's drawing of one."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from langgraph.pregel.remote import RemoteGraph
from langgraph_sdk.errors import BadRequestError, ConflictError, NotFoundError, UnprocessableEntityError

from holdfast.graphs.assistants import assistant_id
from holdfast.settings import Settings
from tests.support.sdk import Sdk

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(params=["async", "sync"])
async def sdk(request: pytest.FixtureRequest, client: httpx.AsyncClient, settings: Settings) -> Any:
    opened = Sdk(f"http://127.0.0.1:{settings.port}", blocking=request.param == "sync")
    yield opened
    await opened.close()


async def test_C54_the_life_of_an_assistant(sdk: Sdk) -> None:
    identity = str(uuid4())
    first = await sdk(
        "assistants.create",
        "chat",
        config={"tags": ["a"], "configurable": {"model": "m1"}},
        metadata={"team": "x"},
        assistant_id=identity,
        name="One",
        description="first",
    )
    assert (first["assistant_id"], first["version"], first["context"]) == (identity, 1, {"model": "m1"})
    assert await sdk("assistants.get", identity) == first
    assert await sdk("assistants.create", "chat", assistant_id=identity, if_exists="do_nothing") == first
    with pytest.raises(ConflictError):
        await sdk("assistants.create", "chat", assistant_id=identity)
    with pytest.raises(NotFoundError):
        await sdk("assistants.create", "nothing")
    with pytest.raises(BadRequestError):
        await sdk("assistants.create", "chat", config={"configurable": {"a": 1}}, context={"b": 2})

    second = await sdk(
        "assistants.update",
        identity,
        graph_id="echo",
        context={"model": "m2"},
        metadata={"stage": 2},
        name="Two",
        description="second",
    )
    assert (second["version"], second["graph_id"], second["metadata"]) == (2, "echo", {"team": "x", "stage": 2})
    assert second["config"] == {"tags": ["a"], "configurable": {"model": "m2"}}
    versions = await sdk("assistants.get_versions", identity)
    assert [(one["version"], one["name"]) for one in versions] == [(2, "Two"), (1, "One")]
    found = await sdk("assistants.get_versions", identity, metadata={"stage": 2}, limit=1, offset=0)
    assert [one["version"] for one in found] == [2]
    restored = await sdk("assistants.set_latest", identity, 1)
    assert {**restored, "updated_at": None} == {**first, "updated_at": None}
    with pytest.raises(NotFoundError):
        await sdk("assistants.set_latest", identity, 9)

    assert await sdk("assistants.delete", identity, delete_threads=True) is None
    with pytest.raises(NotFoundError):
        await sdk("assistants.get", identity)
    with pytest.raises(UnprocessableEntityError):
        await sdk("assistants.get", "not-a-uuid")


async def test_C09_searching_counting_and_paging(sdk: Sdk) -> None:
    made = [await sdk("assistants.create", "chat", name=f"Bot {n}", metadata={"team": "x"}) for n in range(3)]
    everything = await sdk("assistants.search", limit=100)
    assert [one["assistant_id"] for one in everything[:3]] == [one["assistant_id"] for one in made[::-1]]
    assert {UUID(one["assistant_id"]) for one in everything[3:]} == {
        assistant_id(graph_id) for graph_id in ("ask", "chat", "echo", "parent", "steps")
    }
    ascending = await sdk(
        "assistants.search",
        metadata={"team": "x"},
        graph_id="chat",
        name="bot",
        sort_by="name",
        sort_order="asc",
        select=["name"],
    )
    assert ascending == [{"name": "Bot 0"}, {"name": "Bot 1"}, {"name": "Bot 2"}]
    assert await sdk("assistants.count", metadata={"team": "x"}) == 3
    assert await sdk("assistants.count", graph_id="chat", name="BOT 1") == 1
    seen: list[Any] = []
    cursor: str | None = "0"
    while cursor is not None:
        page = await sdk("assistants.search", limit=3, offset=int(cursor), response_format="object")
        seen += page["assistants"]
        cursor = page["next"]
    assert seen == everything


async def test_C55_looking_into_a_graph(sdk: Sdk) -> None:
    for named in ("parent", str(assistant_id("parent"))):
        closed, opened = [await sdk("assistants.get_graph", named, xray=xray) for xray in (False, 1)]
        assert len(closed["nodes"]) == 4
        assert len(opened["nodes"]) == 5
        schemas = await sdk("assistants.get_schemas", named)
        assert schemas["graph_id"] == "parent"
        assert schemas["input_schema"]["properties"]["topic"]["type"] == "string"
        assert list(await sdk("assistants.get_subgraphs", named)) == ["research"]
        assert list(await sdk("assistants.get_subgraphs", named, namespace="research", recurse=True)) == ["research"]
        assert await sdk("assistants.get_subgraphs", named, namespace="a/b|c") == {}


async def test_C08_running_an_assistant(sdk: Sdk) -> None:
    made = await sdk("assistants.create", "echo", metadata={"team": "x"}, context={"model": "m"})
    for named in ("echo", str(assistant_id("echo")), made["assistant_id"]):
        thread = await sdk("threads.create")
        values = await sdk("runs.wait", thread["thread_id"], named, input=HELLO)
        assert values["messages"][-1]["content"] == "hello"
        [run] = await sdk("runs.list", thread["thread_id"])
        assert run["metadata"]["assistant_id"] == run["assistant_id"]
    assert (run["assistant_id"], run["metadata"]["team"]) == (made["assistant_id"], "x")
    assert run["kwargs"]["context"] == {"model": "m"}
    assert run["kwargs"]["config"]["configurable"]["model"] == "m"
    with pytest.raises(NotFoundError):
        await sdk("runs.create", thread["thread_id"], str(uuid4()))
    with pytest.raises(UnprocessableEntityError):
        await sdk("runs.create", thread["thread_id"], "nobody")


async def test_a_remote_graph_draws_itself(client: httpx.AsyncClient, settings: Settings) -> None:
    remote = RemoteGraph("parent", url=f"http://127.0.0.1:{settings.port}")
    for drawn in (await remote.aget_graph(xray=True), await asyncio.to_thread(remote.get_graph, xray=True)):
        assert {"__start__", "write", "research:search"} <= set(drawn.nodes)
        assert "research" in drawn.draw_mermaid()

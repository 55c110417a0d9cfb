"""The Python SDK's threads, asynchronous and not, and RemoteGraph's view of their state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from langgraph.pregel.remote import RemoteGraph
from langgraph_sdk.errors import BadRequestError, ConflictError, NotFoundError, UnprocessableEntityError

from holdfast.settings import Settings
from tests.support.sdk import Sdk

STEPS = ["s1", "s2", "s3", "s4", "s5"]
QUICK = {"seconds": 0}


@pytest.fixture(params=["async", "sync"])
async def sdk(request: pytest.FixtureRequest, client: httpx.AsyncClient, settings: Settings) -> AsyncIterator[Sdk]:
    opened = Sdk(f"http://127.0.0.1:{settings.port}", blocking=request.param == "sync")
    yield opened
    await opened.close()


async def test_C01_C52_the_life_of_a_thread(sdk: Sdk) -> None:
    fresh = await sdk("threads.create")
    UUID(fresh["thread_id"])
    assert (fresh["status"], fresh["metadata"]) == ("idle", {})
    identity = str(uuid4())
    made = await sdk("threads.create", thread_id=identity, metadata={"a": 1}, graph_id="steps", ttl=60)
    assert made["metadata"] == {"a": 1, "graph_id": "steps"}
    assert await sdk("threads.get", identity) == made
    with pytest.raises(ConflictError):
        await sdk("threads.create", thread_id=identity, if_exists="raise")
    assert await sdk("threads.create", thread_id=identity, if_exists="do_nothing", metadata={"b": 2}) == made
    ttl = (await sdk("threads.get", identity, include=["ttl"]))["ttl"]
    assert (ttl["strategy"], ttl["ttl_minutes"]) == ("delete", 60)
    patched = await sdk("threads.update", identity, metadata={"b": 2}, ttl={"ttl": 5, "strategy": "keep_latest"})
    assert patched["metadata"] == {"a": 1, "b": 2, "graph_id": "steps"}
    assert (await sdk("threads.get", identity, include=["ttl"]))["ttl"]["strategy"] == "keep_latest"
    assert await sdk("threads.update", identity, metadata={"c": 3}, return_minimal=True) is None
    assert (await sdk("threads.get", identity))["metadata"]["c"] == 3
    await sdk("threads.delete", identity)
    for name in ("threads.get", "threads.delete", "threads.get_state", "threads.get_history"):
        with pytest.raises(NotFoundError):
            await sdk(name, identity)
    with pytest.raises(ConflictError):
        await sdk("threads.copy", identity)


async def test_C51_finding_threads(sdk: Sdk) -> None:
    done = (await sdk("threads.create", metadata={"user": "ada"}))["thread_id"]
    other = (await sdk("threads.create", metadata={"user": "bob"}))["thread_id"]
    await sdk("runs.wait", done, "steps", input=QUICK)

    async def found(**filters: Any) -> list[str]:
        return [thread["thread_id"] for thread in await sdk("threads.search", **filters)]

    assert await found() == [done, other]
    assert await found(metadata={"user": "bob"}) == [other]
    assert await found(values={"done": ["s5"]}) == [done]
    assert await found(status="idle", limit=1, offset=1) == [other]
    assert await found(ids=[other]) == [other]
    assert await found(sort_by="created_at", sort_order="asc") == [done, other]
    rows = await sdk("threads.search", select=["status"], extract={"last": "values.done[-1]"}, ids=[done])
    assert rows == [{"status": "idle", "extracted": {"last": "s5"}}]
    assert await sdk("threads.count") == 2
    assert await sdk("threads.count", metadata={"user": "ada"}, values={"seconds": 0}, status="idle") == 1
    with pytest.raises(UnprocessableEntityError):
        await sdk("threads.search", extract={"last": "secrets.key"})


async def test_C52_copies_and_pruning(sdk: Sdk) -> None:
    source = (await sdk("threads.create"))["thread_id"]
    await sdk("runs.wait", source, "steps", input=QUICK)
    copy = (await sdk("threads.copy", source))["thread_id"]
    assert len(await sdk("threads.get_history", copy)) == 7
    assert await sdk("threads.prune", [copy, str(uuid4())], strategy="keep_latest") == {"pruned_count": 1}
    assert len(await sdk("threads.get_history", copy)) == 1
    assert (await sdk("threads.get_state", copy))["values"]["done"] == STEPS
    assert await sdk("threads.prune", [source]) == {"pruned_count": 1}
    assert (await sdk("runs.wait", copy, "steps", input=QUICK))["done"] == STEPS * 2


async def test_C06_C07_C63_state_and_history(sdk: Sdk) -> None:
    thread_id = (await sdk("threads.create"))["thread_id"]
    await sdk("runs.wait", thread_id, "steps", input=QUICK)
    state = await sdk("threads.get_state", thread_id)
    states = await sdk("threads.get_history", thread_id)
    assert states[0] == state
    assert [one["metadata"]["step"] for one in states] == [5, 4, 3, 2, 1, 0, -1]
    assert await sdk("threads.get_state", thread_id, checkpoint=states[2]["checkpoint"]) == states[2]
    assert await sdk("threads.get_state", thread_id, checkpoint_id=states[2]["checkpoint_id"]) == states[2]
    for before in (states[2]["checkpoint_id"], states[2]["checkpoint"], {"configurable": states[2]["checkpoint"]}):
        assert await sdk("threads.get_history", thread_id, before=before, limit=2) == states[3:5]
    assert await sdk("threads.get_history", thread_id, metadata={"source": "input"}) == states[-1:]
    selected = {"values": {"done": STEPS}, "next": []}
    select = ["values.done", "next"]
    assert await sdk("threads.get_state", thread_id, select=select) == selected
    assert await sdk("threads.get_state", thread_id, checkpoint=state["checkpoint"], select=select) == selected
    assert await sdk("threads.get_history", thread_id, limit=1, select=select) == [selected]


async def test_C50_updates(sdk: Sdk) -> None:
    thread_id = (await sdk("threads.create"))["thread_id"]
    with pytest.raises(BadRequestError):
        await sdk("threads.update_state", thread_id, {"done": ["x"]}, as_node="s1")
    await sdk("runs.wait", thread_id, "steps", input=QUICK)
    with pytest.raises(BadRequestError):
        await sdk("threads.update_state", thread_id, {"done": ["x"]}, as_node="nowhere")
    answer = await sdk("threads.update_state", thread_id, {"done": ["mine"]}, as_node="s4")
    state = await sdk("threads.get_state", thread_id)
    assert (state["checkpoint"], state["next"]) == (answer["checkpoint"], ["s5"])
    assert (await sdk("threads.get", thread_id))["status"] == "interrupted"
    forked = await sdk(
        "threads.update_state", thread_id, {"done": ["fork"]}, as_node="s5", checkpoint=state["parent_checkpoint"]
    )
    assert (await sdk("threads.get_state", thread_id))["checkpoint"] == forked["checkpoint"]
    assert (await sdk("threads.get", thread_id))["values"]["done"] == [*STEPS, "fork"]
    await sdk("runs.create", thread_id, "steps", input={"seconds": 3600})
    with pytest.raises(ConflictError):
        await sdk("threads.update_state", thread_id, {"done": ["x"]}, as_node="s1")


async def test_supersteps(sdk: Sdk) -> None:
    supersteps = [
        {"updates": [{"values": QUICK, "as_node": "__input__"}]},
        {"updates": [{"values": QUICK, "as_node": "__start__"}]},
        {"updates": [{"values": {"done": ["made up"]}, "as_node": "s4"}]},
    ]
    thread = await sdk("threads.create", graph_id="steps", supersteps=supersteps)
    assert (await sdk("threads.get_state", thread["thread_id"]))["next"] == ["s5"]
    assert (await sdk("runs.wait", thread["thread_id"], "steps"))["done"] == ["made up", "s5"]


async def test_remote_graph(client: httpx.AsyncClient, settings: Settings) -> None:
    remote = RemoteGraph("ask", url=f"http://127.0.0.1:{settings.port}")
    config: Any = {"configurable": {"thread_id": (await client.post("/threads", json={})).json()["thread_id"]}}
    await remote.ainvoke({"question": "why?"}, config)
    state = await remote.aget_state(config, subgraphs=True)
    assert (state.next, state.values) == (("ask_human",), {"question": "why?"})
    assert [asked.value for asked in state.interrupts] == [{"question": "why?"}]
    assert [one.metadata["step"] async for one in remote.aget_state_history(config) if one.metadata] == [0, -1]
    at = await remote.aget_state(state.config)
    assert at.config == state.config
    reached = await remote.aupdate_state(config, {"answer": "because"}, as_node="ask_human")
    assert (await remote.aget_state(reached)).values == {"question": "why?", "answer": "because"}

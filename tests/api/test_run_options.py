"""What a client says about a run besides its input: kept, shown and handed to the graph, and nothing else shown."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.serving import serving
from tests.support.threads import made, ran

KWARGS = {
    "input",
    "command",
    "config",
    "context",
    "stream_mode",
    "interrupt_before",
    "interrupt_after",
    "webhook",
    "feedback_keys",
    "temporary",
    "subgraphs",
    "resumable",
    "checkpoint_during",
    "durability",
}
TRACER = {"project_name": "tides", "example_id": "5c7e0f1e-0000-4000-8000-000000000000"}
TRACED = {"__langsmith_project__": "tides", "__langsmith_example_id__": TRACER["example_id"]}


class Told(TypedDict, total=False):
    found: dict[str, Any]
    about: dict[str, Any]


class Context(TypedDict, total=False):
    tone: str


def tell(state: Told, config: RunnableConfig) -> Told:
    """What a graph finds in its config, as far as a client could have put it there."""
    shown = {key: value for key, value in config["configurable"].items() if isinstance(value, str)}
    metadata = {key: value for key, value in config["metadata"].items() if isinstance(value, str)}
    return {"found": shown, "about": metadata}


@pytest.fixture
async def told(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    graph = StateGraph(Told, context_schema=Context).add_node(tell).add_edge(START, "tell").compile()
    async with serving(settings, catalog_of(tell=graph)) as client:
        yield client


async def run_of(client: httpx.AsyncClient, thread_id: str) -> dict[str, Any]:
    run: dict[str, Any] = (await client.get(f"/threads/{thread_id}/runs")).json()[0]
    return run


async def test_a_run_as_it_is_shown(told: httpx.AsyncClient) -> None:
    thread_id = await made(told)
    body = {
        "assistant_id": "tell",
        "input": {},
        "feedback_keys": ["liked"],
        "stream_mode": "updates",
        "stream_subgraphs": True,
        "stream_resumable": True,
        "interrupt_after": ["nowhere"],
        "checkpoint_during": False,
        "strict_resume": True,
        "config": {"tags": ["a"], "recursion_limit": 7, "configurable": {"depth": "shallow"}},
    }
    run = (await told.post(f"/threads/{thread_id}/runs", json=body)).json()
    identity = {"run_id": run["run_id"], "thread_id": thread_id, "graph_id": "tell"}
    identity["assistant_id"] = run["assistant_id"]
    assert run["kwargs"] == {
        "input": {},
        "command": None,
        "config": {"tags": ["a"], "recursion_limit": 7, "configurable": {"depth": "shallow", **identity}},
        "context": None,
        "stream_mode": ["updates"],
        "interrupt_before": None,
        "interrupt_after": ["nowhere"],
        "webhook": None,
        "feedback_keys": ["liked"],
        "temporary": False,
        "subgraphs": True,
        "resumable": True,
        "checkpoint_during": False,
        "durability": "exit",
    }
    assert run["langsmith_session_name"] is None
    assert (await told.get(f"/threads/{thread_id}/runs/{run['run_id']}")).json()["kwargs"] == run["kwargs"]


async def test_nothing_internal_is_shown_of_any_run(told: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    params = {"assistant_id": "tell", "input": {}, "langsmith_tracer": TRACER}
    await told.post(f"/threads/{thread_id}/commands", json={"id": 1, "method": "run.start", "params": params})
    stateless = (await told.post("/runs", json={"assistant_id": "tell", "input": {}})).json()
    [batched] = (await told.post("/runs/batch", json=[{"assistant_id": "tell", "input": {}}])).json()
    for run in (await run_of(told, thread_id), stateless, batched):
        assert set(run["kwargs"]) == KWARGS
        assert set(run) == {
            "run_id",
            "thread_id",
            "assistant_id",
            "created_at",
            "updated_at",
            "status",
            "metadata",
            "kwargs",
            "multitask_strategy",
            "langsmith_session_name",
            "attempt",
            "priority",
            "error",
            "usage",
        }
    assert stateless["kwargs"]["temporary"] is True


@pytest.mark.parametrize("priority", [-101, 101, 1_000_000, 1.5, "5", True])
async def test_priority_out_of_range_is_refused(told: httpx.AsyncClient, priority: Any) -> None:
    thread_id = await made(told)
    body = {"assistant_id": "tell", "input": {}, "priority": priority}
    for path in (f"/threads/{thread_id}/runs", f"/threads/{thread_id}/runs/stream", "/runs", "/runs/wait"):
        answer = await told.post(path, json=body)
        assert answer.status_code == 422, path
        assert "priority" in answer.text
    assert (await told.post("/runs/crons", json={**body, "schedule": "@daily"})).status_code == 422


async def test_where_it_is_traced(told: httpx.AsyncClient) -> None:
    thread_id = await made(told)
    found = await ran(told, thread_id, "tell", input={}, langsmith_tracer=TRACER)
    assert found["found"].items() >= TRACED.items()
    run = await run_of(told, thread_id)
    assert run["langsmith_session_name"] == "tides"
    assert run["kwargs"]["config"]["configurable"].items() >= TRACED.items()
    # Over the thread-centric protocol.
    params = {"assistant_id": "tell", "input": {}, "langsmith_tracer": {"project_name": "moons"}}
    await told.post(f"/threads/{thread_id}/commands", json={"id": 1, "method": "run.start", "params": params})
    assert (await run_of(told, thread_id))["langsmith_session_name"] == "moons"
    # A client that writes the keys itself is not believed.
    found = await ran(told, thread_id, "tell", input={}, config={"configurable": TRACED})
    assert not found["found"].keys() & TRACED.keys()


async def test_feedback_keys_are_kept_and_nothing_comes_of_them(told: httpx.AsyncClient) -> None:
    thread_id = await made(told)
    body = {"assistant_id": "tell", "input": {}, "feedback_keys": ["liked"]}
    streamed = await told.post(f"/threads/{thread_id}/runs/stream", json=body)
    assert "event: feedback" not in streamed.text
    assert "__feedback__" not in await ran(told, thread_id, "tell", input={}, feedback_keys=["liked"])
    assert (await run_of(told, thread_id))["kwargs"]["feedback_keys"] == ["liked"]
    refused = await told.post(f"/threads/{thread_id}/runs", json={**body, "feedback_keys": "liked"})
    assert refused.status_code == 422


async def test_where_metadata_comes_from(told: httpx.AsyncClient) -> None:
    """The assistant's, under the thread's, under the config's, under the request's."""
    layers = [("assistant", "abcd"), ("thread", "bcd"), ("config", "cd"), ("request", "d")]
    metadata = [dict.fromkeys(keys, name) for name, keys in layers]
    assistant = (await told.post("/assistants", json={"graph_id": "tell", "metadata": metadata[0]})).json()
    thread_id = await made(told, metadata=metadata[1])
    spoofed = {"assistant_id": "spoofed", "run_id": "spoofed", "thread_id": "spoofed"}
    body = {"config": {"metadata": {**metadata[2], **spoofed}}, "metadata": {**metadata[3], **spoofed}}
    found = await ran(told, thread_id, assistant["assistant_id"], input={}, **body)
    run = await run_of(told, thread_id)
    merged = {"a": "assistant", "b": "thread", "c": "config", "d": "request"}
    assert run["metadata"].items() >= merged.items()
    assert run["metadata"]["assistant_id"] == assistant["assistant_id"]
    assert "spoofed" not in run["metadata"].values()
    assert found["about"].items() >= merged.items()
    assert found["about"]["run_id"] == run["run_id"]


@pytest.mark.parametrize("known", ["thread_id", "checkpoint_ns", "checkpoint_id", "langgraph_request_id"])
async def test_what_the_server_knows_is_no_second_set_of_options(told: httpx.AsyncClient, known: str) -> None:
    thread_id = await made(told)
    value = "" if known == "checkpoint_ns" else str(uuid4())
    both = {"assistant_id": "tell", "input": {}, "context": {"tone": "dry"}, "config": {"configurable": {known: value}}}
    assert (await told.post(f"/threads/{thread_id}/runs", json=both)).status_code == 200
    both["config"] = {"configurable": {known: value, "tone": "dry"}}
    assert (await told.post(f"/threads/{thread_id}/runs", json=both)).status_code == 400

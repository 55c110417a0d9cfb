"""Several runs at once, and what is left when one is deleted."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from langchain_core.runnables import RunnableLambda
from langgraph.constants import START, TAG_HIDDEN
from langgraph.graph import StateGraph
from typing_extensions import TypedDict

from holdfast.settings import Settings
from tests.api.test_runs import STEPS, stream, thread, until
from tests.support.catalogs import catalog_of
from tests.support.serving import serving

SLOW = {"assistant_id": "steps", "input": {"seconds": 3600}}
QUICK = {"assistant_id": "steps", "input": {"seconds": 0}}


class Said(TypedDict, total=False):
    said: str


async def test_C60_a_batch_is_that_many_runs(client: httpx.AsyncClient) -> None:
    response = await client.post("/runs/batch", json=[QUICK, QUICK])
    assert response.status_code == 200
    assert len({run["run_id"] for run in response.json()}) == 2
    for run in response.json():
        await until(client, f"/runs/{run['run_id']}", status="success")
    assert (await client.post("/runs/batch", json=[])).status_code == 422


async def test_batch_of_a_large_assistant_is_refused_whole(web: httpx.AsyncClient) -> None:
    """Each run has a copy of its assistant's configuration, so a small body can ask for a great deal."""
    configured = {"graph_id": "steps", "config": {"configurable": {"text": "x" * 50_000}}}
    assistant = (await web.post("/assistants", json=configured)).json()
    runs = [{**QUICK, "assistant_id": assistant["assistant_id"]}] * 10
    response = await web.post("/runs/batch", json=runs)
    assert response.status_code == 413
    assert "MAX_BODY_BYTES=100000" in response.json()["detail"]
    assert (await web.get("/runs")).json() == []
    assert (await web.post("/runs/batch", json=runs[:1])).status_code == 200


async def test_C60_bulk_cancel(web: httpx.AsyncClient) -> None:
    thread_id = await thread(web)
    other = await thread(web)
    runs = [(await web.post(f"/threads/{place}/runs", json=SLOW)).json() for place in (thread_id, thread_id, other)]
    first = {"thread_id": thread_id, "run_ids": [runs[0]["run_id"]]}
    assert (await web.post("/runs/cancel", json=first)).status_code == 204
    assert (await web.post("/runs/cancel", json=first)).status_code == 404
    assert (await web.get(f"/runs/{runs[1]['run_id']}")).json()["status"] == "pending"
    assert (await web.post("/runs/cancel", json={**first, "status": "all"})).status_code == 422
    for wrong in ({}, {"thread_id": thread_id}, {"status": "some"}, {"run_ids": [runs[0]["run_id"]]}):
        assert (await web.post("/runs/cancel", json=wrong)).status_code == 422
    assert (await web.post("/runs/cancel", json={"status": "running"})).status_code == 404
    assert (await web.post("/runs/cancel", json={"status": "pending"})).status_code == 204
    for run in runs:
        assert (await web.get(f"/runs/{run['run_id']}")).json()["status"] == "interrupted"


async def test_a_run_is_deleted_with_its_checkpoints_but_not_while_it_lives(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    runs = f"/threads/{thread_id}/runs"
    first = (await client.post(runs, json=QUICK)).json()
    await until(client, f"{runs}/{first['run_id']}", status="success")
    second = (await client.post(runs, json=SLOW)).json()
    await until(client, f"{runs}/{second['run_id']}", status="running")
    assert (await client.delete(f"{runs}/{second['run_id']}")).status_code == 409
    await client.post(f"{runs}/{second['run_id']}/cancel?wait=1")
    assert (await client.delete(f"{runs}/{second['run_id']}")).status_code == 204
    assert (await client.get(f"{runs}/{second['run_id']}")).status_code == 404
    assert (await client.delete(f"{runs}/{second['run_id']}")).status_code == 404
    state = (await client.get(f"/threads/{thread_id}/state")).json()
    assert (state["values"]["done"], state["next"]) == (STEPS, [])


async def test_C29_selected_fields_only(web: httpx.AsyncClient) -> None:
    thread_id = await thread(web)
    run = (await web.post(f"/threads/{thread_id}/runs", json=SLOW)).json()
    response = await web.get(f"/threads/{thread_id}/runs?status=pending&select=run_id&select=status")
    assert response.json() == [{"run_id": run["run_id"], "status": "pending"}]


@pytest.mark.parametrize(
    "query", ["stream_mode=updates&stream_mode=tasks", 'stream_mode=["updates","tasks"]', "stream_mode=updates,tasks"]
)
async def test_C33_modes_in_every_spelling(client: httpx.AsyncClient, query: str) -> None:
    thread_id = await thread(client)
    body = {**QUICK, "stream_mode": ["values", "updates", "tasks"]}
    headers, _ = await stream(client, "POST", f"/threads/{thread_id}/runs/stream", json=body)
    _, events = await stream(client, "GET", f"{headers['location']}?{query}")
    assert {frame.event for frame in events} == {"updates", "tasks"}


async def test_the_events_mode_carries_langchains_own(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    messages = {"messages": [{"role": "user", "content": "hello"}]}
    body: dict[str, Any] = {"assistant_id": "chat", "input": messages, "stream_mode": ["events", "values"]}
    async with asyncio.timeout(60):
        _, events = await stream(client, "POST", f"/threads/{thread_id}/runs/stream", json=body)
    kinds = [frame.data["event"] for frame in events if frame.event == "events"]
    assert {"on_chain_start", "on_chat_model_stream", "on_chain_end"} <= set(kinds)
    # The graph's own stream comes in the other modes, and is not repeated here.
    streamed = [frame.data for frame in events if frame.event == "events" and frame.data["event"] == "on_chain_stream"]
    assert streamed
    assert all(event["parent_ids"] for event in streamed)
    final = [frame for frame in events if frame.event == "values"][-1]
    assert "hello" in str(final.data["messages"][-1]["content"])


async def test_events_mode_leaves_out_hidden_steps(settings: Settings) -> None:
    """LangGraph tags its own `__start__` as hidden, and with it what decides where a graph begins."""

    def say(state: Said) -> Said:
        hidden = RunnableLambda(lambda text: text).with_config(run_name="unseen", tags=[TAG_HIDDEN])
        return {"said": RunnableLambda(hidden.invoke).with_config(run_name="seen").invoke("hello")}

    builder = StateGraph(Said).add_node("say", say).add_conditional_edges(START, lambda state: "say", ["say"])
    body = {"assistant_id": "graph", "input": {}, "stream_mode": ["events", "values"]}
    async with serving(settings, catalog_of(graph=builder.compile())) as client:
        _, events = await stream(client, "POST", "/runs/stream", json=body)
    assert {frame.data["name"] for frame in events if frame.event == "events"} == {"graph", "say", "seen"}
    assert [frame.data for frame in events if frame.event == "values"][-1] == {"said": "hello"}

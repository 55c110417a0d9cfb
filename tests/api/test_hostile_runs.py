"""Runs whose configuration or command makes no sense: each ends, as an error if need be, and the worker goes on."""

from __future__ import annotations

from typing import Any

import httpx

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
NOBODY = "00000000-0000-4000-8000-000000000000"

# Keys of LangChain's and LangGraph's own configuration, with what does not belong there.
CONFIGS: list[dict[str, Any]] = [
    {"callbacks": 5},
    {"callbacks": ["x"]},
    {"run_id": "x"},
    {"recursion_limit": 1},
    {"tags": []},
    {"store": 5},
    {"configurable": {"checkpoint_ns": "a|b:c"}},
    {"configurable": {"checkpoint_ns": 5}},
    {"configurable": {"checkpoint_map": 5}},
    {"configurable": {"thread_id": 5}},
    {"configurable": {"run_id": {"a": 1}}},
    {"configurable": {"graph_id": 5, "assistant_id": 5, "user_id": 5}},
    *(
        {"configurable": {f"__pregel_{name}": value}}
        for name in ("checkpointer", "read", "send", "runtime", "stream", "store", "task_id", "resuming", "scratchpad")
        for value in ("x", False)
    ),
]
# Of a field that a client may set, a value that it cannot have.
REFUSED_CONFIGS: list[dict[str, Any]] = [
    {"run_name": {"a": 1}},
    {"max_concurrency": "x"},
    {"max_concurrency": 0},
    {"configurable": {"checkpoint_id": 5}},
    {"configurable": {"checkpoint_id": "x"}},
]
BODIES: list[dict[str, Any]] = [
    *({"input": HELLO, "config": config} for config in CONFIGS),
    {"input": HELLO, "context": {"__pregel_read": 5, "": {}}},
    {"input": HELLO, "interrupt_before": ["__start__", "nobody", ""]},
    {"input": HELLO, "interrupt_after": "*"},
    {"input": HELLO, "checkpoint_id": NOBODY},
    {"input": HELLO, "checkpoint": {"checkpoint_ns": "x", "checkpoint_map": {"": "x"}}},
    {"input": 5},
    {"input": "text"},
    {"input": []},
    {"input": {"messages": 5}},
    {"input": {"messages": [{"role": "nobody", "content": {}}]}},
    {"input": {"nobody": 1}},
    {"input": None},
    {"command": {"goto": "nobody"}},
    {"command": {"goto": {"node": "__start__", "input": 5}}},
    {"command": {"update": {"nobody": 1}}},
    {"command": {"update": [["messages", 5], ["", None]]}},
    {"command": {"resume": {"x": 1}}},
    {"command": {}},
]


async def test_every_run_ends_and_the_worker_goes_on(client: httpx.AsyncClient) -> None:
    for body in BODIES:
        thread = (await client.post("/threads")).json()["thread_id"]
        asked = {"assistant_id": "echo", "stream_mode": ["values", "debug", "messages"], **body}
        answer = await client.post(f"/threads/{thread}/runs/wait", json=asked)
        assert answer.status_code == 200, (body, answer.text)
        assert answer.json() is not None
        for path in ("state", "history", "runs"):
            read = await client.get(f"/threads/{thread}/{path}?limit=5")
            assert read.status_code == 200, (body, path, read.text)
        [run] = (await client.get(f"/threads/{thread}/runs")).json()
        assert run["status"] in ("success", "error"), body
        assert run["attempt"] == 1, body
        if "__pregel_" in str(body):
            # LangGraph's own parts are not a client's to replace: the run is as any other, and so is its state.
            assert run["status"] == "success", body
            assert len((await client.get(f"/threads/{thread}/state")).json()["values"]["messages"]) == 2
    said = (await client.post("/runs/wait", json={"assistant_id": "echo", "input": HELLO})).json()
    assert [message["content"] for message in said["messages"]] == ["hello", "hello"]


async def test_config_with_invalid_value_is_refused(client: httpx.AsyncClient) -> None:
    thread = (await client.post("/threads")).json()["thread_id"]
    for config in REFUSED_CONFIGS:
        body = {"assistant_id": "echo", "input": HELLO, "config": config}
        answer = await client.post(f"/threads/{thread}/runs/wait", json=body)
        assert answer.status_code == 422, (config, answer.text)
        assert answer.json()["detail"].startswith("config."), (config, answer.text)
    assert (await client.get(f"/threads/{thread}/runs")).json() == []

"""C44, C45, C59, C60: runs without a thread, later runs, many runs at once."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.conformance.calls import (
    AT_ONCE,
    FOREVER,
    HELLO,
    STEPS,
    history_of,
    new_thread,
    ok,
    refused,
    start_run,
    status_of,
    stream,
    until_status,
    wait_run,
)
from tests.support.receiver import receiving


async def threads_marked(client: httpx.AsyncClient, mark: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await ok(client.post("/threads/search", json={"metadata": {"mark": mark}}))
    return found


async def test_c44_a_run_without_a_thread_waited_for(client: httpx.AsyncClient) -> None:
    mark = str(uuid4())
    body = {"assistant_id": "echo", "input": HELLO, "metadata": {"mark": mark}}
    response = await client.post("/runs/wait", json=body)
    assert response.status_code == 200
    assert response.json()["messages"][-1]["content"] == "hello"
    assert await threads_marked(client, mark) == []
    _, _, thread_id, _, _ = response.headers["content-location"].split("/")
    await refused(client.get(f"/threads/{thread_id}"), 404)


async def test_c44_a_run_without_a_thread_streamed(client: httpx.AsyncClient) -> None:
    mark = str(uuid4())
    body = {"assistant_id": "echo", "input": HELLO, "metadata": {"mark": mark}}
    headers, events = await stream(client, "POST", "/runs/stream", json=body)
    assert headers["content-location"] == f"/runs/{events[0].data['run_id']}"
    assert headers["location"] == f"{headers['content-location']}/stream"
    assert events[-1].data["messages"][-1]["content"] == "hello"
    assert await threads_marked(client, mark) == []
    # Where Location leads, a client whose connection broke finds the rest.
    assert (await stream(client, "GET", headers["location"], headers={"Last-Event-ID": "-1"}))[1] == events


@pytest.mark.parametrize("way", ["wait", "stream"])
async def test_c44_a_thread_may_be_kept(client: httpx.AsyncClient, way: str) -> None:
    mark = str(uuid4())
    body = {"assistant_id": "echo", "input": HELLO, "metadata": {"mark": mark}, "on_completion": "keep"}
    assert (await client.post(f"/runs/{way}", json=body)).status_code == 200
    [kept] = await threads_marked(client, mark)
    assert kept["status"] == "idle"
    state = await ok(client.get(f"/threads/{kept['thread_id']}/state"))
    assert state["values"]["messages"][-1]["content"] == "hello"


@pytest.mark.parametrize("way", ["/runs", "/runs/wait", "/runs/stream"])
async def test_c45_nothing_to_resume_without_a_thread(client: httpx.AsyncClient, way: str) -> None:
    await refused(client.post(way, json={"assistant_id": "ask", "command": {"resume": "yes"}}), 400)


async def test_c59_a_run_may_start_later(client: httpx.AsyncClient, thread_id: str) -> None:
    runs = f"/threads/{thread_id}/runs"
    at_once = await ok(client.post(runs, json={"assistant_id": "slow", "input": AT_ONCE}))
    run = await ok(client.post(runs, json={"assistant_id": "slow", "input": AT_ONCE, "after_seconds": 2}))
    assert run["status"] == "pending"
    due, now = datetime.fromisoformat(run["created_at"]), datetime.fromisoformat(at_once["created_at"])
    assert (due - now).total_seconds() >= 2
    assert (await ok(client.get(f"{runs}/{at_once['run_id']}/join")))["done"] == STEPS
    assert (await ok(client.get(f"{runs}/{run['run_id']}/join")))["done"] == STEPS * 2
    states = await history_of(client, thread_id)
    begun = [state for state in states if state["metadata"]["run_id"] == run["run_id"]][-1]
    assert datetime.fromisoformat(begun["created_at"]) >= due


async def test_c59_exit_leaves_one_checkpoint(client: httpx.AsyncClient) -> None:
    for said, expected in (
        ({"durability": "exit"}, [3]),
        ({"checkpoint_during": False}, [3]),
        ({"durability": "sync"}, [3, 2, 1, 0, -1]),
    ):
        thread_id = await new_thread(client)
        assert (await wait_run(client, thread_id, "slow", input=AT_ONCE, **said))["done"] == STEPS
        states = await history_of(client, thread_id)
        assert [state["metadata"]["step"] for state in states] == expected, said
        assert states[0]["values"]["done"] == STEPS


async def test_c59_webhooks_of_this_machine_are_refused(client: httpx.AsyncClient, thread_id: str) -> None:
    for webhook in ("http://127.0.0.1:8123/hook", "http://localhost/hook", "/hook"):
        body = {"assistant_id": "echo", "input": HELLO, "webhook": webhook}
        assert "webhook" in await refused(client.post(f"/threads/{thread_id}/runs", json=body), 422)
    assert await ok(client.get(f"/threads/{thread_id}/runs")) == []


async def test_c59_a_webhook_tells_of_the_end_of_a_run(hooked: httpx.AsyncClient) -> None:
    async with receiving() as receiver:
        thread_id = await new_thread(hooked)
        for graph, given, status in (("echo", HELLO, "success"), ("ask", {}, "success"), ("boom", {}, "error")):
            path = await start_run(hooked, thread_id, graph, input=given, webhook=receiver.url)
            told = (await receiver.about(path.rsplit("/", 1)[1])).json
            assert told["status"] == status, graph
            run = await ok(hooked.get(path))
            assert told.keys() - run.keys() == {"run_started_at", "run_ended_at", "webhook_sent_at", "values"}
            assert run.keys() - told.keys() == ({"error"} if status == "success" else set())
            assert told["values"] == (await ok(hooked.get(f"/threads/{thread_id}")))["values"]
            if status == "error":
                assert told["error"] == run["error"]


async def test_c60_a_batch(client: httpx.AsyncClient) -> None:
    one = {"assistant_id": "echo", "input": HELLO}
    # As the JS client writes it: both spellings, of which one is unknown.
    two = {"assistant_id": "slow", "assistantId": "slow", "input": AT_ONCE, "on_completion": "keep"}
    runs = await ok(client.post("/runs/batch", json=[one, two]))
    assert [run["kwargs"]["input"] for run in runs] == [HELLO, AT_ONCE]
    assert [run["status"] for run in runs] == ["pending", "pending"]
    assert len({run["thread_id"] for run in runs}) == 2
    kept = await ok(client.get(f"/threads/{runs[1]['thread_id']}/runs/{runs[1]['run_id']}/join"))
    assert kept["done"] == STEPS
    await refused(client.post("/runs/batch", json=[]), 422)


async def test_c60_cancelling_by_ids(client: httpx.AsyncClient, thread_id: str) -> None:
    paths = [await start_run(client, thread_id, "slow", input=FOREVER) for _ in range(3)]
    run_ids = [path.rsplit("/", 1)[1] for path in paths]
    answer = await client.post("/runs/cancel", json={"thread_id": thread_id, "run_ids": run_ids[:2]})
    assert (answer.status_code, answer.content) == (204, b"")
    for path in paths[:2]:
        await until_status(client, path, "interrupted")
    await until_status(client, paths[2], "running")
    body = {"thread_id": thread_id, "run_ids": run_ids[2:]}
    assert (await client.post("/runs/cancel", params={"action": "rollback"}, json=body)).status_code == 204


async def test_c60_cancelling_by_status(client: httpx.AsyncClient, thread_id: str) -> None:
    first = await start_run(client, thread_id, "slow", input=FOREVER)
    await until_status(client, first, "running")
    second = await start_run(client, thread_id, "slow", input=FOREVER)
    assert (await client.post("/runs/cancel", json={"status": "pending"})).status_code == 204
    await until_status(client, second, "interrupted")
    assert await status_of(client, first) == "running"
    third = await start_run(client, thread_id, "slow", input=FOREVER)
    assert (await client.post("/runs/cancel", json={"status": "running"})).status_code == 204
    await until_status(client, first, "interrupted")
    await until_status(client, third, "running")
    assert (await client.post("/runs/cancel", json={"status": "all"})).status_code == 204
    await until_status(client, third, "interrupted")


async def test_c60_cancelling_both_ways_or_nothing(client: httpx.AsyncClient, thread_id: str) -> None:
    path = await start_run(client, thread_id, "slow", input=FOREVER)
    both = {"thread_id": thread_id, "run_ids": [path.rsplit("/", 1)[1]], "status": "all"}
    await refused(client.post("/runs/cancel", json=both), 422)
    assert await status_of(client, path) in ("pending", "running")
    await refused(client.post("/runs/cancel", json={"thread_id": thread_id, "run_ids": [str(uuid4())]}), 404)
    await until_status(client, path, "running")
    await refused(client.post("/runs/cancel", json={"status": "pending"}), 404)

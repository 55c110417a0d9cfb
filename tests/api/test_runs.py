"""Runs over HTTP: what clients post, watch, resume and cancel."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from holdfast.db.connect import Database
from tests.support.records import query
from tests.support.smoke import working
from tests.support.sse import Frame, frames

STEPS = ["s1", "s2", "s3", "s4", "s5"]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def thread(client: httpx.AsyncClient) -> str:
    response = await client.post("/threads", json={})
    assert response.status_code == 200, response.text
    identity: str = response.json()["thread_id"]
    return identity


async def stream(
    client: httpx.AsyncClient, method: str, path: str, **request: Any
) -> tuple[httpx.Headers, list[Frame]]:
    async with client.stream(method, path, **request) as response:
        assert response.status_code == 200, await response.aread()
        return response.headers, [frame async for frame in frames(response)]


async def until(client: httpx.AsyncClient, path: str, **expected: Any) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            found: dict[str, Any] = (await client.get(path)).json()
            if all(found.get(key) == value for key, value in expected.items()):
                return found
            await asyncio.sleep(0.02)


async def test_a_new_thread_is_idle(client: httpx.AsyncClient) -> None:
    body = (await client.post("/threads", json={"metadata": {"a": 1, "run_id": "spoofed"}})).json()
    assert UUID(body["thread_id"]).version == 7
    assert (body["status"], body["metadata"], body["interrupts"], body["error"]) == ("idle", {"a": 1}, {}, None)
    assert (await client.get(f"/threads/{body['thread_id']}")).json() == body


async def test_a_thread_that_exists(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    first = await client.post("/threads", json={"thread_id": thread_id, "metadata": {"a": 1}})
    again = await client.post("/threads", json={"thread_id": thread_id})
    kept = await client.post("/threads", json={"thread_id": thread_id, "if_exists": "do_nothing", "metadata": {"b": 2}})
    assert (first.status_code, again.status_code, kept.status_code) == (200, 409, 200)
    assert kept.json()["metadata"] == {"a": 1}


async def test_a_stream_begins_with_metadata_and_ends_with_the_run(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    body = {"assistant_id": "steps", "input": {"seconds": 0}, "stream_mode": ["values", "updates"]}
    headers, events = await stream(client, "POST", f"/threads/{thread_id}/runs/stream", json=body)
    location = headers["content-location"]
    run_id = location.rsplit("/", 1)[1]
    assert location == f"/threads/{thread_id}/runs/{run_id}"
    assert headers["location"] == f"{location}/stream"
    assert headers["content-type"].startswith("text/event-stream")
    assert events[0].event == "metadata"
    assert events[0].data == {"run_id": run_id, "attempt": 1}
    assert [name for frame in events if frame.event == "updates" for name in frame.data] == STEPS
    assert events[-1].event == "values"
    assert events[-1].data["done"] == STEPS
    # What has a number and is not shown: that the attempt has begun, which its acceptance has told.
    assert [frame.id for frame in events] == [1, *range(3, len(events) + 2)]
    run = (await client.get(location)).json()
    assert run["status"] == "success"
    assert run["kwargs"]["input"] == {"seconds": 0}
    assert (await client.get(f"/threads/{thread_id}")).json()["values"]["done"] == STEPS


async def test_a_stream_resumes_after_any_event_on_the_way(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    await client.post(f"/threads/{thread_id}/runs/wait", json={"assistant_id": "steps", "input": {"seconds": 0}})
    body = {"assistant_id": "steps", "input": {"seconds": 0}}
    headers, events = await stream(client, "POST", f"/threads/{thread_id}/runs/stream", json=body)
    path = headers["location"]
    assert events[0].id is not None
    assert events[0].id > 1  # The numbering is the thread's.
    for position, frame in enumerate(events):
        _, rest = await stream(client, "GET", path, headers={"Last-Event-ID": str(frame.id)})
        assert rest == events[position + 1 :]
    # The last four are ids of other servers, which a client may hold after a migration.
    for beginning in ("-1", "-", "0", None, "1700000000000-0", "1700000000000", "1763_1", "9" * 30):
        given = {} if beginning is None else {"Last-Event-ID": beginning}
        assert (await stream(client, "GET", path, headers=given))[1] == events
    by_run = path.replace(f"/threads/{thread_id}", "")
    assert (await stream(client, "GET", by_run))[1] == events


async def test_a_stream_joined_before_the_run_starts_shows_all_of_it(web: httpx.AsyncClient, settings: Any) -> None:
    thread_id = await thread(web)
    run = (await web.post(f"/threads/{thread_id}/runs", json={"assistant_id": "steps", "input": {"seconds": 0}})).json()
    assert run["status"] == "pending"
    path = f"/threads/{thread_id}/runs/{run['run_id']}"
    watching = asyncio.create_task(stream(web, "GET", f"{path}/stream"))
    joining = asyncio.create_task(web.get(f"{path}/join"))
    async with working(settings):
        _, events = await watching
        assert (await joining).json()["done"] == STEPS
    assert [frame.event for frame in events] == ["metadata"] + ["values"] * 6


async def test_modes_select(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    body = {"assistant_id": "steps", "input": {"seconds": 0}, "stream_mode": ["values", "updates", "tasks"]}
    headers, _ = await stream(client, "POST", f"/threads/{thread_id}/runs/stream", json=body)
    _, events = await stream(client, "GET", headers["location"] + "?stream_mode=updates&stream_mode=tasks")
    assert {frame.event for frame in events} == {"updates", "tasks"}


async def test_idle_streams_and_waits_show_a_sign_of_life(web: httpx.AsyncClient) -> None:
    thread_id = await thread(web)
    run = (await web.post(f"/threads/{thread_id}/runs", json={"assistant_id": "steps"})).json()
    path = f"/threads/{thread_id}/runs/{run['run_id']}"
    for suffix, sign in (("stream", b": heartbeat\r\n" * 3), ("join", b"\n\n\n")):
        seen = b""
        async with web.stream("GET", f"{path}/{suffix}") as response:
            async for chunk in response.aiter_raw():
                seen += chunk
                if len(seen) >= len(sign):
                    break
        assert seen == sign


async def test_wait_returns_the_values(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    body = {"assistant_id": "steps", "input": {"seconds": 0}, "stream_mode": "updates"}
    response = await client.post(f"/threads/{thread_id}/runs/wait", json=body)
    assert response.json()["done"] == STEPS
    assert response.headers["location"].endswith("/join")
    assert (await client.get(response.headers["location"])).json()["done"] == STEPS


async def test_an_interrupt_is_a_success_that_leaves_the_thread_waiting(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    asked = await client.post(f"/threads/{thread_id}/runs/wait", json={"assistant_id": "ask", "input": {}})
    [interrupt] = asked.json()["__interrupt__"]
    waiting = (await client.get(f"/threads/{thread_id}")).json()
    assert waiting["status"] == "interrupted"
    assert [item["id"] for items in waiting["interrupts"].values() for item in items] == [interrupt["id"]]
    assert (await client.get(f"/threads/{thread_id}/runs")).json()[0]["status"] == "success"
    body = {"assistant_id": "ask", "command": {"resume": "blue"}}
    answered = await client.post(f"/threads/{thread_id}/runs/wait", json=body)
    assert "blue" in answered.text
    rested = (await client.get(f"/threads/{thread_id}")).json()
    assert (rested["status"], rested["interrupts"]) == ("idle", {})


async def test_an_error_is_an_answer(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    response = await client.post(
        f"/threads/{thread_id}/runs/wait", json={"assistant_id": "steps", "input": {"seconds": "soon"}}
    )
    assert response.status_code == 200
    error = response.json()["__error__"]
    assert set(error) == {"error", "message"}
    assert (await client.get(f"/threads/{thread_id}")).json()["error"] == error
    _, events = await stream(
        client, "POST", f"/threads/{thread_id}/runs/stream", json={"assistant_id": "steps", "input": {"seconds": "x"}}
    )
    assert events[-1].event == "error"


@pytest.mark.parametrize("path", ["wait", "stream"])
async def test_a_stateless_runs_thread_is_gone_afterwards(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(f"/runs/{path}", json={"assistant_id": "echo", "input": HELLO})
    assert "hello" in response.text
    run_id = response.headers["content-location"].rsplit("/", 1)[1]
    run = (await client.get(f"/runs/{run_id}")).json()
    assert (await client.get(f"/threads/{run['thread_id']}")).status_code == 404
    # What it said can still be read for a while.
    _, events = await stream(client, "GET", f"/runs/{run_id}/stream")
    assert events[-1].data["messages"][-1]["content"] == "hello"


async def test_a_stateless_run_may_keep_its_thread(client: httpx.AsyncClient) -> None:
    body = {"assistant_id": "echo", "input": HELLO, "on_completion": "keep"}
    run_id = (await client.post("/runs/wait", json=body)).headers["content-location"].rsplit("/", 1)[1]
    thread_id = (await client.get(f"/runs/{run_id}")).json()["thread_id"]
    assert (await client.get(f"/threads/{thread_id}")).json()["status"] == "idle"


async def test_an_assistant_by_name_or_id(client: httpx.AsyncClient) -> None:
    for name in ("echo", "046b5dc7-2108-582c-9c6c-31d556d138f0"):
        response = await client.post("/runs/wait", json={"assistant_id": name, "input": HELLO})
        assert response.json()["messages"][-1]["content"] == "hello"


async def test_reject_creates_nothing(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    runs = f"/threads/{thread_id}/runs"
    await client.post(runs, json={"assistant_id": "steps", "input": {"seconds": 30}})
    refused = await client.post(runs, json={"assistant_id": "steps", "multitask_strategy": "reject"})
    assert refused.status_code == 409
    assert "multitask_strategy" in refused.json()["detail"]
    assert len((await client.get(runs)).json()) == 1


async def test_interrupt_keeps_what_was_done_and_rollback_does_not(client: httpx.AsyncClient) -> None:
    for strategy in ("interrupt", "rollback"):
        thread_id = await thread(client)
        runs = f"/threads/{thread_id}/runs"
        body = {"assistant_id": "steps", "input": {"seconds": 0}, "interrupt_after": ["s1"]}
        first = (await client.post(runs, json=body)).json()
        await until(client, f"{runs}/{first['run_id']}", status="success")
        slow = (await client.post(runs, json={"assistant_id": "steps", "input": {"seconds": 30}})).json()
        await until(client, f"{runs}/{slow['run_id']}", status="running")
        body = {"assistant_id": "steps", "input": {"seconds": 0}, "multitask_strategy": strategy}
        answer = (await client.post(f"{runs}/wait", json=body)).json()
        assert answer["done"] == ["s1", *STEPS]
        old = await client.get(f"{runs}/{slow['run_id']}")
        if strategy == "interrupt":
            assert old.json()["status"] == "interrupted"
        else:
            assert old.status_code == 404


async def test_cancel_interrupts_where_the_graph_stands(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    runs = f"/threads/{thread_id}/runs"
    run = (await client.post(runs, json={"assistant_id": "steps", "input": {"seconds": 3600}})).json()
    path = f"{runs}/{run['run_id']}"
    await until(client, path, status="running")
    watching = asyncio.create_task(stream(client, "GET", f"{path}/stream"))
    assert (await client.post(f"{path}/cancel")).status_code == 202
    _, events = await watching
    assert "error" not in {frame.event for frame in events}
    assert (await client.get(path)).json()["status"] == "interrupted"
    rested = (await client.get(f"/threads/{thread_id}")).json()
    assert (rested["status"], rested["error"]["error"]) == ("interrupted", "UserInterrupt")
    assert (await client.post(f"{path}/cancel")).status_code == 404


async def test_cancel_with_rollback_leaves_nothing(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    runs = f"/threads/{thread_id}/runs"
    run = (await client.post(runs, json={"assistant_id": "steps", "input": {"seconds": 3600}})).json()
    path = f"{runs}/{run['run_id']}"
    await until(client, path, status="running")
    response = await client.post(f"{path}/cancel?action=rollback&wait=1")
    assert (response.status_code, response.json()) == (200, {})
    assert (await client.get(path)).status_code == 404
    assert (await client.get(f"/threads/{thread_id}")).json()["status"] == "idle"


async def test_cancel_of_a_waiting_run_ends_its_streams_at_once(web: httpx.AsyncClient) -> None:
    thread_id = await thread(web)
    runs = f"/threads/{thread_id}/runs"
    run = (await web.post(runs, json={"assistant_id": "steps"})).json()
    path = f"{runs}/{run['run_id']}"
    watching = asyncio.create_task(stream(web, "GET", f"{path}/stream"))
    assert (await web.post(f"{path}/cancel")).status_code == 202
    _, events = await watching
    assert events == []
    assert (await web.get(path)).json()["status"] == "interrupted"
    assert (await web.get(f"/threads/{thread_id}")).json()["status"] == "idle"


async def test_a_client_that_leaves_cancels_if_it_said_so(client: httpx.AsyncClient) -> None:
    for choice, seconds, status in (("cancel", 3600, "interrupted"), ("continue", 0.2, "success")):
        thread_id = await thread(client)
        runs = f"/threads/{thread_id}/runs"
        body = {"assistant_id": "steps", "input": {"seconds": seconds}, "on_disconnect": choice}
        async with client.stream("POST", f"{runs}/stream", json=body) as response:
            async for _ in frames(response):
                break
        [run] = (await client.get(runs)).json()
        await until(client, f"{runs}/{run['run_id']}", status=status)


async def test_a_delayed_run_lets_others_go_first(client: httpx.AsyncClient, database: Database) -> None:
    thread_id = await thread(client)
    runs = f"/threads/{thread_id}/runs"
    late = (
        await client.post(runs, json={"assistant_id": "steps", "after_seconds": 3600, "input": {"seconds": 0}})
    ).json()
    now = await client.post(f"{runs}/wait", json={"assistant_id": "steps", "input": {"seconds": 0}})
    assert now.json()["done"] == STEPS
    assert (await client.get(f"{runs}/{late['run_id']}")).json()["status"] == "pending"
    # The hour passes.
    await query(database, "UPDATE run SET ready_at = now() WHERE run_id = %s RETURNING 1", late["run_id"])
    await until(client, f"{runs}/{late['run_id']}", status="success")
    assert (await client.get(f"/threads/{thread_id}")).json()["values"]["done"] == STEPS * 2


async def test_if_not_exists(client: httpx.AsyncClient) -> None:
    path = f"/threads/{uuid4()}/runs/wait"
    body = {"assistant_id": "echo", "input": HELLO}
    assert (await client.post(path, json=body)).status_code == 404
    assert (await client.post(path, json={**body, "if_not_exists": "create"})).status_code == 200


async def test_deleting_a_thread_ends_everything_in_it(client: httpx.AsyncClient) -> None:
    thread_id = await thread(client)
    runs = f"/threads/{thread_id}/runs"
    run = (await client.post(runs, json={"assistant_id": "steps", "input": {"seconds": 3600}})).json()
    path = f"{runs}/{run['run_id']}"
    await until(client, path, status="running")
    deleted = 0
    async with client.stream("GET", f"{path}/stream") as response:
        async for frame in frames(response):
            if frame.event == "metadata":
                deleted = (await client.delete(f"/threads/{thread_id}")).status_code
    assert deleted == 204
    for gone in (f"/threads/{thread_id}", path):
        assert (await client.get(gone)).status_code == 404
    # The worker's slot is free again.
    assert (await client.post("/runs/wait", json={"assistant_id": "echo", "input": HELLO})).status_code == 200

"""The life of runs to the letter of the protocol: what waits and joins return, what a thread is left as, what starts
where. The graphs are those that the checks of the protocol are about."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.support.serving import serving
from tests.support.sse import Frame, frames
from tests.support.threads import history, made, state_of
from tests.support.waiting import until

PROJECT = Path(__file__).parents[1] / "support" / "conformance_project" / "langgraph.json"
AT_ONCE = {"seconds": 0}
NO_CHECKPOINT = "1f1e0bdd-0000-6000-8000-000000000000"


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(settings, GraphCatalog.load(load_config(PROJECT))) as client:
        yield client


async def waited(client: httpx.AsyncClient, thread_id: str, graph: str, **body: Any) -> dict[str, Any]:
    response = await client.post(f"/threads/{thread_id}/runs/wait", json={"assistant_id": graph, **body})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def joined(client: httpx.AsyncClient, thread_id: str) -> dict[str, Any]:
    """What joining the thread's last run returns."""
    [run, *_] = (await client.get(f"/threads/{thread_id}/runs")).json()
    result: dict[str, Any] = (await client.get(f"/threads/{thread_id}/runs/{run['run_id']}/join")).json()
    return result


async def streamed(client: httpx.AsyncClient, thread_id: str, graph: str, **body: Any) -> list[Frame]:
    request = {"assistant_id": graph, **body}
    async with client.stream("POST", f"/threads/{thread_id}/runs/stream", json=request) as response:
        assert response.status_code == 200, await response.aread()
        return [frame async for frame in frames(response)]


async def thread_of(client: httpx.AsyncClient, thread_id: str) -> dict[str, Any]:
    thread: dict[str, Any] = (await client.get(f"/threads/{thread_id}")).json()
    return thread


def waiting(thread: dict[str, Any]) -> set[str]:
    return {one["id"] for of_task in thread["interrupts"].values() for one in of_task}


def forget_events(settings: Settings, thread_id: str) -> None:
    """As when they have expired."""
    with psycopg.connect(settings.database_url or "", autocommit=True) as connection:
        connection.execute(f"SET search_path TO {settings.db_schema}".encode())
        connection.execute("DELETE FROM event WHERE thread_id = %s", (thread_id,))
        connection.execute("UPDATE run SET first_seq = NULL WHERE thread_id = %s", (thread_id,))


async def test_what_wait_and_join_return(client: httpx.AsyncClient, settings: Settings) -> None:
    thread_id = await made(client)
    values = await waited(client, thread_id, "slow", input=AT_ONCE)
    assert values == {"seconds": 0, "done": ["s1", "s2", "s3"]}
    assert await joined(client, thread_id) == values
    forget_events(settings, thread_id)
    assert await joined(client, thread_id) == values

    one = await made(client)
    asked = await waited(client, one, "ask", input={"question": "Now?"})
    assert set(asked) == {"question", "__interrupt__"}
    [interrupt] = asked["__interrupt__"]
    assert set(interrupt) <= {"id", "value", "response_schema"}
    assert interrupt["value"] == {"question": "Now?"}
    assert await joined(client, one) == asked
    forget_events(settings, one)
    late = await joined(client, one)
    assert [shown["id"] for shown in late["__interrupt__"]] == [interrupt["id"]]

    failed = await made(client)
    error = await waited(client, failed, "boom", input=AT_ONCE)
    assert error == {"__error__": {"error": "ValueError", "message": "boom"}}
    forget_events(settings, failed)
    assert await joined(client, failed) == error
    assert (await client.get(f"/threads/{failed}/runs/{uuid4()}/join")).status_code == 404


@pytest.mark.parametrize("mode", ["values", "updates"])
async def test_several_questions_are_all_that_wait_returns(client: httpx.AsyncClient, mode: str) -> None:
    thread_id = await made(client)
    asked = await waited(client, thread_id, "ask2", input={"topic": "tides"}, stream_mode=mode)
    assert set(asked) == {"__interrupt__"}
    assert {one["value"]["asked"] for one in asked["__interrupt__"]} == {"left", "right"}
    assert await joined(client, thread_id) == asked
    thread = await thread_of(client, thread_id)
    assert (thread["status"], thread["values"]["topic"]) == ("interrupted", "tides")
    assert waiting(thread) == {one["id"] for one in asked["__interrupt__"]}
    # One answer is too few words for two questions; both go on waiting.
    failed = await waited(client, thread_id, "ask2", command={"resume": "both"})
    assert failed["__error__"]["error"] == "RuntimeError"
    thread = await thread_of(client, thread_id)
    assert thread["status"] == "error"
    assert waiting(thread) == {one["id"] for one in asked["__interrupt__"]}
    # One after the other: the first answer leaves the other question.
    first, second = (one["id"] for one in asked["__interrupt__"])
    left = await waited(client, thread_id, "ask2", command={"resume": {first: "l"}})
    assert [one["id"] for one in left["__interrupt__"]] == [second]
    assert list(left["answers"].values()) == ["l"]
    assert await joined(client, thread_id) == left
    assert waiting(await thread_of(client, thread_id)) == {second}
    done = await waited(client, thread_id, "ask2", command={"resume": {second: "r"}})
    assert set(done["answers"].values()) == {"l", "r"}
    assert "__interrupt__" not in done


async def test_what_a_failed_run_leaves(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await waited(client, thread_id, "boom", input={"seconds": 0, "done": ["before"]})
    thread = await thread_of(client, thread_id)
    assert (thread["status"], thread["error"]["error"]) == ("error", "ValueError")
    assert thread["values"] == {"seconds": 0, "done": ["before"]} == (await state_of(client, thread_id))["values"]


async def test_input_null_goes_on_or_says_that_it_cannot(client: httpx.AsyncClient) -> None:
    fresh = await made(client)
    nothings: list[dict[str, Any]] = [{}, {"input": None}, {"command": {}}, {"command": {"resume": None}}]
    for body in (*nothings, {"checkpoint_id": NO_CHECKPOINT}):
        assert (await waited(client, fresh, "slow", **body))["__error__"]["error"] == "EmptyInputError", body
    paused = await made(client)
    await waited(client, paused, "slow", input=AT_ONCE, interrupt_before=["s2"])
    thread = await thread_of(client, paused)
    assert (thread["status"], thread["interrupts"]) == ("interrupted", {})
    assert (await waited(client, paused, "slow", input=None, interrupt_after="*"))["done"] == ["s1", "s2"]
    assert (await waited(client, paused, "slow"))["done"] == ["s1", "s2", "s3"]
    # At the end there is nothing to go on with, and that is no mistake.
    assert (await waited(client, paused, "slow", input=None))["done"] == ["s1", "s2", "s3"]
    assert (await waited(client, paused, "slow", checkpoint_id=NO_CHECKPOINT))["__error__"]
    refused = await client.post(f"/threads/{paused}/runs", json={"assistant_id": "slow", "checkpoint_id": "soon"})
    assert refused.status_code == 422
    # An empty command beside an input is no command.
    other = await made(client)
    assert (await waited(client, other, "slow", input=AT_ONCE, command={}))["done"] == ["s1", "s2", "s3"]


async def test_a_fork_asks_again_and_the_thread_waits_for_that(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await waited(client, thread_id, "ask", input={"question": "Now?"})
    await waited(client, thread_id, "ask", command={"resume": "no"})
    [before] = [state for state in await history(client, thread_id, limit=10) if state["next"] == ["ask_human"]]
    asked = await waited(client, thread_id, "ask", input=None, checkpoint_id=before["checkpoint"]["checkpoint_id"])
    [interrupt] = asked["__interrupt__"]
    thread = await thread_of(client, thread_id)
    assert (thread["status"], waiting(thread)) == ("interrupted", {interrupt["id"]})
    assert "answer" not in thread["values"]
    sources = [state["metadata"]["source"] for state in await history(client, thread_id, limit=10)]
    assert sources[0] == "fork"
    done = await waited(client, thread_id, "ask", command={"resume": {interrupt["id"]: "yes"}}, strict_resume=True)
    assert done["answer"] == "yes"


async def test_goto(client: httpx.AsyncClient) -> None:
    ways: list[tuple[Any, list[str] | None]] = [
        ("s3", ["s3"]),
        ({"node": "s3", "input": AT_ONCE}, ["s3"]),
        # As JavaScript's LangGraph writes a Send.
        ({"lg_name": "Send", "node": "s3", "args": AT_ONCE}, ["s3"]),
        ({"node": "s3"}, None),
        (["s2", "s3"], ["s2", "s3", "s3"]),
        ([{"node": "s3", "input": AT_ONCE}, "s3"], ["s3", "s3"]),
    ]
    for goto, executed in ways:
        thread_id = await made(client)
        await waited(client, thread_id, "slow", input=AT_ONCE)
        result = await waited(client, thread_id, "slow", command={"goto": goto})
        if executed is None:
            assert result["__error__"]["error"] == "AttributeError"  # The node's own: it is given nothing.
        else:
            assert result["done"] == ["s1", "s2", "s3", *executed]


async def test_goto_and_update_beside_what_waits(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await waited(client, thread_id, "slow", input=AT_ONCE, interrupt_before=["s2"])
    # Pending tasks run alongside.
    result = await waited(client, thread_id, "slow", command={"goto": "s3", "update": {"done": ["u"]}})
    assert sorted(result["done"]) == sorted(["s1", "u", "s2", "s3", "s3"])
    listed = await waited(client, thread_id, "slow", command={"update": [["done", ["v"]], ["done", ["w"]]]})
    assert listed["done"][-2:] == ["v", "w"]


async def test_commands_that_are_none(web: httpx.AsyncClient) -> None:
    thread_id = await made(web)
    no_commands: list[Any] = [
        {"goto": 5},
        {"goto": {"input": 1}},
        {"goto": {"node": 5}},
        {"goto": [{"node": None}]},
        {"goto": [["s1"]]},
        {"update": "x"},
        {"update": [["a"]]},
        {"update": [[1, 2]]},
        [],
        "resume",
    ]
    for command in no_commands:
        refused = await web.post(f"/threads/{thread_id}/runs", json={"assistant_id": "steps", "command": command})
        assert refused.status_code == 422, command
        assert isinstance(refused.json()["detail"], str)
    assert (await web.get(f"/threads/{thread_id}/runs")).json() == []


async def test_cancel_and_wait(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    body = {"assistant_id": "slow", "input": {"seconds": 3600, "done": ["before"]}}
    run = (await client.post(f"/threads/{thread_id}/runs", json=body)).json()
    path = f"/threads/{thread_id}/runs/{run['run_id']}"

    async def at_work() -> bool:
        return bool((await state_of(client, thread_id))["next"] == ["s1"])

    await until(at_work, "the first step")
    cancelled = await client.post(f"{path}/cancel?wait=1")
    assert (cancelled.status_code, cancelled.json()) == (200, {"seconds": 3600, "done": ["before"]})
    assert cancelled.headers["location"] == f"{path}/join"
    assert cancelled.headers["content-location"] == path
    thread = await thread_of(client, thread_id)
    assert (thread["status"], thread["error"]["error"]) == ("interrupted", "UserInterrupt")
    for missing in (path, f"/threads/{thread_id}/runs/{uuid4()}"):
        assert (await client.post(f"{missing}/cancel?wait=1")).status_code == 404
    # One that has not begun has nothing to show.
    later = (await client.post(f"/threads/{thread_id}/runs", json={**body, "after_seconds": 3600})).json()
    assert later["created_at"] > later["updated_at"]
    answer = await client.post(f"/threads/{thread_id}/runs/{later['run_id']}/cancel?wait=true")
    assert answer.status_code == 200
    assert (await client.get(f"/threads/{thread_id}/runs/{later['run_id']}")).json()["status"] == "interrupted"


async def test_an_interrupt_can_only_be_seen_in_values_and_updates(client: httpx.AsyncClient) -> None:
    for modes, seen in ((["custom"], []), (["tasks"], ["tasks", "tasks"]), (["updates"], ["updates"])):
        events = await streamed(client, await made(client), "ask", input={}, stream_mode=modes)
        assert [event.event for event in events] == ["metadata", *seen]
    assert set(events[-1].data) == {"__interrupt__"}
    thread_id = await made(client)
    paused = await streamed(client, thread_id, "slow", input=AT_ONCE, stream_mode="updates", interrupt_before=["s1"])
    assert paused[-1].data == {"__interrupt__": []}


async def test_messages_grow_as_messages(client: httpx.AsyncClient) -> None:
    said = {"messages": [{"role": "user", "content": "hi"}]}
    events = await streamed(client, await made(client), "llm", input=said, stream_mode="messages")
    announced, *parts = [event for event in events if event.event.startswith("messages/")]
    [(identity, about)] = announced.data.items()
    assert about["metadata"]["langgraph_node"] == "call_model"
    texts = [part.data[0]["content"] for part in parts if part.event == "messages/partial"]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == "You said: hi. Tell me more about that."
    assert {(part.data[0]["type"], part.data[0]["id"]) for part in parts} == {("ai", identity)}


async def test_a_stream_cut_short_by_cancelling_ends_without_a_word(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    body = {"assistant_id": "slow", "input": {"seconds": 3600}}
    async with client.stream("POST", f"/threads/{thread_id}/runs/stream", json=body) as response:
        events = frames(response)
        assert [(await anext(events)).event, (await anext(events)).event] == ["metadata", "values"]
        await client.post(f"{response.headers['content-location']}/cancel")
        async with asyncio.timeout(60):
            assert [event async for event in events] == []


async def test_where_stateless_runs_are(client: httpx.AsyncClient) -> None:
    body = {"assistant_id": "slow", "input": AT_ONCE}
    created, stream, wait = [await client.post(f"/runs{suffix}", json=body) for suffix in ("", "/stream", "/wait")]
    run_id = created.json()["run_id"]
    assert created.headers["content-location"] == f"/runs/{run_id}"
    place = stream.headers["content-location"]
    assert place.startswith("/runs/")
    assert stream.headers["location"] == f"{place}/stream"
    place = wait.headers["content-location"]
    assert place.startswith("/threads/")
    assert wait.headers["location"] == f"{place}/join"
    assert (await client.post("/runs/wait", json={"assistant_id": "ask", "command": {"resume": 1}})).status_code == 400

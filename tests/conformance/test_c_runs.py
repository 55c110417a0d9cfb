"""C02 to C05, C08, C10, C11, C14, C15: one run, streamed or waited for."""

from __future__ import annotations

import re

import httpx

from tests.conformance.calls import (
    HELLO,
    names,
    new_thread,
    ok,
    stream_run,
    system_assistant,
    wait_run,
)

UUID_PATTERN = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


async def test_c02_a_stream_says_where_its_run_is(client: httpx.AsyncClient, thread_id: str) -> None:
    headers, _ = await stream_run(client, thread_id, "echo", input=HELLO)
    assert headers["content-type"].startswith("text/event-stream")
    run = re.fullmatch(rf"/threads/{thread_id}/runs/({UUID_PATTERN})", headers["content-location"])
    assert run is not None, headers["content-location"]
    assert headers["location"] == f"/threads/{thread_id}/runs/{run[1]}/stream"


async def test_c03_metadata_then_values_then_the_end(client: httpx.AsyncClient, thread_id: str) -> None:
    headers, events = await stream_run(client, thread_id, "echo", input=HELLO)
    assert names(events) == ["metadata", "values", "values"]
    assert events[0].data == {"run_id": headers["content-location"].rsplit("/", 1)[1], "attempt": 1}
    assert [len(event.data["messages"]) for event in events[1:]] == [1, 2]
    assert events[-1].data["messages"][-1]["content"] == "hello"


async def test_c03_the_bytes_of_a_stream(client: httpx.AsyncClient, thread_id: str) -> None:
    body = {"assistant_id": "llm", "input": HELLO, "stream_mode": ["values", "messages-tuple"]}
    response = await client.post(f"/threads/{thread_id}/runs/stream", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    assert re.fullmatch(
        rb"(event: [a-z]+\r\ndata: [{\[][^\r\n]*[}\]]\r\n(id: [^\r\n]+\r\n)?\r\n|: heartbeat\r\n)+",
        response.content,
    )


async def test_c04_the_run_is_over_when_its_stream_is(client: httpx.AsyncClient, thread_id: str) -> None:
    for _ in range(10):
        headers, _ = await stream_run(client, thread_id, "echo", input=HELLO)
        assert (await ok(client.get(headers["content-location"])))["status"] == "success"


async def test_c05_wait_gives_the_final_values(client: httpx.AsyncClient, thread_id: str) -> None:
    response = await client.post(f"/threads/{thread_id}/runs/wait", json={"assistant_id": "echo", "input": HELLO})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/json")
    assert [message["content"] for message in response.json()["messages"]] == ["hello", "hello"]
    assert [message["type"] for message in response.json()["messages"]] == ["human", "ai"]


async def test_c08_a_graphs_name_and_its_uuid_both_run(client: httpx.AsyncClient) -> None:
    assert system_assistant("echo") == "046b5dc7-2108-582c-9c6c-31d556d138f0"
    for named in ("echo", system_assistant("echo")):
        thread_id = await new_thread(client)
        values = await wait_run(client, thread_id, named, input=HELLO)
        assert values["messages"][-1]["content"] == "hello"
        [run] = await ok(client.get(f"/threads/{thread_id}/runs"))
        assert run["assistant_id"] == system_assistant("echo")


async def test_c10_a_failure_is_the_last_event(client: httpx.AsyncClient, thread_id: str) -> None:
    headers, events = await stream_run(client, thread_id, "boom", input={})
    error = {"error": "ValueError", "message": "boom"}
    assert (events[-1].event, events[-1].data) == ("error", error)
    assert names(events).count("error") == 1
    assert (await ok(client.get(headers["content-location"])))["status"] == "error"
    thread = await ok(client.get(f"/threads/{thread_id}"))
    assert (thread["status"], thread["error"]) == ("error", error)


async def test_c11_a_failure_waited_for_is_an_answer(client: httpx.AsyncClient, thread_id: str) -> None:
    assert await wait_run(client, thread_id, "boom", input={}) == {
        "__error__": {"error": "ValueError", "message": "boom"}
    }


async def test_c14_tokens_as_tuples(client: httpx.AsyncClient, thread_id: str) -> None:
    _, events = await stream_run(client, thread_id, "llm", input=HELLO, stream_mode=["messages-tuple"])
    assert set(names(events)) == {"metadata", "messages"}
    pairs = [event.data for event in events if event.event == "messages"]
    assert len(pairs) > 3
    assert {chunk["type"] for chunk, _ in pairs} == {"AIMessageChunk"}
    assert "".join(chunk["content"] for chunk, _ in pairs) == "You said: hello. Tell me more about that."
    assert len({chunk["id"] for chunk, _ in pairs}) == 1
    assert {meta["langgraph_node"] for _, meta in pairs} == {"call_model"}
    stored = (await ok(client.get(f"/threads/{thread_id}")))["values"]["messages"][-1]
    assert (stored["id"], stored["content"]) == (pairs[0][0]["id"], "You said: hello. Tell me more about that.")


async def test_c15_subgraphs_only_on_demand(client: httpx.AsyncClient) -> None:
    asked = {"input": {"topic": "tides"}, "stream_mode": ["values"]}
    _, events = await stream_run(client, await new_thread(client), "sub", **asked, stream_subgraphs=True)
    nested = [name for name in names(events) if "|" in name]
    assert nested
    assert all(re.fullmatch(rf"values\|child:{UUID_PATTERN}", name) for name in nested), nested
    assert len(set(nested)) == 1
    assert {"metadata", "values"} <= set(names(events))
    _, events = await stream_run(client, await new_thread(client), "sub", **asked)
    assert set(names(events)) == {"metadata", "values"}

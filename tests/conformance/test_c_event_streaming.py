"""C18 to C26, C28, C47, C64: the thread-centric protocol over HTTP."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any
from uuid import uuid4

import httpx
import pytest
from langchain_protocol import protocol
from pydantic import TypeAdapter

from tests.conformance.calls import (
    AT_ONCE,
    CHANNELS,
    FOREVER,
    HELLO,
    PATIENCE,
    STEPS,
    Event,
    command,
    lifecycle,
    of,
    ok,
    refused,
    replay,
    succeed,
    until_terminal,
    watching,
)


def numbers(events: list[Event]) -> list[int]:
    return [event["seq"] for event in events]


def assert_increasing(events: list[Event]) -> None:
    assert all(earlier < later for earlier, later in pairwise(numbers(events))), numbers(events)


async def test_c18_run_start_brings_its_thread(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    await refused(client.get(f"/threads/{thread_id}"), 404)
    answer = await command(client, thread_id, "run.start", assistant_id="slow", input=AT_ONCE)
    assert answer["type"] == "success"
    # Where a client reads on from: nothing of the run may have a number up to this.
    assert answer["meta"]["applied_through_seq"] == 0
    run = await ok(client.get(f"/threads/{thread_id}/runs/{answer['result']['run_id']}"))
    assert run["thread_id"] == thread_id
    assert (await ok(client.get(f"/threads/{thread_id}")))["metadata"]["graph_id"] == "slow"


async def test_c19_a_stream_opened_before_the_run(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    async with watching(client, thread_id) as stream:
        await succeed(client, thread_id, "run.start", assistant_id="slow", input=AT_ONCE)
        events = await until_terminal(stream)
    assert (lifecycle(events[0]), lifecycle(events[-1])) == ("running", "completed")
    assert sum(lifecycle(event) is not None for event in events) == 2
    assert_increasing(events)
    assert len({event["event_id"] for event in events}) == len(events)
    for event in events:
        assert isinstance(event["params"]["timestamp"], int)
        assert event["params"]["namespace"] == []
    assert [values.get("done", []) for values in of(events, "values")] == [STEPS[:count] for count in range(4)]
    assert [event["params"]["node"] for event in events if event["method"] == "updates"] == STEPS
    assert events[0]["params"]["data"]["graph_name"] == "slow"


DATA: dict[str, TypeAdapter[Any]] = {
    "lifecycle": TypeAdapter(protocol.LifecycleData),
    "messages": TypeAdapter(protocol.MessagesData),
    "input.requested": TypeAdapter(protocol.InputRequestedData),
    "checkpoints": TypeAdapter(protocol.Checkpoint),
}
ENVELOPE: TypeAdapter[Any] = TypeAdapter(protocol.Event)


@pytest.mark.parametrize("graph", ["echo", "slow", "ask", "ask2", "boom", "llm", "sub"])
async def test_c19_events_are_as_the_protocol_defines_them(client: httpx.AsyncClient, graph: str) -> None:
    thread_id = str(uuid4())
    await succeed(client, thread_id, "run.start", assistant_id=graph, input={**HELLO, **AT_ONCE, "topic": "tides"})
    events = await replay(client, thread_id)
    for event in events:
        ENVELOPE.validate_python(event)
        if event["method"] in DATA:
            DATA[event["method"]].validate_python(event["params"]["data"])
    assert {"lifecycle", "checkpoints"} <= {event["method"] for event in events}


async def test_c20_a_stream_opened_again_replays_everything(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    async with watching(client, thread_id) as stream:
        await succeed(client, thread_id, "run.start", assistant_id="slow", input=AT_ONCE)
        live = await until_terminal(stream)
    # Not only ids and numbers: all of it.
    assert await replay(client, thread_id) == live
    assert await replay(client, thread_id) == live
    some = await replay(client, thread_id, channels=["values", "lifecycle"])
    assert some == [event for event in live if event["method"] in ("values", "lifecycle")]


async def test_c21_since_leaves_out_what_is_known(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    await succeed(client, thread_id, "run.start", assistant_id="slow", input=AT_ONCE)
    whole = await replay(client, thread_id)
    for known in (0, *numbers(whole)[:-1]):
        assert await replay(client, thread_id, since=known) == [event for event in whole if event["seq"] > known]


async def test_c22_a_stream_outlives_its_runs(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    async with watching(client, thread_id) as stream:
        seen: list[Event] = []
        for graph, given in (("slow", AT_ONCE), ("slow", AT_ONCE), ("boom", {})):
            started = await succeed(client, thread_id, "run.start", assistant_id=graph, input=given)
            events = await until_terminal(stream)
            assert lifecycle(events[0]) == "running"
            assert events[0]["params"]["data"]["run_id"] == started["run_id"]
            assert lifecycle(events[-1]) == ("completed" if graph == "slow" else "failed")
            seen += events
        assert_increasing(seen)
    assert "boom" in seen[-1]["params"]["data"]["error"]


async def asking(client: httpx.AsyncClient, thread_id: str, graph: str) -> list[Event]:
    await succeed(client, thread_id, "run.start", assistant_id=graph, input={})
    return await replay(client, thread_id)


async def test_c23_an_interrupt_asks(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    events = await asking(client, thread_id, "ask")
    methods = [event["method"] for event in events]
    assert methods.count("input.requested") == 1
    assert lifecycle(events[-1]) == "interrupted"
    [asked] = of(events, "input.requested")
    assert asked["payload"] == asked["value"] == {"question": "Shall I go on?"}
    [waiting] = (await ok(client.get(f"/threads/{thread_id}")))["interrupts"].values()
    assert asked["interrupt_id"] == waiting[0]["id"]
    assert all("__interrupt__" not in values for values in of(events, "values"))
    only = await replay(client, thread_id, channels=["input", "lifecycle"])
    assert [event["method"] for event in only] == ["lifecycle", "input.requested", "lifecycle"]


@pytest.mark.parametrize("response", [{"color": "blue"}, "blue", None])
async def test_c24_an_answer_goes_on(client: httpx.AsyncClient, response: Any) -> None:
    thread_id = str(uuid4())
    asked = await asking(client, thread_id, "ask")
    [question] = of(asked, "input.requested")
    respond = {"interrupt_id": question["interrupt_id"], "namespace": [], "response": response}
    assert await succeed(client, thread_id, "input.respond", **respond) == {}
    rest = await replay(client, thread_id, since=asked[-1]["seq"])
    assert (lifecycle(rest[0]), lifecycle(rest[-1])) == ("running", "completed")
    state = await ok(client.get(f"/threads/{thread_id}/state"))
    assert (state["values"]["answer"], state["next"]) == (response, [])
    # Answered is answered.
    assert (await command(client, thread_id, "input.respond", **respond))["error"] == "no_such_interrupt"


async def test_c24_an_answer_sent_as_soon_as_it_is_asked_for(client: httpx.AsyncClient) -> None:
    """The question is seen before the run that asks it has ended."""
    for _ in range(5):
        thread_id = str(uuid4())
        async with watching(client, thread_id, channels=["lifecycle", "input"]) as stream:
            await succeed(client, thread_id, "run.start", assistant_id="ask", input={})
            async for event in stream:
                if event["method"] == "input.requested":
                    interrupt_id = event["params"]["data"]["interrupt_id"]
                    respond = {"interrupt_id": interrupt_id, "namespace": [], "response": "at once"}
                    await succeed(client, thread_id, "input.respond", **respond)
                if lifecycle(event) == "completed":
                    break
        assert (await ok(client.get(f"/threads/{thread_id}/state")))["values"]["answer"] == "at once"


async def test_c25_a_message_comes_in_blocks(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    await succeed(client, thread_id, "run.start", assistant_id="llm", input=HELLO)
    events = await replay(client, thread_id)
    parts = of(events, "messages")
    kinds = [part["event"] for part in parts]
    assert kinds[:2] == ["message-start", "content-block-start"]
    assert kinds[-2:] == ["content-block-finish", "message-finish"]
    deltas = parts[2:-2]
    assert {part["event"] for part in deltas} == {"content-block-delta"}
    assert {part["delta"]["type"] for part in deltas} == {"text-delta"}
    text = "You said: hello. Tell me more about that."
    assert "".join(part["delta"]["text"] for part in deltas) == parts[-2]["content"]["text"] == text
    assert (parts[0]["role"], {part["index"] for part in parts[1:-1]}) == ("ai", {0})
    last = of(events, "values")[-1]["messages"][-1]
    assert last["id"] == parts[0]["id"]
    # In values too, a message's content may be blocks.
    blocks = last["content"] if isinstance(last["content"], list) else [{"type": "text", "text": last["content"]}]
    assert [(block["type"], block["text"]) for block in blocks] == [("text", text)]


async def test_c26_namespaces_and_depth(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    await succeed(client, thread_id, "run.start", assistant_id="sub", input={"topic": "tides"})
    whole = await replay(client, thread_id)
    at_root = [event for event in whole if not event["params"]["namespace"]]
    below = [event for event in whole if event["params"]["namespace"]]
    assert {event["params"]["namespace"][0].partition(":")[0] for event in below} == {"child"}
    assert {"lifecycle", "values"} <= {event["method"] for event in below}
    lifecycles = [event["params"]["data"]["event"] for event in below if event["method"] == "lifecycle"]
    assert lifecycles == ["started", "completed"]
    assert await replay(client, thread_id, namespaces=[[]], depth=0) == at_root
    assert await replay(client, thread_id, namespaces=[[]], depth=1) == whole
    assert await replay(client, thread_id, namespaces=[[]]) == whole
    assert await replay(client, thread_id, namespaces=[]) == whole
    for prefix in ("child", below[0]["params"]["namespace"][0]):
        async with watching(client, thread_id, namespaces=[[prefix]], depth=0) as stream:
            async with asyncio.timeout(PATIENCE):
                assert [await anext(stream) for _ in below] == below


async def test_c28_a_cancel_by_rest_ends_the_run_for_watchers(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    async with watching(client, thread_id) as stream:
        started = await succeed(client, thread_id, "run.start", assistant_id="slow", input=FOREVER)
        path = f"/threads/{thread_id}/runs/{started['run_id']}"
        async for event in stream:
            if event["method"] == "values":
                break
        assert (await client.post(f"{path}/cancel?wait=0&action=interrupt")).status_code == 202
        events = await until_terminal(stream)
        assert lifecycle(events[-1]) == "interrupted"
        assert (await ok(client.get(path)))["status"] == "interrupted"
        # The stream stays open for the next one.
        await succeed(client, thread_id, "run.start", assistant_id="slow", input=AT_ONCE)
        assert lifecycle((await until_terminal(stream))[-1]) == "completed"


async def test_c47_two_answers_in_one_run(client: httpx.AsyncClient) -> None:
    thread_id = str(uuid4())
    asked = await asking(client, thread_id, "ask2")
    ids = {data["payload"]["asked"]: data["interrupt_id"] for data in of(asked, "input.requested")}
    assert set(ids) == {"left", "right"}
    responses = [
        {"interrupt_id": ids["left"], "namespace": [], "response": "l"},
        {"interrupt_id": ids["right"], "namespace": [], "response": "r"},
    ]
    assert await succeed(client, thread_id, "input.respond", responses=responses) == {}
    rest = await replay(client, thread_id, since=asked[-1]["seq"])
    assert [lifecycle(event) for event in rest if lifecycle(event)] == ["running", "completed"]
    assert of(rest, "input.requested") == []
    state = await ok(client.get(f"/threads/{thread_id}/state"))
    assert state["values"]["answers"] == {"left": "l", "right": "r"}
    assert len(await ok(client.get(f"/threads/{thread_id}/runs"))) == 2


@pytest.mark.parametrize(
    ("graph", "given"), [("slow", AT_ONCE), ("echo", HELLO), ("llm", HELLO), ("sub", {"topic": "tides"})]
)
async def test_c64_a_checkpoint_before_each_values(client: httpx.AsyncClient, graph: str, given: Any) -> None:
    thread_id = str(uuid4())
    await succeed(client, thread_id, "run.start", assistant_id=graph, input=given)
    events = await replay(client, thread_id, channels=CHANNELS)
    count = 0
    for before, event in pairwise(events):
        if event["method"] != "values":
            continue
        count += 1
        assert before["method"] == "checkpoints"
        assert before["params"]["namespace"] == event["params"]["namespace"]
        data = before["params"]["data"]
        assert {"id", "step", "source"} <= set(data)
        if not event["params"]["namespace"]:
            state = await ok(client.get(f"/threads/{thread_id}/state/{data['id']}"))
            assert (state["metadata"]["step"], state["metadata"]["source"]) == (data["step"], data["source"])
            told = event["params"]["data"]
            assert {key: told[key] for key in told if key != "messages"} == {
                key: state["values"][key] for key in state["values"] if key != "messages"
            }
            assert len(told.get("messages", [])) == len(state["values"].get("messages", []))
    assert count >= 2

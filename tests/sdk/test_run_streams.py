"""Streams of runs through the Python SDK, asynchronous and not: every mode, joining, and broken connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from typing import Any

import pytest
from langgraph_sdk.errors import NotFoundError, UnprocessableEntityError

from tests.support.http_proxy import HttpProxy
from tests.support.sdk import Sdk
from tests.support.waiting import until

OSLO = {"messages": [{"role": "user", "content": "Oslo"}]}
SAID = "You said: Oslo"
NODES = ["announce", "talk", "decide", "tools"]
CUSTOM = [{"percent": 10}, {"name": "progress", "payload": {"percent": 50}}]
MODES = ["values", "updates", "messages", "messages-tuple", "custom", "tasks", "checkpoints", "debug", "events"]


async def thread(sdk: Sdk) -> str:
    return str((await sdk("threads.create"))["thread_id"])


async def tour(sdk: Sdk, *modes: str, thread_id: str | None = None, **options: Any) -> list[Any]:
    """What the modes show of the graph that has something for each."""
    mode = modes[0] if len(modes) == 1 else list(modes)
    thread_id = thread_id or await thread(sdk)
    return await sdk.stream("runs.stream", thread_id, "tour", input=OSLO, stream_mode=mode, **options)


def data(parts: list[Any], event: str) -> list[Any]:
    return [part.data for part in parts if part.event.split("|")[0] == event]


async def test_C02_C03_C04_the_frame_of_a_stream(remote: Sdk) -> None:
    thread_id = await thread(remote)
    told: list[Any] = []
    parts = await tour(remote, "values", thread_id=thread_id, on_run_created=told.append)
    [run] = await remote("runs.list", thread_id)
    assert run["status"] == "success"
    assert told == [{"run_id": run["run_id"], "thread_id": thread_id}]
    assert (parts[0].event, parts[0].data) == ("metadata", {"run_id": run["run_id"], "attempt": 1})
    assert {part.event for part in parts[1:]} == {"values"}
    ids = [int(part.id) for part in parts]
    assert ids == sorted(set(ids))


async def test_values(remote: Sdk) -> None:
    shown = data(await tour(remote, "values"), "values")
    assert [len(values["messages"]) for values in shown] == [1, 2, 3, 4]
    assert shown[-1]["messages"][-1]["content"] == "sunny in Oslo"


async def test_updates(remote: Sdk) -> None:
    shown = data(await tour(remote, "updates"), "updates")
    assert [list(update) for update in shown] == [[node] for node in NODES]
    assert shown[3]["tools"]["messages"][0]["content"] == "sunny in Oslo"


async def test_C14_message_tuples(remote: Sdk) -> None:
    parts = await tour(remote, "messages-tuple", stream_subgraphs=True)
    pairs = data(parts, "messages")
    tokens = [chunk for chunk, about in pairs if about["langgraph_node"] == "call_model"]
    assert "".join(token["content"] for token in tokens) == SAID
    assert len(tokens) > 2
    assert {token["type"] for token in tokens} == {"AIMessageChunk"}
    assert len({token["id"] for token in tokens}) == 1
    assert [chunk["type"] for chunk, about in pairs if about["langgraph_node"] == "tools"] == ["tool"]
    [place] = {part.event for part in parts if part.event.startswith("messages|")}
    assert place.startswith("messages|talk:")


async def test_messages_grow(remote: Sdk) -> None:
    parts = await tour(remote, "messages", stream_subgraphs=True)
    partial = [message for [message] in data(parts, "messages/partial")]
    assert partial[-1]["content"] == SAID
    assert all(SAID.startswith(message["content"]) for message in partial)
    assert [message["type"] for [message] in data(parts, "messages/complete")] == ["ai", "tool"]
    announced = data(parts, "messages/metadata")
    assert list(announced[0]) == [partial[0]["id"]]
    assert announced[0][partial[0]["id"]]["metadata"]["langgraph_node"] == "call_model"


async def test_custom(remote: Sdk) -> None:
    assert data(await tour(remote, "custom"), "custom") == CUSTOM


async def test_tasks(remote: Sdk) -> None:
    tasks = data(await tour(remote, "tasks"), "tasks")
    assert [task["name"] for task in tasks if "result" not in task] == NODES
    assert [task["name"] for task in tasks if "result" in task] == NODES
    assert tasks[0]["id"] == tasks[1]["id"]


async def test_checkpoints(remote: Sdk) -> None:
    thread_id = await thread(remote)
    shown = data(await tour(remote, "checkpoints", thread_id=thread_id), "checkpoints")
    assert [one["metadata"]["source"] for one in shown] == ["input", *["loop"] * 5]
    assert [one["next"] for one in shown] == [["__start__"], *([node] for node in NODES), []]
    history = await remote("threads.get_history", thread_id)
    ids = [one["config"]["configurable"]["checkpoint_id"] for one in shown]
    assert ids == [state["checkpoint"]["checkpoint_id"] for state in history[::-1]]
    assert [one["parent_config"]["configurable"]["checkpoint_id"] for one in shown[1:]] == ids[:-1]
    assert set(shown[0]) == {"config", "parent_config", "values", "metadata", "next", "tasks"}


async def test_debug(remote: Sdk) -> None:
    shown = data(await tour(remote, "debug"), "debug")
    assert {one["type"] for one in shown} == {"checkpoint", "task", "task_result"}
    assert all(set(one) == {"step", "timestamp", "type", "payload"} for one in shown)
    saved = [one["payload"] for one in shown if one["type"] == "checkpoint"]
    assert saved[0]["parent_checkpoint"] is None
    for earlier, later in pairwise(saved):
        assert later["parent_checkpoint"]["checkpoint_id"] == earlier["checkpoint"]["checkpoint_id"]


async def test_events(remote: Sdk) -> None:
    shown = data(await tour(remote, "events"), "events")
    seen = {(one["event"], one["name"]) for one in shown}
    assert {("on_chain_start", "tour"), ("on_tool_end", "weather"), ("on_chain_end", "tour")} <= seen
    tokens = [one["data"]["chunk"]["content"] for one in shown if one["event"] == "on_chat_model_stream"]
    assert "".join(tokens) == SAID


async def test_all_modes_at_once(remote: Sdk) -> None:
    parts = await tour(remote, *MODES)
    names = {part.event.split("/")[0] for part in parts}
    assert names == {"metadata", "values", "updates", "messages", "custom", "tasks", "checkpoints", "debug", "events"}
    for event, alone in (("values", 4), ("updates", 4), ("custom", 2), ("tasks", 8), ("checkpoints", 6)):
        assert len(data(parts, event)) == alone


async def test_C15_subgraphs(remote: Sdk) -> None:
    parts = await tour(remote, "values", "updates", stream_subgraphs=True)
    inside = [part for part in parts if "|" in part.event]
    [place] = {part.event.split("|", 1)[1] for part in inside}
    assert place.startswith("talk:")
    assert {part.event.split("|")[0] for part in inside} == {"values", "updates"}
    assert not [part for part in await tour(remote, "values", "updates") if "|" in part.event]


async def test_the_typed_parts_of_version_two(remote: Sdk) -> None:
    parts = await tour(remote, "values", "updates", stream_subgraphs=True, version="v2")
    assert {part["type"] for part in parts} == {"metadata", "values", "updates"}
    [place] = {tuple(part["ns"]) for part in parts if part["ns"]}
    assert place[0].startswith("talk:")
    asked = await remote.stream("runs.stream", await thread(remote), "ask", input={"question": "?"}, version="v2")
    assert (asked[-1]["type"], asked[-1]["data"]) == ("values", {"question": "?"})
    assert [one["value"] for one in asked[-1]["interrupts"]] == [{"question": "?"}]


async def test_C10_C12_how_streams_end(remote: Sdk) -> None:
    failed = await remote.stream("runs.stream", await thread(remote), "boom", input=OSLO)
    assert (failed[-1].event, failed[-1].data) == ("error", {"error": "ValueError", "message": "the fuse was lit"})
    thread_id = await thread(remote)
    asked = await remote.stream(
        "runs.stream", thread_id, "ask", input={"question": "?"}, stream_mode=["values", "updates"]
    )
    [shown], [updated] = data(asked, "values")[-1]["__interrupt__"], data(asked, "updates")[-1]["__interrupt__"]
    [[listed]] = (await remote("threads.get", thread_id))["interrupts"].values()
    assert shown == updated
    assert (listed["id"], listed["value"]) == (shown["id"], shown["value"])
    answered = await remote.stream("runs.stream", thread_id, "ask", command={"resume": "yes"})
    assert answered[-1].data == {"question": "?", "answer": "yes"}
    with pytest.raises(NotFoundError):
        await remote.stream("runs.stream", "00000000-0000-4000-8000-000000000000", "ask", input={})
    with pytest.raises(UnprocessableEntityError):
        await remote.stream("runs.stream", thread_id, "ask", input={}, stream_mode="lifecycle")


async def test_C44_stateless_streams(remote: Sdk) -> None:
    told: list[Any] = []
    parts = await remote.stream("runs.stream", None, "tour", input=OSLO, on_run_created=told.append)
    assert len(data(parts, "values")) == 4
    assert told == [{"run_id": parts[0].data["run_id"], "thread_id": None}]


async def test_C30_C31_C33_joining_a_stream(remote: Sdk) -> None:
    thread_id = await thread(remote)
    asked = {"stream_mode": ["values", "custom", "updates"], "stream_resumable": True}
    run = await remote("runs.create", thread_id, "tour", input=OSLO, **asked)
    whole = await remote.stream("runs.join_stream", thread_id, run["run_id"])
    assert whole[0].event == "metadata"
    assert [len(data(whole, mode)) for mode in ("values", "custom", "updates")] == [4, 2, 4]

    async def joined(**options: Any) -> list[Any]:
        return await remote.stream("runs.join_stream", thread_id, run["run_id"], **options)

    assert await joined(last_event_id="-1") == whole
    for place in range(len(whole)):
        assert await joined(last_event_id=whole[place].id) == whole[place + 1 :]
    some = await joined(stream_mode=["custom", "updates"])
    assert some == [part for part in whole if part.event in ("custom", "updates")]
    assert await joined(stream_mode="values", last_event_id=whole[3].id) == [
        part for part in whole[4:] if part.event == "values"
    ]
    with pytest.raises(NotFoundError):
        await remote.stream("runs.join_stream", thread_id, "00000000-0000-4000-8000-000000000000")
    # The id of another server's event means the beginning.
    assert await joined(last_event_id="1700000000000-0") == whole


@pytest.mark.parametrize(
    ("option", "end"),
    [("cancel_on_disconnect", "interrupted"), ("on_disconnect", "interrupted"), ("continue", "success")],
)
async def test_C42_leaving_a_stream(remote: Sdk, option: str, end: str) -> None:
    thread_id = await thread(remote)
    ticks = {"count": 30 if option == "continue" else 30_000, "pause": 0.02}
    if option == "cancel_on_disconnect":
        run = await remote("runs.create", thread_id, "ticker", input=ticks, stream_mode="custom")
        parts = remote.iterate("runs.join_stream", thread_id, run["run_id"], cancel_on_disconnect=True)
    else:
        mode = "continue" if option == "continue" else "cancel"
        parts = remote.iterate(
            "runs.stream", thread_id, "ticker", input=ticks, stream_mode="custom", on_disconnect=mode
        )
    async with aclosing(parts):
        async for part in parts:
            if part.data == {"tick": 3}:
                break

    async def ended() -> Any:
        [run] = await remote("runs.list", thread_id)
        return run["status"] not in ("pending", "running") and run["status"]

    assert await until(ended, "the run has ended") == end


# --- broken connections ----------------------------------------------------------------------------------


@pytest.fixture
async def proxy(served: str) -> AsyncIterator[HttpProxy]:
    async with HttpProxy(served) as opened:
        yield opened


@pytest.fixture(params=["async", "sync"])
async def cut_off(request: pytest.FixtureRequest, proxy: HttpProxy) -> AsyncIterator[Sdk]:
    """Each client of the SDK, behind a proxy that cuts its connections."""
    opened = Sdk(proxy.url, blocking=request.param == "sync")
    yield opened
    await opened.close()


TICKS = {"count": 20, "pause": 0.02}
ALL_TICKS = [{"tick": number} for number in range(1, 21)]


async def test_a_stream_goes_on_after_its_connection_broke(cut_off: Sdk, proxy: HttpProxy) -> None:
    thread_id = await thread(cut_off)
    proxy.cut_at('{"tick":5}', '{"tick":12}')
    parts = await cut_off.stream("runs.stream", thread_id, "ticker", input=TICKS, stream_mode=["custom", "values"])
    assert proxy.cut == 2
    assert data(parts, "custom") == ALL_TICKS
    assert data(parts, "values") == [TICKS, TICKS | {"ticked": 20}]
    # After the number that tells of its acceptance comes that of its beginning, which is not shown.
    first, *ids = [int(part.id) for part in parts]
    assert ids == list(range(first + 2, first + 2 + len(ids)))
    [run] = await cut_off("runs.list", thread_id)
    assert run["status"] == "success"
    again = proxy.heads(f"GET /threads/{thread_id}/runs/{run['run_id']}/stream")
    assert len(again) == 2
    assert all("last-event-id:" in head.lower() for head in again)
    assert len(proxy.heads("POST /threads/")) == 1


async def test_a_stateless_stream_goes_on_even_when_its_run_is_over_by_then(cut_off: Sdk, proxy: HttpProxy) -> None:
    proxy.cut_at('{"tick":5}')
    parts = await cut_off.stream("runs.stream", None, "ticker", input=TICKS, stream_mode="custom")
    assert proxy.cut == 1
    assert data(parts, "custom") == ALL_TICKS


async def test_a_joined_stream_goes_on_with_the_modes_it_asked_for(cut_off: Sdk, proxy: HttpProxy) -> None:
    thread_id = await thread(cut_off)
    run = await cut_off("runs.create", thread_id, "ticker", input=TICKS, stream_mode=["custom", "values", "tasks"])
    proxy.cut_at('{"tick":5}')
    parts = await cut_off.stream("runs.join_stream", thread_id, run["run_id"], stream_mode=["custom", "values"])
    assert proxy.cut == 1
    assert data(parts, "custom") == ALL_TICKS
    assert {part.event for part in parts} == {"custom", "values"}


async def test_waiting_goes_on_after_the_connection_broke(cut_off: Sdk, proxy: HttpProxy) -> None:
    thread_id = await thread(cut_off)
    proxy.cut_at('"ticked":20')
    with pytest.warns(UserWarning, match="attempting reconnect"):
        values = await cut_off("runs.wait", thread_id, "ticker", input=TICKS)
    assert values == TICKS | {"ticked": 20}
    [run] = await cut_off("runs.list", thread_id)
    assert len(proxy.heads(f"GET /threads/{thread_id}/runs/{run['run_id']}/join")) == 1

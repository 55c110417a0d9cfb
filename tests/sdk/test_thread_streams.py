"""The thread-centric protocol: the Python SDK's `threads.stream()`, asynchronous and not, over both transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import pytest

from tests.cli.processes import Program
from tests.support.http_proxy import HttpProxy
from tests.support.sdk import Sdk
from tests.support.thread_stream import ThreadStream
from tests.support.waiting import until_true

CHANNELS = ["values", "updates", "messages", "tools", "lifecycle", "input", "checkpoints", "tasks", "custom"]
NODES = ["announce", "talk", "decide", "tools"]
SAID = "You said: Oslo"

Open = Callable[..., ThreadStream]


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.fixture(params=["sse", "websocket"])
def opened(request: pytest.FixtureRequest, remote: Sdk) -> Open:
    """Opens a stream of a thread, with each client, over each transport."""

    def open_stream(assistant_id: str, thread_id: str | None = None) -> ThreadStream:
        return ThreadStream(remote, assistant_id, thread_id, transport=request.param)

    return open_stream


def everything(stream: Any) -> Any:
    return stream.subscribe(CHANNELS)


def data(events: list[Any], method: str, namespace: list[str] | None = None) -> list[Any]:
    return [
        event["params"]["data"]
        for event in events
        if event["method"] == method and (namespace is None or event["params"]["namespace"] == namespace)
    ]


async def text(message: Any) -> str:
    """All a message has said, once it has been said."""
    return str(message.text.get() if hasattr(message.text, "get") else await message.text)


async def test_every_channel(opened: Open) -> None:
    async with opened("tour") as thread:
        run_id = await thread.start(input=user("Oslo"), config={"tags": ["a"]}, metadata={"team": "x"})
        events = await thread.all(everything)
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert len({event["event_id"] for event in events}) == len(events)
        ends = data(events, "lifecycle", [])
        assert [one["event"] for one in ends] == ["running", "completed"]
        assert {one["run_id"] for one in ends} == {run_id}
        assert len(data(events, "values", [])[-1]["messages"]) == 4
        updated = [event["params"]["node"] for event in events if event["method"] == "updates"]
        assert updated == ["announce", "call_model", "talk", "decide", "tools"]
        assert data(events, "custom") == [
            {"payload": {"percent": 10}},
            {"name": "progress", "payload": {"percent": 50}},
        ]
        assert [task["name"] for task in data(events, "tasks", []) if "result" not in task] == NODES
        assert [one["source"] for one in data(events, "checkpoints", [])] == ["input", *["loop"] * 5]
        assert [one["event"] for one in data(events, "tools")] == ["tool-started", "tool-finished"]
        assert len((await thread.output())["messages"]) == 4


async def test_values_as_they_come_and_the_last_of_them(opened: Open) -> None:
    async with opened("steps") as thread:
        await thread.start(input={})
        shown = await thread.all(lambda stream: stream.values)
        assert shown[-1] == {"done": ["s1", "s2", "s3", "s4", "s5"]}
        assert await thread.output() == shown[-1]


async def test_messages_and_their_tokens(opened: Open) -> None:
    async with opened("chat") as thread:
        await thread.start(input=user("Oslo"))
        [message] = await thread.all(lambda stream: stream.messages)
        assert await text(message) == SAID
        assert message.node == "call_model"
        [_, said] = (await thread.output())["messages"]
        assert said["id"] == message.message_id


async def test_tool_calls(opened: Open) -> None:
    async with opened("tour") as thread:
        await thread.start(input=user("Oslo"))
        [call] = await thread.all(lambda stream: stream.tool_calls)
        assert (call.name, call.input, call.tool_call_id) == ("weather", {"city": "Oslo"}, "call-1")
        output = await thread.value(lambda _: call.output)
        assert output["content"] == "sunny in Oslo"


async def test_a_tool_that_fails(opened: Open) -> None:
    async with opened("tour") as thread:
        await thread.start(input=user("Atlantis"))
        [call] = await thread.all(lambda stream: stream.tool_calls)
        with pytest.raises(RuntimeError, match="no such city"):
            await thread.value(lambda _: call.output)
        with pytest.raises(RuntimeError, match="Run errored: no such city"):
            await thread.output()


async def test_subgraphs(opened: Open) -> None:
    async with opened("tour") as thread:
        await thread.start(input=user("Oslo"))
        [child] = await thread.all(lambda stream: stream.subgraphs)
        assert (child.graph_name, child.status) == ("talk", "completed")
        assert child.path[0] == f"talk:{child.trigger_call_id}"
        [message] = await thread.all(lambda _: child.messages)
        assert await text(message) == SAID


async def test_custom_events_by_name(opened: Open) -> None:
    async with opened("tour") as thread:
        await thread.start(input=user("Oslo"))
        shown = await thread.all(lambda stream: stream.extensions["progress"])
        assert shown == [{"name": "progress", "payload": {"percent": 50}}]


async def test_projections_side_by_side(opened: Open) -> None:
    wanted = ["values", "updates", "checkpoints", "tasks", "messages", "tool_calls", "subgraphs", "progress"]
    async with opened("tour") as thread:
        await thread.start(input=user("Oslo"))
        items = await thread.all(lambda stream: stream.interleave_projections(wanted))
        names = [name for name, _ in items]
        assert set(names) == set(wanted)
        assert [names.count(name) for name in ("checkpoints", "tasks", "tool_calls", "subgraphs")] == [6, 8, 1, 1]


async def test_C23_C24_a_question_and_its_answer(opened: Open) -> None:
    async with opened("ask") as thread:
        await thread.start(input={"question": "Deploy?"})
        await thread.all(lambda stream: stream.values)  # It ends, although the run has not.
        await until_true(lambda: thread.stream.interrupted, "the question is there")
        [question] = thread.stream.interrupts
        assert (question["value"], question["namespace"]) == ({"question": "Deploy?"}, [])
        with pytest.raises(RuntimeError, match="does not match"):
            await thread.respond("yes", interrupt_id="0" * 32)
        await thread.respond("yes")
        assert await thread.output() == {"question": "Deploy?", "answer": "yes"}
        assert not thread.stream.interrupted


async def test_a_question_from_a_graph_inside(opened: Open) -> None:
    async with opened("deep_ask") as thread:
        await thread.start(input={"question": "Deploy?"})
        await until_true(lambda: thread.stream.interrupted, "the question is there")
        await thread.respond("yes", interrupt_id=thread.stream.interrupts[0]["interrupt_id"])
        assert (await thread.output())["answer"] == "yes"


async def test_C47_two_questions(opened: Open) -> None:
    async with opened("ask_twice") as thread:
        await thread.start(input={})
        await until_true(lambda: len(thread.stream.interrupts) == 2, "both questions are there")
        assert sorted(one["value"] for one in thread.stream.interrupts) == ["left", "right"]
        with pytest.raises(RuntimeError, match="ambiguous"):
            await thread.respond("yes")


@pytest.mark.parametrize("by_starting", [False, True], ids=["respond", "start"])
async def test_an_answer_while_the_run_that_asks_goes_on(remote: Sdk, by_starting: bool) -> None:
    async with ThreadStream(remote, "ask_and_work") as thread:
        run_id = await thread.start(input={})
        await until_true(lambda: thread.stream.interrupted, "the question is there")
        if by_starting:
            await thread.start(input="yes")
        else:
            await thread.respond("yes")
        assert (await remote("runs.get", thread.thread_id, run_id))["status"] == "running"
        await remote("store.put_item", ["gates"], key=thread.thread_id, value={})
        assert sorted((await thread.output())["answers"]) == ["left: yes", "worked"]


async def test_C22_a_second_run_on_the_same_stream(opened: Open) -> None:
    async with opened("echo") as thread:
        first = await thread.start(input=user("one"))
        before = await thread.all(everything)
        # Both clients show on an open stream only what arrives after they were asked: asked later, they would miss
        # a run that is quicker than they are.
        async with thread.listening(everything) as heard:
            second = await thread.start(input=user("two"))
        after = await heard
        assert {one["run_id"] for one in data(before, "lifecycle")} == {first}
        assert {one["run_id"] for one in data(after, "lifecycle")} == {second}
        assert after[0]["seq"] == before[-1]["seq"] + 1
        assert [one["content"] for one in data(after, "values")[-1]["messages"]] == ["one", "one", "two", "two"]


async def test_C20_C21_coming_back_to_a_thread(opened: Open, remote: Sdk) -> None:
    async with opened("echo") as thread:
        await thread.start(input=user("one"))
        events = await thread.all(everything)
    async with opened("echo", thread.thread_id) as again:
        assert [one["content"] for one in (await again.output())["messages"]] == ["one", "one"]
        if not remote.blocking:  # The other client subscribes only when it has started a run itself.
            assert await again.all(everything) == events
        tree = await again.tree()
        assert [node["id"] for node in tree["nodes"]] == ["__start__", "reply", "__end__"]
    # A run of the older protocol shows up as well.
    async with opened("echo", thread.thread_id) as again:
        await remote("runs.wait", thread.thread_id, "echo", input=user("two"))
        assert len((await again.output())["messages"]) == 4


async def test_failures(opened: Open) -> None:
    async with opened("boom") as thread:
        await thread.start(input=user("now"))
        with pytest.raises(RuntimeError, match="Run errored: the fuse was lit"):
            await thread.output()
    async with opened("nobody") as thread:
        with pytest.raises(RuntimeError, match="nobody"):
            await thread.start(input={})
    async with opened("echo", str(uuid4())) as thread:
        await thread.start(input=user("hello"))
        assert len((await thread.output())["messages"]) == 2


async def test_C28_a_run_that_is_cancelled(opened: Open, remote: Sdk) -> None:
    async with opened("steps") as thread:
        run_id = await thread.start(input={"hold": "s2"})
        events = []
        async for event in thread.iterate(everything):
            events.append(event)
            if event["method"] == "tasks" and event["params"]["data"]["name"] == "s2":
                await remote("runs.cancel", thread.thread_id, run_id)
            if event["method"] == "lifecycle" and event["params"]["data"]["event"] == "interrupted":
                break
        assert data(events, "values")[-1]["done"] == ["s1"]


# --- broken connections ------------------------------------------------------------------------------------


@pytest.fixture
async def proxy(served: str) -> AsyncIterator[HttpProxy]:
    async with HttpProxy(served) as opened:
        yield opened


@pytest.mark.parametrize("transport", ["sse", "websocket"])
@pytest.mark.parametrize("blocking", [False, True], ids=["async", "sync"])
async def test_a_stream_goes_on_after_its_connection_broke(proxy: HttpProxy, transport: str, blocking: bool) -> None:
    sdk = Sdk(proxy.url, blocking=blocking)
    try:
        async with ThreadStream(sdk, "ticker", transport=transport) as thread:
            await thread.start(input={"count": 30, "pause": 0.05})
            events = []
            async for event in thread.iterate(lambda stream: stream.subscribe(["custom", "values", "lifecycle"])):
                events.append(event)
                if event["params"]["data"] in ({"payload": {"tick": 5}}, {"payload": {"tick": 12}}):
                    proxy.break_all()
            assert proxy.cut == 2
            assert [one["payload"]["tick"] for one in data(events, "custom")] == list(range(1, 31))
            seqs = [event["seq"] for event in events]
            assert seqs == sorted(set(seqs))
            assert (await thread.output())["ticked"] == 30
    finally:
        await sdk.close()


@pytest.mark.filterwarnings("ignore:Request failed, attempting reconnect:UserWarning")
async def test_clients_go_on_when_a_web_process_is_replaced(another_web: tuple[str, Program], served: str) -> None:
    url, program = another_web
    loop, under_way = asyncio.get_running_loop(), asyncio.Semaphore(0)
    given = {"count": 60, "pause": 0.05}

    async def follow_thread(sdk: Sdk, transport: str) -> list[int]:
        ticks: list[int] = []
        async with ThreadStream(sdk, "ticker", transport=transport) as thread:
            await thread.start(input=given)
            async for event in thread.iterate(lambda stream: stream.subscribe(["custom"])):
                ticks.append(event["params"]["data"]["payload"]["tick"])
                if ticks[-1] == 3:
                    under_way.release()
            assert (await thread.output())["ticked"] == 60
        return ticks

    async def follow_run(sdk: Sdk) -> list[int]:
        thread_id, ticks = (await sdk("threads.create"))["thread_id"], []
        async for part in sdk.iterate("runs.stream", thread_id, "ticker", input=given, stream_mode="custom"):
            if part.event == "custom":
                ticks.append(part.data["tick"])
                if ticks[-1] == 3:
                    under_way.release()
        return ticks

    async def wait(sdk: Sdk) -> list[int]:
        def created(_: Any) -> None:
            loop.call_soon_threadsafe(under_way.release)

        values = await sdk("runs.wait", None, "ticker", input=given, on_completion="keep", on_run_created=created)
        return list(range(1, values["ticked"] + 1))

    async with HttpProxy(url) as proxy:
        clients = [Sdk(proxy.url, blocking=blocking) for blocking in (False, True)]
        async with asyncio.TaskGroup() as tasks:
            following = [
                tasks.create_task(follower)
                for sdk in clients
                for follower in (
                    follow_thread(sdk, "sse"),
                    follow_thread(sdk, "websocket"),
                    follow_run(sdk),
                    wait(sdk),
                )
            ]
            for _ in following:
                await under_way.acquire()
            proxy.target = served
            program.process.terminate()
            await asyncio.to_thread(program.wait)
        for sdk in clients:
            await sdk.close()
    for followed in following:
        assert followed.result() == list(range(1, 61))


# --- the older stream of a thread --------------------------------------------------------------------------


async def test_joining_the_stream_of_a_thread(remote: Sdk) -> None:
    thread_id = str((await remote("threads.create"))["thread_id"])
    for text in ("one", "two"):
        await remote("runs.wait", thread_id, "echo", input=user(text))

    async def joined(until_event: int, **options: Any) -> list[Any]:
        found = []
        parts = remote.iterate("threads.join_stream", thread_id, **options)
        async with aclosing(parts):
            async for part in parts:
                found.append(part)
                if len(found) == until_event:
                    break
        return found

    first, second = [run["run_id"] for run in (await remote("runs.list", thread_id))[::-1]]
    whole = await joined(8, last_event_id="-")
    assert [part.event for part in whole] == ["metadata", "values", "values", "metadata"] * 2
    assert [part.data.get("run_id") for part in whole if part.event == "metadata"] == [first, first, second, second]
    assert [part.data["status"] for part in whole[3::4]] == ["run_done", "run_done"]
    assert await joined(4, last_event_id=whole[3].id) == whole[4:]
    lives = await joined(4, last_event_id="-", stream_mode=["lifecycle"])
    assert lives == [part for part in whole if part.event == "metadata"]

    # Without an id it begins with what comes next, so there has to be something until the first of it arrives.
    parts = remote.iterate("threads.join_stream", thread_id, stream_mode=["run_modes", "state_update"])
    async with aclosing(parts), asyncio.TaskGroup() as tasks:
        working = tasks.create_task(keep_running(remote, thread_id))
        seen = set()
        async for part in parts:
            seen.add(part.event)
            if seen == {"metadata", "values", "state_update"}:
                assert part.data["thread_id"] == thread_id or part.event != "state_update"
                break
        working.cancel()


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "sync"])
async def test_a_joined_thread_goes_on_after_its_connection_broke(proxy: HttpProxy, blocking: bool) -> None:
    sdk = Sdk(proxy.url, blocking=blocking)
    try:
        thread_id = str((await sdk("threads.create"))["thread_id"])
        await sdk("runs.create", thread_id, "ticker", input={"count": 20, "pause": 0.05}, stream_mode="custom")
        proxy.cut_at('{"tick":5}')
        parts = sdk.iterate("threads.join_stream", thread_id, last_event_id="-", stream_mode=["run_modes"])
        async with aclosing(parts):
            seen = []
            async for part in parts:
                seen.append(part)
                if part.data.get("status") == "run_done":
                    break
    finally:
        await sdk.close()
    assert proxy.cut == 1
    assert [part.data["tick"] for part in seen if part.event == "custom"] == list(range(1, 21))


async def keep_running(sdk: Sdk, thread_id: str) -> None:
    while True:
        await sdk("runs.wait", thread_id, "echo", input=user("again"))

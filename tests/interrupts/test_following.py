"""A stream that stays open while somebody thinks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
import pytest
from langgraph_sdk import get_client

from holdfast.api.streaming import check_followed
from tests.interrupts.asking import Desk
from tests.support.sse import Frame, frames

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def followed(desk: Desk, path: str, after: str | None = None, **body: Any) -> AsyncGenerator[Frame]:
    headers = {} if after is None else {"last-event-id": after}
    method = "POST" if body else "GET"
    request: dict[str, Any] = {"json": body} if body else {}
    query = {"follow": "true"}
    async with (
        asyncio.timeout(90),
        desk.client.stream(method, path, params=query, headers=headers, **request) as response,
    ):
        assert response.status_code == 200, await response.aread()
        assert "follow=true" in response.headers["location"]
        async for frame in frames(response):
            yield frame


def asks(frame: Frame) -> bool:
    return frame.event == "values" and "__interrupt__" in frame.data


async def test_stream_continues_with_the_resumed_run(desk: Desk) -> None:
    thread_id = await desk.thread()
    seen: list[Frame] = []
    runs: list[str] = []
    async for frame in followed(desk, f"/threads/{thread_id}/runs/stream", assistant_id="twice", input={}):
        seen.append(frame)
        if frame.event == "metadata":
            runs.append(frame.data["run_id"])
        if asks(frame):
            # As a client does that waits for the question to be there.
            await desk.join(thread_id, runs[-1])
            [question] = await desk.inbox(thread_id=thread_id)
            answer = {question["interrupt_id"]: len(runs)}
            await desk.post(f"/threads/{thread_id}/runs", assistant_id="twice", command={"resume": answer})
    assert len(set(runs)) == 3
    assert seen[-1].data == {"answers": [1, 2]}
    ids = [int(frame.id) for frame in seen if frame.id]
    assert ids == sorted(set(ids))
    # From any event on, the same comes again.
    path = f"/threads/{thread_id}/runs/{runs[0]}/stream"
    for cut in (0, len(seen) // 2, len(seen) - 1):
        rest = [frame async for frame in followed(desk, path, after=str(seen[cut].id))]
        assert rest == seen[cut + 1 :]
    assert [frame async for frame in followed(desk, path)] == seen
    assert await desk.get(f"/threads/{thread_id}/runs/{runs[0]}/join", follow="true") == {"answers": [1, 2]}


async def test_stream_continues_with_a_resumed_run_that_is_streamed_itself(desk: Desk) -> None:
    """Whose run is told of before it begins."""
    asked = await desk.ask()
    path = f"/threads/{asked.thread_id}/runs/{asked.run_id}/stream"
    seen: list[Frame] = []
    async for frame in followed(desk, path, after="-"):
        seen.append(frame)
        if asks(frame):
            body = {"assistant_id": "gate", "command": {"resume": {asked.ids[0]: "yes"}}}
            async with desk.client.stream("POST", f"/threads/{asked.thread_id}/runs/stream", json=body) as answering:
                answered = [part async for part in frames(answering)]
    begun = next(place for place, frame in enumerate(seen) if frame.data == answered[0].data)
    assert seen[begun:] == answered
    assert answered[-1].data["answer"] == "yes"
    # And who comes back in between finds the same.
    cut = seen.index(answered[0]) - 1
    assert [frame async for frame in followed(desk, path, after=str(seen[cut].id))] == answered


async def test_with_the_sdk(desk: Desk) -> None:
    asked = await desk.ask()
    sdk = get_client(url=f"http://127.0.0.1:{desk.settings.port}")
    seen = []
    try:
        async for part in sdk.runs.join_stream(
            asked.thread_id, asked.run_id, params={"follow": "true"}, last_event_id="-1"
        ):
            seen.append(part)
            if part.event == "values" and "__interrupt__" in part.data:
                await sdk.runs.create(asked.thread_id, "gate", command={"resume": {asked.ids[0]: "yes"}})
    finally:
        await sdk.aclose()
    assert [part.data["answer"] for part in seen if part.event == "values" and part.data.get("answer")][-1] == "yes"
    assert len({part.data["run_id"] for part in seen if part.event == "metadata"}) == 2


async def test_stream_of_a_waiting_thread_sends_heartbeats_and_can_be_rejoined(desk: Desk) -> None:
    asked = await desk.ask()
    path = f"{asked.path}/stream"
    last = None
    async with desk.client.stream("GET", path, params={"follow": "true"}) as response:
        beats = 0
        async for line in response.aiter_lines():
            if line.startswith("id:"):
                last = line.split(":")[1].strip()
            beats += line.startswith(": heartbeat")
            if beats == 3:
                break
    assert last is not None

    async def rest() -> list[Frame]:
        async with aclosing(followed(desk, path, after=last)) as stream:
            return [frame async for frame in stream]

    waiting = asyncio.create_task(rest())
    run = await desk.post(f"{asked.path}/resume", answer="yes")
    found = await waiting
    assert found[0].data["run_id"] == run["run_id"]
    assert found[-1].data["answer"] == "yes"


async def test_without_it_the_stream_ends_with_the_run(desk: Desk) -> None:
    asked = await desk.ask()
    response = await desk.client.get(f"{asked.path}/stream")
    assert "__interrupt__" in response.text


async def test_stream_ends_when_another_run_continues_the_thread(desk: Desk) -> None:
    asked = await desk.ask("picky")
    waiting = asyncio.create_task(desk.get(f"{asked.path}/join", follow="true"))
    await desk.post(f"/threads/{asked.thread_id}/runs/wait", assistant_id="picky", input={"answer": None})
    assert "__interrupt__" in await waiting
    other = await desk.ask("picky")
    waiting = asyncio.create_task(desk.get(f"{other.path}/join", follow="true"))
    await desk.client.delete(f"/threads/{other.thread_id}")
    assert await waiting == {}


async def test_an_answer_that_is_rolled_back_leaves_it_waiting(desk: Desk) -> None:
    asked = await desk.ask(input={"seconds": 60})
    waiting = asyncio.create_task(desk.get(f"{asked.path}/join", follow="true"))
    first = await desk.answer(asked.thread_id, "yes", stream_mode="updates")
    path = f"/threads/{asked.thread_id}/runs/{first['run_id']}"
    async with desk.client.stream("GET", f"{path}/stream") as response:
        async for line in response.aiter_lines():
            if line.startswith("event: updates"):
                break
    await desk.client.post(f"{path}/cancel", params={"action": "rollback", "wait": "true"})
    command = {"resume": {asked.ids[0]: "no"}, "update": {"seconds": 0}}
    await desk.post(f"/threads/{asked.thread_id}/runs", assistant_id="gate", command=command)
    assert (await waiting)["answer"] == "no"


async def test_stream_of_a_waiting_run_with_expired_events(desk: Desk) -> None:
    asked = await desk.ask()
    [last] = await desk.rows("SELECT last_seq FROM thread WHERE thread_id = %(id)s", id=asked.thread_id)
    await desk.rows("DELETE FROM event WHERE thread_id = %(id)s RETURNING 1", id=asked.thread_id)
    await desk.rows("UPDATE run SET first_seq = NULL WHERE run_id = %(id)s RETURNING 1", id=asked.run_id)
    gone = await desk.client.get(f"{asked.path}/stream", params={"follow": "true"}, headers={"last-event-id": "1"})
    assert gone.status_code == 410
    cursor = {"last-event-id": str(last["last_seq"])}
    async with (
        asyncio.timeout(90),
        desk.client.stream("GET", f"{asked.path}/stream", params={"follow": "true"}, headers=cursor) as response,
    ):
        lines = response.aiter_lines()
        async for line in lines:
            if line.startswith(": heartbeat"):
                break  # It waits.
        await desk.answer(asked.thread_id, "yes")
        told = [orjson.loads(line[6:]) async for line in lines if line.startswith("data: ")]
    assert told[-1]["answer"] == "yes"


async def test_an_answer_that_comes_while_the_stream_of_such_a_pause_begins(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = await desk.ask()
    [last] = await desk.rows("SELECT last_seq FROM thread WHERE thread_id = %(id)s", id=asked.thread_id)
    await desk.rows("DELETE FROM event WHERE thread_id = %(id)s RETURNING 1", id=asked.thread_id)
    await desk.rows("UPDATE run SET first_seq = NULL WHERE run_id = %(id)s RETURNING 1", id=asked.run_id)

    async def answered(*arguments: Any) -> None:
        await check_followed(*arguments)
        run = await desk.answer(asked.thread_id, "yes")
        await desk.join(asked.thread_id, run["run_id"])

    monkeypatch.setattr("holdfast.api.runs.check_followed", answered)
    seen = [frame async for frame in followed(desk, f"{asked.path}/stream", after=str(last["last_seq"]))]
    assert seen[-1].data["answer"] == "yes"

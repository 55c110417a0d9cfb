"""C30 to C33, C43: joining and resuming a run's stream, and its signs of life."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import httpx
import pytest

from tests.conformance.calls import (
    AT_ONCE,
    HELLO,
    STEPS,
    names,
    new_thread,
    ok,
    running,
    start_run,
    status_of,
    stream,
    stream_run,
)
from tests.support.sse import frames

HEARTBEAT = b": heartbeat\r\n"


async def test_c30_joining_a_run_that_waits(client: httpx.AsyncClient, thread_id: str) -> None:
    first = await running(client, thread_id)
    path = await start_run(client, thread_id, "slow", input=AT_ONCE)
    async with client.stream("GET", f"{path}/stream") as events, client.stream("GET", f"{path}/join") as joined:
        assert (events.status_code, joined.status_code) == (200, 200)
        assert (events.headers["content-location"], events.headers["location"]) == (path, f"{path}/stream")
        assert (joined.headers["content-location"], joined.headers["location"]) == (path, f"{path}/join")
        assert await status_of(client, path) == "pending"
        await ok(client.post(f"{first}/cancel"), 202)
        seen = [frame async for frame in frames(events)]
        await joined.aread()
    assert joined.json()["done"] == STEPS
    assert names(seen) == ["metadata", *["values"] * 4]
    assert seen[0].data == {"run_id": path.rsplit("/", 1)[1], "attempt": 1}
    assert seen[-1].data["done"] == STEPS


@pytest.mark.parametrize("resumable", [True, False])
async def test_c31_rejoining_a_stream(client: httpx.AsyncClient, thread_id: str, resumable: bool) -> None:
    headers, events = await stream_run(
        client, thread_id, "slow", input=AT_ONCE, stream_mode=["values", "updates"], stream_resumable=resumable
    )
    assert len(events) == 8
    for beginning in ("-1", "-", "0"):
        assert (await stream(client, "GET", headers["location"], headers={"Last-Event-ID": beginning}))[1] == events
    for position, event in enumerate(events):
        last = {"Last-Event-ID": str(event.id)}
        assert (await stream(client, "GET", headers["location"], headers=last))[1] == events[position + 1 :]


async def test_c31_rejoining_a_live_stream(client: httpx.AsyncClient, thread_id: str) -> None:
    body = {"assistant_id": "slow", "input": {"seconds": 0.3}, "stream_resumable": True}
    async with client.stream("POST", f"/threads/{thread_id}/runs/stream", json=body) as response:
        location = response.headers["location"]
        first = await anext(frames(response))
    _, rest = await stream(client, "GET", location, headers={"Last-Event-ID": str(first.id)})
    _, whole = await stream(client, "GET", location, headers={"Last-Event-ID": "-1"})
    assert [first, *rest] == whole
    assert whole[-1].data["done"] == STEPS


async def test_c32_ids_increase(client: httpx.AsyncClient, thread_id: str) -> None:
    modes = ["values", "updates", "messages-tuple", "tasks", "checkpoints", "debug"]
    ids = []
    for _ in range(2):
        _, events = await stream_run(client, thread_id, "llm", input=HELLO, stream_mode=modes, stream_resumable=True)
        assert len(events) > 10
        ids += [event.id for event in events]
    assert None not in ids
    assert all(earlier < later for earlier, later in pairwise(number for number in ids if number is not None))


@pytest.mark.parametrize(
    "query",
    ["stream_mode=values&stream_mode=updates", "stream_mode=values,updates", 'stream_mode=["values","updates"]'],
)
async def test_c33_joining_with_several_modes(client: httpx.AsyncClient, thread_id: str, query: str) -> None:
    modes = ["values", "updates", "tasks"]
    headers, events = await stream_run(client, thread_id, "slow", input=AT_ONCE, stream_mode=modes)
    assert {"values", "updates", "tasks"} <= set(names(events))
    _, joined = await stream(client, "GET", f"{headers['location']}?{query}")
    assert joined == [event for event in events if event.event in ("values", "updates")]


async def test_c43_signs_of_life(client: httpx.AsyncClient) -> None:
    """Three steps of six seconds: heartbeats keep their own pace, whatever comes in between."""
    body = {"assistant_id": "slow", "input": {"seconds": 6}}

    async def read(way: str) -> tuple[bytes, float]:
        began = time.monotonic()
        path = f"/threads/{await new_thread(client)}/runs/{way}"
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            return b"".join([chunk async for chunk in response.aiter_raw()]), time.monotonic() - began

    (streamed, streaming), (waited, waiting) = await asyncio.gather(read("stream"), read("wait"))
    beats = streamed.count(HEARTBEAT)
    # 18 s have three full intervals of 5 s, of which a process that stands still for a moment may miss one; and no more
    # than one beat an interval can have come.
    assert 2 <= beats <= streaming / 5, streamed
    assert streamed.index(HEARTBEAT) < streamed.rindex(b"event: values")
    newlines = len(waited) - len(waited.lstrip(b"\n"))
    assert 2 <= newlines <= waiting / 5, waited
    assert waited.lstrip(b"\n").startswith(b"{")

"""A cursor that a thread has never given out: its sender begins at the beginning, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from holdfast.settings import Settings
from tests.support.sse import frames
from tests.support.threads import made, ran

# The largest that is taken for a number of this server, in a header and in a body.
IN_HEADER, IN_BODY = 10**12 - 1, 2**53
# Numbers of the events of the thread before the second run. The first is the thread's first.
FIRST_RUN = 8


@asynccontextmanager
async def watching(
    kind: str, client: httpx.AsyncClient, settings: Settings, thread_id: str, run_id: str
) -> AsyncIterator[AsyncIterator[int]]:
    """The numbers of the events that a client with such a cursor is sent."""
    given: dict[str, Any] = {"headers": {"last-event-id": str(IN_HEADER)}}
    match kind:
        case "socket":
            async with connect(f"ws://127.0.0.1:{settings.port}/threads/{thread_id}/stream/events") as socket:
                params = {"channels": ["values", "lifecycle"], "since": IN_BODY}
                await socket.send(json.dumps({"id": 1, "method": "subscription.subscribe", "params": params}))

                async def numbers() -> AsyncIterator[int]:
                    async for message in socket:
                        if "seq" in (shown := json.loads(message)):
                            yield shown["seq"]

                yield numbers()
            return
        case "run":
            method, path = "GET", f"/threads/{thread_id}/runs/{run_id}/stream"
        case "run by id":
            method, path = "GET", f"/runs/{run_id}/stream"
        case "followed run":
            method, path = "GET", f"/threads/{thread_id}/runs/{run_id}/stream?follow=true"
        case "thread":
            method, path = "GET", f"/threads/{thread_id}/stream"
        case _:
            method, path = "POST", f"/threads/{thread_id}/stream/events"
            given = {"json": {"channels": ["values", "lifecycle"], "since": IN_BODY}}
    async with client.stream(method, path, **given) as response:
        assert response.status_code == 200, await response.aread()

        async def ids() -> AsyncIterator[int]:
            async for frame in frames(response):
                if frame.id is not None:
                    yield frame.id

        yield ids()


@pytest.mark.parametrize("kind", ["run", "run by id", "followed run", "thread", "events", "socket"])
async def test_cursor_beyond_the_log_hides_no_event_from_others(
    client: httpx.AsyncClient, settings: Settings, kind: str
) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    body = {"assistant_id": "steps", "input": {"seconds": 0.7}}
    run_id = (await client.post(f"/threads/{thread_id}/runs", json=body)).json()["run_id"]
    async with asyncio.timeout(60), watching(kind, client, settings, thread_id, run_id) as numbers:
        # Another watcher, of what is still to come.
        async with client.stream("GET", f"/threads/{thread_id}/runs/{run_id}/stream") as response:
            others = [frame.id async for frame in frames(response) if frame.id is not None]
        assert others == list(range(FIRST_RUN + 1, FIRST_RUN + 1 + len(others)))
        assert len(others) == 7
        first = await anext(numbers)
        assert first == (FIRST_RUN + 1 if "run" in kind else 1 if kind == "thread" else first)
        assert first <= FIRST_RUN + 1

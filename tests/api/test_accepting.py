"""A run that is streamed is told of by the transaction that creates it, before anybody works on it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import httpx
import pytest

from holdfast.errors import Conflict
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES, working
from tests.support.sse import Frame, frames
from tests.support.waiting import until

STEPS = {"assistant_id": "steps", "input": {"seconds": 0}}


async def new_thread(client: httpx.AsyncClient) -> str:
    thread_id: str = (await client.post("/threads", json={})).json()["thread_id"]
    return thread_id


async def replay(client: httpx.AsyncClient, path: str, **headers: str) -> list[Frame]:
    async with client.stream("GET", path, headers=headers) as response:
        return [frame async for frame in frames(response)]


async def told(client: httpx.AsyncClient, thread_id: str, number: int = 0) -> list[Any]:
    """What the thread-centric protocol tells, until there are so many, and for a second more."""
    told: list[Any] = []
    enough = asyncio.Event()

    async def listen(response: httpx.Response) -> None:
        async for frame in frames(response):
            told.append(frame.data["params"]["data"]["event"])
            if len(told) == number:
                enough.set()

    body = {"channels": ["lifecycle"], "since": 0}
    async with client.stream("POST", f"/threads/{thread_id}/stream/events", json=body) as response:
        listening = asyncio.create_task(listen(response))
        if number:
            await asyncio.wait_for(enough.wait(), 60)
        with suppress(TimeoutError):
            await asyncio.wait_for(listening, 1.0)
    return told


async def test_stream_begins_before_a_worker_claims_the_run(web: httpx.AsyncClient, settings: Settings) -> None:
    thread_id = await new_thread(web)
    async with web.stream("POST", f"/threads/{thread_id}/runs/stream", json=STEPS) as response:
        coming = frames(response)
        first = await anext(coming)
        place = response.headers["content-location"]
        assert first == Frame("metadata", {"run_id": place.rpartition("/")[2], "attempt": 1}, 1)
        assert (await web.get(place)).json()["status"] == "pending"
        # To those who look at the thread it does not run yet.
        assert await told(web, thread_id) == []
        async with working(settings):
            rest = [frame async for frame in coming]
    # Of the attempt that has begun since nobody is told twice; and everybody is told the same.
    assert [frame.event for frame in rest if frame.event == "metadata"] == []
    assert rest[-1].data["done"]
    assert await replay(web, f"{place}/stream", **{"last-event-id": "-"}) == [first, *rest]
    assert await replay(web, f"{place}/stream", **{"last-event-id": "1"}) == rest
    assert await told(web, thread_id, 2) == ["running", "completed"]


async def test_watchers_on_other_processes_are_notified_at_once(web: httpx.AsyncClient, settings: Settings) -> None:
    """Not only by a poll."""
    thread_id = await new_thread(web)
    patient = settings.model_copy(update={"poll_interval": 300.0, "port": free_port()})
    modes = {"stream_mode": "lifecycle"}
    async with (
        answering(patient, GraphCatalog.load(load_config(EXAMPLES))) as elsewhere,
        elsewhere.stream("GET", f"/threads/{thread_id}/stream", params=modes) as watching,
    ):
        async with web.stream("POST", f"/threads/{thread_id}/runs/stream", json=STEPS) as response:
            run_id = response.headers["content-location"].rpartition("/")[2]
        async with asyncio.timeout(60):
            assert (await anext(frames(watching))).data == {"run_id": run_id, "attempt": 1}


async def test_run_whose_transaction_fails_is_not_announced(
    web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key more is committed than the run."""

    async def fails(*_: Any) -> None:
        raise Conflict("not now")

    thread_id = await new_thread(web)
    modes = {"stream_mode": "lifecycle"}
    async with web.stream("GET", f"/threads/{thread_id}/stream", params=modes) as watching:
        with monkeypatch.context() as patched:
            patched.setattr("holdfast.api.idempotency.keep_answer", fails)
            key = {"Idempotency-Key": "once"}
            failed = await web.post(f"/threads/{thread_id}/runs/stream", json=STEPS, headers=key)
            assert failed.status_code == 409
        async with web.stream("POST", f"/threads/{thread_id}/runs/stream", json=STEPS, headers=key) as response:
            first = await anext(frames(response))
        assert first.id == 1
        assert await anext(frames(watching)) == first


async def test_queued_run_sends_no_event(web: httpx.AsyncClient, settings: Settings) -> None:
    """The numbers of a thread are given out by whoever runs in it."""
    thread_id = await new_thread(web)
    first = (await web.post(f"/threads/{thread_id}/runs", json=STEPS)).json()["run_id"]
    async with web.stream("POST", f"/threads/{thread_id}/runs/stream", json=STEPS) as response:
        place = response.headers["content-location"]
        async with working(settings):
            seen = [frame async for frame in frames(response)]
    before = await replay(web, f"/threads/{thread_id}/runs/{first}/stream", **{"last-event-id": "-"})
    assert (seen[0].event, seen[0].data["attempt"]) == ("metadata", 1)
    assert [frame.event for frame in seen].count("metadata") == 1
    assert (before[-1].id or 0) < (seen[0].id or 0)
    assert await replay(web, f"{place}/stream", **{"last-event-id": "-"}) == seen


async def test_delayed_run_sends_no_event(web: httpx.AsyncClient, settings: Settings) -> None:
    """Others of its thread may come before it."""
    thread_id = await new_thread(web)
    later = {**STEPS, "after_seconds": 3600}
    async with web.stream("POST", f"/threads/{thread_id}/runs/stream", json=later) as response:
        place = response.headers["content-location"]
    async with working(settings), web.stream("POST", f"/threads/{thread_id}/runs/stream", json=STEPS) as response:
        assert (await anext(frames(response))).id == 1
    await web.post(f"{place}/cancel")
    assert await replay(web, f"{place}/stream", **{"last-event-id": "-"}) == []


async def test_a_run_that_is_cancelled_before_it_begins_ends_its_stream(web: httpx.AsyncClient) -> None:
    thread_id = await new_thread(web)
    async with web.stream("POST", f"/threads/{thread_id}/runs/stream", json=STEPS) as response:
        coming = frames(response)
        first = await anext(coming)
        place = response.headers["content-location"]
        await web.post(f"{place}/cancel")
        assert [frame async for frame in coming] == []
    assert (await web.get(place)).json()["status"] == "interrupted"
    assert await replay(web, f"{place}/stream", **{"last-event-id": "-"}) == [first]
    # The next run of the thread goes on with the numbers.
    async with web.stream("POST", f"/threads/{thread_id}/runs/stream", json=STEPS) as response:
        following = await anext(frames(response))
    assert (following.id or 0) > 1


async def test_a_run_that_is_rolled_back_before_it_begins_leaves_its_number(web: httpx.AsyncClient) -> None:
    thread_id = await new_thread(web)
    async with web.stream("POST", f"/threads/{thread_id}/runs/stream", json=STEPS) as response:
        place = response.headers["content-location"]
        await web.post(f"{place}/cancel", params={"action": "rollback"})

    async def gone() -> bool:
        return (await web.get(place)).status_code == 404

    await until(gone, "it is rolled back")
    async with web.stream("POST", f"/threads/{thread_id}/runs/stream", json=STEPS) as response:
        assert ((await anext(frames(response))).id or 0) > 1


async def test_a_stateless_stream_begins_at_once_too(web: httpx.AsyncClient) -> None:
    async with web.stream("POST", "/runs/stream", json=STEPS) as response:
        assert (await anext(frames(response))).data["attempt"] == 1

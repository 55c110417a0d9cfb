"""The stream of a thread: one run after the other, in v1 shapes, and never at an end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
import pytest
from langgraph_sdk import get_client

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.support.serving import serving
from tests.support.smoke import EXAMPLES
from tests.support.sse import Frame, frames
from tests.support.threads import made, ran
from tests.support.waiting import until_true

ZERO = {"seconds": 0}
RUN = ["metadata", *["values"] * 6]
DONE = [*RUN, "metadata"]


@asynccontextmanager
async def watching(
    client: httpx.AsyncClient, thread_id: str, query: str = "", last: str | None = None
) -> AsyncIterator[AsyncIterator[Frame]]:
    given = {} if last is None else {"Last-Event-ID": last}
    async with client.stream("GET", f"/threads/{thread_id}/stream{query}", headers=given) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-store"
        yield frames(response)


async def take(stream: AsyncIterator[Frame], count: int) -> list[Frame]:
    async with asyncio.timeout(60):
        return [await anext(stream) for _ in range(count)]


async def replay(client: httpx.AsyncClient, thread_id: str, count: int, query: str = "", last: str = "-") -> Any:
    async with watching(client, thread_id, query, last) as stream:
        return await take(stream, count)


def names(events: list[Frame]) -> list[str]:
    return [event.event for event in events]


async def run_ids(client: httpx.AsyncClient, thread_id: str) -> list[str]:
    """Oldest first."""
    return [run["run_id"] for run in reversed((await client.get(f"/threads/{thread_id}/runs")).json())]


async def test_thread_stream_continues_with_the_next_run(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    async with watching(client, thread_id) as stream:
        await ran(client, thread_id)
        first = await take(stream, len(DONE))
        await ran(client, thread_id)
        second = await take(stream, len(DONE))
    one, two = await run_ids(client, thread_id)
    assert names(first) == names(second) == DONE
    assert first[0].data == {"run_id": one, "attempt": 1}
    assert first[-1].data == {"status": "run_done", "run_id": one}
    assert second[0].data == {"run_id": two, "attempt": 1}
    assert second[-1].data == {"status": "run_done", "run_id": two}
    ids = [event.id for event in [*first, *second]]
    assert ids == list(range(1, len(ids) + 1))
    # The same frames, under the same ids, as the run's own stream has.
    async with client.stream("GET", f"/threads/{thread_id}/runs/{two}/stream") as response:
        assert [frame async for frame in frames(response)] == second[:-1]


async def test_thread_stream_without_an_id_begins_with_new_events(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    async with watching(client, thread_id) as stream:
        await ran(client, thread_id)
        [event] = await take(stream, 1)
    assert event.data["run_id"] == (await run_ids(client, thread_id))[1]


async def test_thread_stream_resumes_strictly_after_any_event(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    await ran(client, thread_id)
    count = 2 * len(DONE)
    whole = await replay(client, thread_id, count)
    for beginning in ("-1", "0"):
        assert await replay(client, thread_id, count, last=beginning) == whole
    for place in (0, len(DONE) - 1, len(DONE), count - 2):
        assert await replay(client, thread_id, count - place - 1, last=str(whole[place].id)) == whole[place + 1 :]


async def test_last_event_id_of_another_server_means_the_beginning(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    whole = await replay(client, thread_id, len(DONE))
    for foreign in ("1763190000000-0", "1763190000000", "soon", "1.5", "-7", "9" * 30, "1763_1"):
        assert await replay(client, thread_id, len(DONE), last=foreign) == whole


async def test_lifecycle_mode_sends_only_the_lifecycle_of_runs(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    failed = await ran(client, thread_id, input={"seconds": "soon"})
    assert failed["__error__"]
    one, two = await run_ids(client, thread_id)
    events = await replay(client, thread_id, 4, "?stream_mode=lifecycle")
    assert names(events) == ["metadata"] * 4
    assert [(event.data["run_id"], event.data.get("status")) for event in events] == [
        (one, None),
        (one, "run_done"),
        (two, None),
        (two, "run_done"),
    ]


async def test_a_run_that_fails_or_is_rolled_back_is_done_too(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    async with watching(client, thread_id) as stream:
        await ran(client, thread_id, input={"seconds": "soon"})
        failed = await take(stream, 4)
        assert names(failed) == ["metadata", "values", "error", "metadata"]
        run = (
            await client.post(f"/threads/{thread_id}/runs", json={"assistant_id": "steps", "input": {"seconds": 3600}})
        ).json()
        await take(stream, 2)
        cancelled = await client.post(f"/threads/{thread_id}/runs/{run['run_id']}/cancel?action=rollback&wait=1")
        assert cancelled.json() == {}
        [done] = await take(stream, 1)
    assert done.data == {"status": "run_done", "run_id": run["run_id"]}


async def test_the_state_comes_when_a_run_ends_and_when_it_is_updated(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    async with watching(client, thread_id, "?stream_mode=state_update") as stream:
        await ran(client, thread_id)
        [ended] = await take(stream, 1)
        state = (await client.get(f"/threads/{thread_id}/state")).json()
        assert ended.event == "state_update"
        assert ended.data == {"state": state, "thread_id": thread_id}
        update = {"values": {"done": ["by hand"]}, "as_node": "s5"}
        await client.post(f"/threads/{thread_id}/state", json=update)
        [updated] = await take(stream, 1)
        assert updated.data["state"]["values"]["done"][-1] == "by hand"
        assert updated.data["state"] == (await client.get(f"/threads/{thread_id}/state")).json()
        # Going on from there: nothing has been missed but perhaps a state, so that comes first.
        assert await replay(client, thread_id, 1, "?stream_mode=state_update", str(updated.id)) == [updated]


async def test_the_state_goes_back_when_a_run_is_rolled_back(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    before = (await client.get(f"/threads/{thread_id}/state")).json()
    async with watching(client, thread_id, "?stream_mode=state_update,lifecycle") as stream:
        body = {"assistant_id": "steps", "input": {"seconds": 3600}}
        run = (await client.post(f"/threads/{thread_id}/runs", json=body)).json()
        await take(stream, 1)
        await client.post(f"/threads/{thread_id}/runs/{run['run_id']}/cancel?action=rollback")
        # In either order: a heartbeat may show the state before the event of the end arrives.
        ended = {event.event: event.data for event in await take(stream, 2)}
    assert ended["metadata"]["status"] == "run_done"
    assert ended["state_update"]["state"] == before


@pytest.mark.parametrize(
    "query",
    [
        "stream_mode=run_modes&stream_mode=state_update",
        "stream_modes=run_modes,state_update",
        'stream_mode=["run_modes","state_update"]',
        "stream_modes=run_modes&stream_mode=state_update,lifecycle",
    ],
)
async def test_thread_stream_takes_modes_in_every_spelling(client: httpx.AsyncClient, query: str) -> None:
    thread_id = await made(client)
    async with watching(client, thread_id, f"?{query}") as stream:
        await ran(client, thread_id)
        events = await take(stream, len(DONE) + 1)
    # A heartbeat looks at the state too. The end of a run commits its state and its last events together, so on a busy
    # machine the heartbeat shows the state before the events arrive: nothing is promised about their order.
    [state] = [event for event in events if event.event == "state_update"]
    events.remove(state)
    assert names(events) == DONE
    assert state.data["state"] == (await client.get(f"/threads/{thread_id}/state")).json()


async def test_thread_stream_refuses_bad_queries(web: httpx.AsyncClient) -> None:
    assert (await web.get(f"/threads/{uuid4()}/stream")).status_code == 404
    path = f"/threads/{await made(web)}/stream"
    for query in ("stream_mode=values", "stream_modes=run_modes,noise", "stream_mode=[", "stream_mode=[1]"):
        response = await web.get(f"{path}?{query}")
        assert response.status_code == 422, query
        assert isinstance(response.json()["detail"], str)


async def test_thread_stream_sends_heartbeats_and_ends_with_its_thread(web: httpx.AsyncClient) -> None:
    thread_id = await made(web)
    for mode in ("run_modes", "state_update"):
        seen = b""
        async with (
            asyncio.timeout(60),
            web.stream("GET", f"/threads/{thread_id}/stream?stream_mode={mode}") as response,
        ):
            async for chunk in response.aiter_raw():
                seen += chunk
                if len(seen) >= len(b": heartbeat\r\n" * 3):
                    break
        assert set(seen.split(b"\r\n")) == {b": heartbeat", b""}
    async with asyncio.timeout(60), web.stream("GET", f"/threads/{thread_id}/stream") as response:
        await web.delete(f"/threads/{thread_id}")
        rest = b"".join([chunk async for chunk in response.aiter_raw()])
    assert set(rest.split(b"\r\n")) <= {b": heartbeat", b""}


async def test_thread_stream_sends_changes_outside_the_log_at_once(settings: Settings) -> None:
    """Without waiting for the next sign of life, which here never comes."""
    slow = settings.model_copy(update={"stream_heartbeat": 3600.0})
    async with serving(slow, GraphCatalog.load(load_config(EXAMPLES))) as client:
        thread_id = await made(client)
        await ran(client, thread_id)
        async with watching(client, thread_id, "?stream_mode=state_update", "-") as stream:
            await take(stream, 1)  # The present state: from here on it is watched.
            update = {"values": {"done": ["by hand"]}, "as_node": "s5"}
            for _ in range(2):
                await client.post(f"/threads/{thread_id}/state", json=update)
                [updated] = await take(stream, 1)
                assert updated.data["state"]["values"]["done"][-1] == "by hand"
            await client.delete(f"/threads/{thread_id}")
            async with asyncio.timeout(60):
                assert [event async for event in stream] == []


async def test_thread_stream_ends_with_the_thread_of_a_stateless_run(client: httpx.AsyncClient) -> None:
    run = (await client.post("/runs", json={"assistant_id": "steps", "input": {"seconds": 1}})).json()
    async with watching(client, run["thread_id"], last="-") as stream:
        async with asyncio.timeout(60):
            events = [event async for event in stream]
    assert names(events) == DONE


async def test_the_sdk_goes_on_where_it_was_when_the_server_is_restarted(settings: Settings) -> None:
    catalog = GraphCatalog.load(load_config(EXAMPLES))
    seen: list[Any] = []
    sdk = get_client(url=f"http://127.0.0.1:{settings.port}")

    async def watch(thread_id: str) -> None:
        async for part in await sdk.threads.join_stream(thread_id, last_event_id="-"):
            seen.append(part)  # noqa: PERF401 (to be seen one by one)

    async with serving(settings, catalog) as client:
        thread_id = await made(client)
        await ran(client, thread_id)
        watcher = asyncio.create_task(watch(thread_id))
        await until_true(lambda: len(seen) == len(DONE), "the first run")
    async with serving(settings, catalog) as client:
        await ran(client, thread_id)
        await until_true(lambda: len(seen) >= 2 * len(DONE), "the second run")
        watcher.cancel()
        await asyncio.wait({watcher})
    await sdk.aclose()
    assert [part.event for part in seen] == DONE * 2
    assert [part.id for part in seen] == [str(number) for number in range(1, len(seen) + 1)]


async def test_a_run_of_the_thread_centric_protocol_is_seen_too(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    async with watching(client, thread_id) as stream:
        params = {"assistant_id": "ask", "input": {}}
        await client.post(f"/threads/{thread_id}/commands", json={"id": 1, "method": "run.start", "params": params})
        events: list[Frame] = []
        while not events or "status" not in events[-1].data:
            events += await take(stream, 1)
    seen = set(names(events))
    assert {"metadata", "values", "updates"} <= seen
    assert not seen & {"end", "output", "lifecycle", "checkpoint", "input.requested"}


async def test_sdk_reads_thread_stream(client: httpx.AsyncClient, settings: Settings) -> None:
    sdk = get_client(url=f"http://127.0.0.1:{settings.port}")
    try:
        thread_id = (await sdk.threads.create())["thread_id"]
        await sdk.runs.wait(thread_id, "steps", input=ZERO)
        seen: list[Any] = []
        async with asyncio.timeout(60):
            async for part in await sdk.threads.join_stream(
                thread_id, last_event_id="-", stream_mode=["run_modes", "state_update"]
            ):
                seen.append(part)
                if len(seen) == len(DONE) + 1:
                    break
        assert sorted(part.event for part in seen) == sorted([*DONE, "state_update"])
        assert seen[-1].id == str(len(DONE))
    finally:
        await sdk.aclose()

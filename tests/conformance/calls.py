"""What the checks do again and again, in the words of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid5

import httpx

from tests.support.sse import Frame, frames
from tests.support.waiting import until

PATIENCE = 60.0
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
STEPS = ["s1", "s2", "s3"]
FOREVER = {"seconds": 3600}
AT_ONCE = {"seconds": 0}
CHANNELS = ["values", "updates", "messages", "tools", "lifecycle", "input", "checkpoints", "tasks", "custom"]

Event = dict[str, Any]


def system_assistant(graph_id: str) -> str:
    """The id of a graph's own assistant. Clients hard-code these; here they are computed apart from the server."""
    return str(uuid5(UUID("6ba7b821-9dad-11d1-80b4-00c04fd430c8"), graph_id))


async def no_fault_of_the_server(response: httpx.Response) -> None:
    """For every client's hooks: no check expects a 5xx, and clients repeat the request that gets one."""
    assert response.status_code < 500, await response.aread()


async def ok(response: Awaitable[httpx.Response], status: int = 200) -> Any:
    """The JSON of an answer that has this status; None without a body."""
    answer = await response
    assert answer.status_code == status, f"{answer.status_code}: {answer.text}"
    return answer.json() if answer.content else None


async def refused(response: Awaitable[httpx.Response], status: int) -> str:
    """The detail of an error, which is always a string."""
    detail = (await ok(response, status))["detail"]
    assert isinstance(detail, str), detail
    assert detail
    return detail


async def new_thread(client: httpx.AsyncClient, **body: Any) -> str:
    identity: str = (await ok(client.post("/threads", json=body)))["thread_id"]
    return identity


async def stream(
    client: httpx.AsyncClient, method: str, path: str, **request: Any
) -> tuple[httpx.Headers, list[Frame]]:
    """A v1 stream, read until the server closes it."""
    async with asyncio.timeout(PATIENCE), client.stream(method, path, **request) as response:
        assert response.status_code == 200, await response.aread()
        return response.headers, [frame async for frame in frames(response)]


async def stream_run(
    client: httpx.AsyncClient, thread_id: str, assistant: str, **body: Any
) -> tuple[httpx.Headers, list[Frame]]:
    return await stream(client, "POST", f"/threads/{thread_id}/runs/stream", json={"assistant_id": assistant, **body})


async def wait_run(client: httpx.AsyncClient, thread_id: str, assistant: str, **body: Any) -> Any:
    return await ok(client.post(f"/threads/{thread_id}/runs/wait", json={"assistant_id": assistant, **body}))


async def start_run(client: httpx.AsyncClient, thread_id: str, assistant: str, **body: Any) -> str:
    """Create a run and return its path."""
    run = await ok(client.post(f"/threads/{thread_id}/runs", json={"assistant_id": assistant, **body}))
    return f"/threads/{thread_id}/runs/{run['run_id']}"


async def status_of(client: httpx.AsyncClient, path: str) -> str:
    """The status of a run or a thread."""
    status: str = (await ok(client.get(path)))["status"]
    return status


async def until_status(client: httpx.AsyncClient, path: str, status: str) -> dict[str, Any]:
    """The run or thread at `path`, once it has this status."""

    async def reached() -> dict[str, Any] | None:
        found: dict[str, Any] = await ok(client.get(path))
        return found if found["status"] == status else None

    found = await until(reached, f"{path} is {status}", patience=PATIENCE)
    assert found is not None
    return found


async def until_gone(client: httpx.AsyncClient, path: str) -> None:
    async def gone() -> bool:
        return (await client.get(path)).status_code == 404

    await until(gone, f"{path} is gone", patience=PATIENCE)


async def running(client: httpx.AsyncClient, thread_id: str) -> str:
    """The path of a run that is under way in its first step, and would go on for hours."""
    path = await start_run(client, thread_id, "slow", input=FOREVER)
    await until_status(client, path, "running")

    async def first_step_has_begun() -> bool:
        state = await ok(client.get(f"/threads/{thread_id}/state"))
        return state["next"] == ["s1"] and path.endswith(str(state["metadata"]["run_id"]))

    await until(first_step_has_begun, "the input is a checkpoint", patience=PATIENCE)
    return path


async def history_of(client: httpx.AsyncClient, thread_id: str, limit: int = 100) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = await ok(client.post(f"/threads/{thread_id}/history", json={"limit": limit}))
    return states


def names(frames: Iterable[Frame]) -> list[str]:
    return [frame.event for frame in frames]


# --- the thread-centric protocol -----------------------------------------------------------------------


async def command(client: httpx.AsyncClient, thread_id: str, method: str, **params: Any) -> dict[str, Any]:
    """The answer to a command, which is HTTP 200 also when it fails."""
    answer: dict[str, Any] = await ok(
        client.post(f"/threads/{thread_id}/commands", json={"id": 7, "method": method, "params": params})
    )
    assert answer["id"] == 7
    return answer


async def succeed(client: httpx.AsyncClient, thread_id: str, method: str, **params: Any) -> Any:
    """The result of a command."""
    answer = await command(client, thread_id, method, **params)
    assert answer["type"] == "success", answer
    return answer["result"]


@asynccontextmanager
async def watching(client: httpx.AsyncClient, thread_id: str, **body: Any) -> AsyncIterator[AsyncIterator[Event]]:
    """A thread's events, on all channels unless the body says otherwise."""
    request = client.stream("POST", f"/threads/{thread_id}/stream/events", json={"channels": CHANNELS, **body})
    async with request as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield _envelopes(response)


async def _envelopes(response: httpx.Response) -> AsyncIterator[Event]:
    async for frame in frames(response):
        assert (frame.event, frame.id) == (frame.data["method"], frame.data["seq"])
        assert frame.data["type"] == "event"
        yield frame.data


def lifecycle(event: Event) -> str | None:
    """What a root lifecycle event says; None for any other event."""
    if event["method"] != "lifecycle" or event["params"]["namespace"]:
        return None
    said: str = event["params"]["data"]["event"]
    return said


def is_terminal(event: Event) -> bool:
    return lifecycle(event) in ("completed", "failed", "interrupted")


async def until_terminal(stream: AsyncIterator[Event]) -> list[Event]:
    """The events up to the end of a run. The stream stays open."""
    events = []
    async with asyncio.timeout(PATIENCE):
        async for event in stream:
            events.append(event)
            if is_terminal(event):
                return events
    raise AssertionError(f"the stream ended by itself after {events}")


async def replay(client: httpx.AsyncClient, thread_id: str, **body: Any) -> list[Event]:
    """A thread's events up to the first end of a run."""
    async with watching(client, thread_id, **body) as stream:
        return await until_terminal(stream)


def of(events: Iterable[Event], method: str) -> list[Any]:
    """The data of the events with this method."""
    return [event["params"]["data"] for event in events if event["method"] == method]

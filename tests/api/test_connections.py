"""A client that goes away is noticed, whichever way its request took; and so is whoever else wants its task to end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest
from starlette.responses import StreamingResponse

from holdfast.api.connections import Line, WhileConnected
from tests.support import waiting

LENGTHY = "x" * 90_000


class Reading:
    """A flow that has been stopped, as a long body does."""

    paused = True

    def resume_reading(self) -> None:
        self.paused = False


def line_to(*, disconnected: bool = False) -> tuple[Line, Reading]:
    flow = Reading()
    cycle: Any = SimpleNamespace(flow=flow, disconnected=disconnected)
    return Line(cycle), flow


async def test_the_block_ends_when_the_client_has_gone() -> None:
    line, flow = line_to()
    asyncio.get_running_loop().call_soon(line.lose)
    with WhileConnected(line):
        assert not flow.paused
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    line.lose()  # Nobody is told any more.
    await asyncio.sleep(0)


async def test_a_client_that_has_gone_before() -> None:
    line, _ = line_to(disconnected=True)
    with WhileConnected(line):
        await asyncio.Event().wait()


async def test_a_cancel_that_is_swallowed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WhileConnected, "AGAIN", 0.01)
    line, _ = line_to()
    asyncio.get_running_loop().call_soon(line.lose)
    swallowed = 0
    with WhileConnected(line):
        while swallowed < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_what_others_cancel_stays_cancelled() -> None:
    line, _ = line_to()
    entered = asyncio.Event()

    async def work() -> None:
        with WhileConnected(line):
            entered.set()
            await asyncio.Event().wait()

    for goes in (False, True):
        entered.clear()
        task = asyncio.create_task(work())
        await entered.wait()
        if goes:
            line.lose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_what_is_raised_is_raised() -> None:
    line, _ = line_to()
    asyncio.get_running_loop().call_soon(line.lose)

    async def work() -> None:
        with WhileConnected(line):
            try:
                await asyncio.Event().wait()
            finally:
                raise KeyError

    with pytest.raises(KeyError):
        await work()


@pytest.mark.parametrize("kind", ["wait", "stream"])
async def test_a_run_is_cancelled_when_its_client_goes(
    web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """After a long body too, at which the server stops to read. Nobody works on the run: nothing is said of it."""

    async def never(self: StreamingResponse, *_: Any) -> None:
        raise AssertionError("a task has been made to listen")

    monkeypatch.setattr(StreamingResponse, "__call__", never)
    thread_id = (await web.post("/threads", json={})).json()["thread_id"]
    runs = f"/threads/{thread_id}/runs"
    body = orjson.dumps({"assistant_id": "echo", "input": {"messages": LENGTHY}, "on_disconnect": "cancel"})
    host = f"{web.base_url.host}:{web.base_url.port}"
    reader, writer = await asyncio.open_connection(web.base_url.host, web.base_url.port)
    head = (
        f"POST {runs}/{kind} HTTP/1.1\r\nhost: {host}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    assert b"200" in await reader.readline()
    [run] = (await web.get(runs)).json()
    assert run["status"] == "pending"
    writer.close()
    await writer.wait_closed()

    async def interrupted() -> bool:
        return bool((await web.get(f"{runs}/{run['run_id']}")).json()["status"] == "interrupted")

    await waiting.until(interrupted, "the run is cancelled")


async def test_a_run_goes_on_when_its_client_goes(web: httpx.AsyncClient) -> None:
    """Unless it is asked to end with it. The server is none the worse for it."""
    path = f"/threads/{uuid4()}/runs"
    body = {"assistant_id": "echo", "input": {"messages": "hello"}, "if_not_exists": "create"}
    async with web.stream("POST", f"{path}/wait", json=body) as response:
        assert response.status_code == 200
    [run] = (await web.get(path)).json()
    assert run["status"] == "pending"

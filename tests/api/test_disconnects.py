"""A client that goes away is noticed, whichever way its request took; and so is whoever else wants its task to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import uuid4

import httpx
import orjson
import pytest
from starlette.types import Message

from holdfast.api.disconnects import ClientConnection, WhileOpen
from holdfast.api.streaming import _send_now
from holdfast.streams.sse import HEARTBEAT
from tests.support import waiting

LENGTHY = "x" * 90_000


class Source:
    """Something that ends when a test says so."""

    def __init__(self) -> None:
        self.callback: Callable[[], object] | None = None

    def on_end(self, callback: Callable[[], object] | None) -> None:
        self.callback = callback

    def end(self) -> None:
        if self.callback is not None:
            self.callback()


async def test_block_ends_with_its_source() -> None:
    source = Source()
    asyncio.get_running_loop().call_soon(source.end)
    with WhileOpen(source):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert source.callback is None


async def test_block_ends_when_the_client_disconnects() -> None:
    messages = asyncio.Queue[Message]()
    messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    async def gone() -> None:
        messages.put_nowait({"type": "http.disconnect"})

    client = ClientConnection(messages.get)
    async with asyncio.TaskGroup() as tasks:
        with WhileOpen(client):
            tasks.create_task(gone())
            await asyncio.Event().wait()
        await client.stopped()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_block_that_ends_first_stops_listening() -> None:
    stopped = asyncio.Event()

    async def receive() -> Message:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        raise AssertionError

    client = ClientConnection(receive)
    with WhileOpen(client):
        await asyncio.sleep(0)
    await client.stopped()
    assert stopped.is_set()


async def test_heartbeat_is_not_sent_to_a_client_that_does_not_read() -> None:
    sent: list[Message] = []
    writable = asyncio.Event()

    async def send(message: Message) -> None:
        if not writable.is_set():
            await writable.wait()
        sent.append(message)

    _send_now(send)
    writable.set()
    await asyncio.sleep(0)
    assert sent == []
    _send_now(send)
    assert [message["body"] for message in sent] == [HEARTBEAT]


async def test_a_cancel_that_is_swallowed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WhileOpen, "CANCEL_INTERVAL_SECONDS", 0.01)
    source = Source()
    asyncio.get_running_loop().call_soon(source.end)
    swallowed = 0
    with WhileOpen(source):
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
    source = Source()
    entered = asyncio.Event()

    async def work() -> None:
        with WhileOpen(source):
            entered.set()
            await asyncio.Event().wait()

    for goes in (False, True):
        entered.clear()
        task = asyncio.create_task(work())
        await entered.wait()
        if goes:
            source.end()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_what_is_raised_is_raised() -> None:
    source = Source()
    asyncio.get_running_loop().call_soon(source.end)

    async def work() -> None:
        with WhileOpen(source):
            try:
                await asyncio.Event().wait()
            finally:
                raise KeyError

    with pytest.raises(KeyError):
        await work()


@pytest.mark.parametrize("kind", ["wait", "stream"])
async def test_a_run_is_cancelled_when_its_client_goes(web: httpx.AsyncClient, kind: str) -> None:
    """After a long body too, at which the server stops to read. Nobody works on the run: nothing is said of it."""

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

"""WebSocket clients that send too much and take nothing, over real sockets."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from psycopg.rows import dict_row
from websockets.asyncio.client import connect

from holdfast.resources.api_keys import create_key
from tests.limits.target import MEGABYTE, Attack, Target, target
from tests.limits.test_requests import HANDSHAKE
from tests.support.databases import own_database
from tests.support.waiting import until, until_true

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT, CONTINUATION, PING, PONG = 1, 0, 9, 10
NO_MASK = b"\0\0\0\0"
# The first byte of a close frame.
CLOSE = 0x88
LIMITS = {
    "MAX_BUFFERED_BYTES": str(24 * MEGABYTE),
    "MAX_BODY_BYTES": str(12 * MEGABYTE),
    "BODY_TIMEOUT_SECONDS": "4",
    "KEY_REFRESH_SECONDS": "0.1",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Target]:
    directory: Path = tmp_path_factory.mktemp("sockets")
    with own_database(server_url) as database_url:
        async with target(database_url, directory, LIMITS) as found:
            yield found


def frame(kind: int, payload: bytes, *, final: bool = True, length: int | None = None) -> bytes:
    """A frame as clients send it. `length`: what it says of itself, if it is not to be sent whole."""
    size = len(payload) if length is None else length
    first = bytes([(0x80 if final else 0) | kind])
    if size < 126:
        return first + bytes([0x80 | size]) + NO_MASK + payload
    return first + b"\xff" + struct.pack("!Q", size) + NO_MASK + payload


async def socket(web: Target) -> Attack:
    client = await web.connect()
    await client.send(HANDSHAKE + b"\r\n")
    assert await client.status() == 101
    return client


async def close_code(client: Attack) -> int:
    """The code with which the server closes the socket."""
    return (await close_frame(client))[0]


async def close_frame(client: Attack) -> tuple[int, str]:
    """The code with which the server closes the socket, and the reason."""
    async with asyncio.timeout(60):
        while True:
            first, size = await client.reader.readexactly(2)
            length = struct.unpack("!H", await client.reader.readexactly(2))[0] if size == 126 else size
            payload = await client.reader.readexactly(length)
            if first == CLOSE:
                return int(struct.unpack("!H", payload[:2])[0]), payload[2:].decode()


async def test_message_larger_than_a_body_is_refused(web: Target) -> None:
    client = await socket(web)
    await client.send(frame(TEXT, b"x" * 100, length=13 * MEGABYTE))
    assert await close_code(client) == 1009


async def test_compressed_messages_are_not_accepted(web: Target) -> None:
    """A small compressed message can be a large one."""
    client = await web.connect()
    await client.send(HANDSHAKE + b"sec-websocket-extensions: permessage-deflate; client_max_window_bits\r\n\r\n")
    async with asyncio.timeout(60):
        head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101")
    assert b"sec-websocket-extensions" not in head.lower()
    client.close()


async def test_message_of_very_many_frames_is_refused(web: Target) -> None:
    client = await socket(web)
    await client.send(frame(TEXT, b"", final=False) + frame(CONTINUATION, b"", final=False) * 5000)
    assert await close_code(client) == 1008


async def test_unfinished_messages_share_a_budget(web: Target) -> None:
    before = web.memory
    clients = [await socket(web) for _ in range(12)]
    for client in clients:
        await client.send(frame(TEXT, b"x" * 8 * MEGABYTE, length=11 * MEGABYTE))
    closed = [asyncio.create_task(close_frame(client)) for client in clients]
    for _, closing in zip(range(2), asyncio.as_completed(closed), strict=False):
        code, reason = await closing
        assert code == 1013
        assert "MAX_BUFFERED_BYTES" in reason
    assert await web.is_well()
    assert web.memory - before < 70 * MEGABYTE
    for client in clients:
        client.close()
    await asyncio.gather(*closed, return_exceptions=True)


@pytest.mark.parametrize(
    ("begin", "drop"),
    [
        (frame(TEXT, b"x" * 11 * MEGABYTE, final=False), frame(PING, b"x")),
        (frame(TEXT, b"x", final=False), frame(CONTINUATION, b"x", final=False)),
        (frame(TEXT, b"x" * 10 * MEGABYTE, length=11 * MEGABYTE), b"x"),
        (frame(PING, b"x", length=11 * MEGABYTE), b"x"),
        (b"\x81", b""),
    ],
    ids=["unfinished message with pings", "many frames", "unfinished frame", "unfinished ping", "first byte"],
)
async def test_unfinished_message_has_a_time_limit(web: Target, begin: bytes, drop: bytes) -> None:
    client = await socket(web)
    await client.send(begin)
    code = asyncio.create_task(close_code(client))
    while not code.done():
        await client.send(drop)
        await asyncio.sleep(0.1)
    assert await code == 1008
    client.close()


async def test_messages_one_after_another_have_no_time_limit(web: Target) -> None:
    """Each packet ends in the middle of a frame, and each message is complete in time."""
    client = await socket(web)
    message = frame(TEXT, b"{}")
    code = asyncio.create_task(close_code(client))
    await client.send(message[:3])
    for kind in (message, frame(PONG, b"x")):
        for _ in range(30):
            await client.send(message[3:] + kind[:3] + kind[3:] + message[:3])
            await asyncio.sleep(0.1)
    assert not code.done()
    client.close()
    await asyncio.gather(code, return_exceptions=True)


async def test_control_frames_are_not_counted(web: Target) -> None:
    client = await socket(web)
    pongs = frame(PONG, b"x" * 125) * 8000
    for _ in range(26):
        await client.send(pongs)
    await client.send(frame(TEXT, b"{}"))
    async with asyncio.timeout(60):
        assert (await client.reader.readexactly(1))[0] == 0x80 | TEXT
    client.close()


async def test_refused_handshake_is_no_error_of_the_server(web: Target) -> None:
    client = await web.connect()
    await client.send(HANDSHAKE + b"origin: https://evil.example\r\n\r\n")
    assert (await client.answer())[0] == 403
    assert await web.is_well()
    assert "completing handshake" not in web.member.log.read_text()


async def test_pings_of_a_client_that_takes_no_pongs_take_no_memory(web: Target) -> None:
    client = await socket(web)
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    pings = frame(PING, b"x" * 125) * 8000
    await client.send(pings * 6)
    before = web.memory
    for _ in range(25):
        if not await client.send(pings):
            break
    assert web.memory - before < 12 * MEGABYTE
    assert await web.is_well()
    client.writer.transport.abort()


@pytest.mark.asyncio(loop_scope="function")
async def test_socket_that_is_not_accepted_yet_holds_nothing(database_url: str, tmp_path: Path) -> None:
    """A client that is not authenticated yet, for one."""
    asked, accept = (tmp_path / "project" / f"webapp.{name}" for name in ("asked", "accept"))
    handshake = HANDSHAKE.replace(HANDSHAKE.split()[1], b"/late-accept")
    async with target(database_url, tmp_path, LIMITS, custom_app=True) as web:
        client = await web.connect()
        await client.send(handshake + b"\r\n")
        await until_true(asked.exists, "the application has the handshake")
        before = web.memory
        web.forget_peak()
        sending = asyncio.create_task(client.send(frame(TEXT, b"x" * 11 * MEGABYTE)))
        for _ in range(30):
            assert await web.is_well()
        assert web.peak_memory - before < 5 * MEGABYTE
        accept.touch()
        assert await client.status() == 101
        await sending
        client.close()


async def test_subscriptions_of_a_socket_are_bounded(web: Target) -> None:
    """They are kept, and every event is compared with each of them."""
    thread_id = (await web.fleet.client.post(f"{web.member.url}/threads", json={})).json()["thread_id"]
    url = web.member.url.replace("http", "ws")

    async with connect(f"{url}/threads/{thread_id}/stream/events") as socket:

        async def subscribe(**params: Any) -> dict[str, Any]:
            params = {"channels": ["values"], **params}
            await socket.send(json.dumps({"id": 1, "method": "subscription.subscribe", "params": params}))
            answer: dict[str, Any] = json.loads(await socket.recv())
            return answer

        large = [["x" * 100]] * 200
        assert "65,536 bytes" in (await subscribe(namespaces=large * 4))["message"]
        assert [(await subscribe(namespaces=large))["type"] for _ in range(4)] == ["success"] * 3 + ["error"]
        assert (await subscribe(namespaces=large, subscription_id="3"))["type"] == "success"
        assert (await subscribe())["type"] == "success"
        await socket.send('{"id": 1, "method": "subscription.unsubscribe", "params": {"subscription_id": "1"}}')
        await socket.recv()
        assert (await subscribe(namespaces=large))["type"] == "success"
    stream = f"{web.member.url}/threads/{thread_id}/stream/events"
    answer = await web.fleet.client.post(stream, json={"channels": ["values"], "namespaces": large * 4})
    assert (answer.status_code, "65,536 bytes" in answer.json()["detail"]) == (400, True)


async def test_client_without_a_key_holds_nothing(web: Target) -> None:
    """The last test of this module: from here on, every client needs a key."""
    path = "-c search_path=holdfast,public"
    async with await psycopg.AsyncConnection.connect(
        web.fleet.database_url, options=path, row_factory=dict_row
    ) as connection:
        key = (await create_key(connection, "acme", "test", ["read", "write"]))[0]

    async def is_guarded() -> bool:
        return (await web.fleet.client.post(f"{web.member.url}/threads", json={})).status_code == 401

    await until(is_guarded, "every client needs a key")
    clients = [await socket(web) for _ in range(8)]
    for client in clients:
        assert await close_code(client) == 4401
    before = web.memory
    web.forget_peak()
    for client in clients:
        await client.send(frame(TEXT, b"x" * 9 * MEGABYTE, length=11 * MEGABYTE))
    assert web.peak_memory - before < 20 * MEGABYTE
    assert await web.takes_body(3 * MEGABYTE, {"x-api-key": key})
    for client in clients:
        await client.is_closed()

"""WebSocket clients that send too much and take nothing, over real sockets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.conformance.server import own_database
from tests.limits.target import MEGABYTE, Attack, Target, target
from tests.limits.test_requests import HANDSHAKE

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT, CONTINUATION, PING = 1, 0, 9
NO_MASK = b"\0\0\0\0"
# A close frame, after its length.
CLOSE = 0x88


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def web(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Target]:
    directory: Path = tmp_path_factory.mktemp("sockets")
    limits = {"MAX_BUFFERED_BYTES": str(24 * MEGABYTE), "MAX_BODY_BYTES": str(12 * MEGABYTE)}
    with own_database(server_url) as database_url:
        async with target(database_url, directory, limits) as found:
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
    """The code with which the server closes the connection."""
    async with asyncio.timeout(60):
        received = await client.reader.read()
    assert received[0] == CLOSE, received[:20]
    return int(struct.unpack("!H", received[2:4])[0])


async def test_message_larger_than_a_body_is_refused(web: Target) -> None:
    client = await socket(web)
    await client.send(frame(TEXT, b"x" * 100, length=13 * MEGABYTE))
    assert await close_code(client) == 1009


async def test_message_of_very_many_frames_is_refused(web: Target) -> None:
    client = await socket(web)
    await client.send(frame(TEXT, b"", final=False) + frame(CONTINUATION, b"", final=False) * 5000)
    assert await close_code(client) == 1008


async def test_unfinished_messages_share_a_budget(web: Target) -> None:
    before = web.memory
    clients = [await socket(web) for _ in range(12)]
    for client in clients:
        await client.send(frame(TEXT, b"x" * 8 * MEGABYTE, length=11 * MEGABYTE))
    # What the server has not read when it closes a connection resets it, and the close frame may be lost.
    closed = [asyncio.create_task(client.is_closed()) for client in clients]
    for _, closing in zip(range(2), asyncio.as_completed(closed), strict=False):
        await closing
    assert await web.is_well()
    assert web.memory - before < 70 * MEGABYTE
    for client in clients:
        client.close()
    await asyncio.gather(*closed)


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

"""Requests that are too large, too many or too slow, over real sockets, with and without a custom app."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.limits.target import MEGABYTE, Target, target
from tests.support.databases import own_database
from tests.support.waiting import until_true

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = {
    "HEADER_TIMEOUT_SECONDS": "2",
    "BODY_TIMEOUT_SECONDS": "3",
    "MAX_BUFFERED_BYTES": str(24 * MEGABYTE),
    "MAX_BODY_BYTES": str(20 * MEGABYTE),
}
GET = b"GET /ok HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /threads HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HANDSHAKE = (
    b"GET /threads/00000000-0000-4000-8000-000000000000/stream/events HTTP/1.1\r\nhost: localhost\r\n"
    b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: %s\r\n" % base64.b64encode(os.urandom(16))
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["plain", "custom app"])
async def web(
    request: pytest.FixtureRequest, server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Target]:
    directory: Path = tmp_path_factory.mktemp("limits")
    with own_database(server_url) as database_url:
        async with target(database_url, directory, LIMITS, custom_app=request.param == "custom app") as found:
            yield found


async def test_ordinary_requests_are_answered(web: Target) -> None:
    client = await web.connect()
    for _ in range(3):
        await client.send(GET + b"\r\n")
        assert await client.status() == 200
        await client.reader.readexactly(len(b'{"ok":true}'))
    await client.send(GET + b"x-large: %s\r\n\r\n" % (b"x" * 60_000))
    assert await client.status() == 200
    client.close()


async def test_too_many_headers_are_refused(web: Target) -> None:
    client = await web.connect()
    await client.send(GET + b"a: b\r\n" * 100_000 + b"\r\n")
    status, detail = await client.answer()
    assert status == 431
    assert "100 header fields" in detail
    assert await web.is_well()


async def test_too_many_headers_in_one_packet_are_refused(web: Target) -> None:
    client = await web.connect()
    await client.send(GET + b"a: b\r\n" * 200 + b"\r\n")
    assert (await client.answer())[0] == 431


async def test_large_headers_are_refused(web: Target) -> None:
    client = await web.connect()
    await client.send(GET + b"x-large: %s\r\n\r\n" % (b"x" * 70_000))
    status, detail = await client.answer()
    assert status == 431
    assert "MAX_HEADER_BYTES=65536" in detail


async def test_unfinished_header_takes_no_memory(web: Target) -> None:
    before = web.memory
    client = await web.connect()
    await client.send(GET + b"x-endless: ")
    for _ in range(100):
        if not await client.send(b"x" * MEGABYTE):
            break
    assert web.memory - before < 20 * MEGABYTE
    assert (await client.answer())[0] == 431


async def test_long_url_is_refused(web: Target) -> None:
    for end in (b"", b" HTTP/1.1\r\nhost: localhost\r\n\r\n"):
        client = await web.connect()
        await client.send(b"GET /ok?q=%s%s" % (b"x" * 300_000, end))
        status, detail = await client.answer()
        assert status == 414
        assert "MAX_HEADER_BYTES=65536" in detail


async def test_trailers_are_no_headers_and_are_bounded(web: Target) -> None:
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    client = await web.connect()
    await client.send(chunked + b"x-request-id: from-a-trailer\r\n\r\n")
    async with asyncio.timeout(60):
        head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.split()[1] == b"200"
    assert b"from-a-trailer" not in head
    client.close()
    client = await web.connect()
    await client.send(chunked + b"x-endless: ")
    for _ in range(20):
        if not await client.send(b"x" * MEGABYTE):
            break
    await client.is_closed()


async def test_half_sent_requests_are_closed(web: Target) -> None:
    clients = [await web.connect() for _ in range(100)]
    begun = (
        GET,
        b"",
        b"\r\n",
        POST + b"content-length: 10\r\n\r\n{",
        POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
    )
    for number, client in enumerate(clients):
        await client.send(begun[number % len(begun)])
    assert await web.is_well()
    assert await clients[0].answer() == (
        408,
        "The request's headers were not complete within HEADER_TIMEOUT_SECONDS=2.",
    )
    assert await clients[3].answer() == (408, "The request's body was not complete within BODY_TIMEOUT_SECONDS=3.")
    for client in clients:
        await client.is_closed()


async def test_second_request_has_a_header_timeout_too(web: Target) -> None:
    client = await web.connect()
    await client.send(GET + b"\r\n")
    assert await client.status() == 200
    await client.reader.readexactly(len(b'{"ok":true}'))
    await client.send(GET)
    assert (await client.answer())[0] == 408


async def test_headers_and_bodies_that_trickle_are_refused(web: Target) -> None:
    async def trickle(begin: bytes, drop: bytes) -> int:
        client = await web.connect()
        await client.send(begin)
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            await client.send(drop)
            await asyncio.sleep(0.1)
        return (await answer)[0]

    large = POST + b"content-length: 1000000\r\n\r\n"
    statuses = await asyncio.gather(trickle(GET, b"a: b\r\n"), trickle(large, b"{" * 10))
    assert list(statuses) == [408, 408]


async def test_body_behind_a_refusal_ends_with_the_connection(web: Target) -> None:
    """The answer does not wait for the body, and nobody reads the body: it must not keep the connection open."""
    client = await web.connect()
    await client.send(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n")
    assert await client.status() in (404, 413)
    closed = asyncio.create_task(client.is_closed())
    while not closed.done():
        await client.send(b"x")
        await asyncio.sleep(0.1)
    await closed


async def test_body_behind_an_answer_is_not_counted(web: Target) -> None:
    """A client that was answered before its body was complete does not take the budget from others."""
    client = await web.connect()
    await client.send(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
    assert await client.status() == 404
    closed = asyncio.create_task(client.is_closed())
    chunk = b"100000\r\n%s\r\n" % (b"x" * MEGABYTE)
    for _ in range(23):
        await client.send(chunk)
    assert await web.takes_body(3 * MEGABYTE)
    # The client goes on without an end, and the server ends the connection.
    while not closed.done():
        await client.send(b"1\r\nx\r\n")
        await asyncio.sleep(0.1)
    await closed


async def test_body_behind_an_answer_may_be_completed(web: Target) -> None:
    client = await web.connect()
    await client.send(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n")
    assert await client.status() == 404
    await client.send(b"x" * 10 + GET + b"\r\n")
    async with asyncio.timeout(60):
        await client.reader.readuntil(b"HTTP/1.1 200")
    client.close()


async def test_body_of_a_request_with_an_open_stream_has_a_time_limit(web: Target) -> None:
    thread = (await web.fleet.client.post(f"{web.member.url}/threads", json={})).json()["thread_id"]
    client = await web.connect()
    head = f"GET /threads/{thread}/stream HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    await client.send(head.encode())
    assert await client.status() == 200
    closed = asyncio.create_task(client.is_closed())
    while not closed.done():
        await client.send(b"1\r\nx\r\n")
        await asyncio.sleep(0.1)
    await closed


async def test_unfinished_bodies_share_a_budget(web: Target) -> None:
    before = web.memory
    clients = [await web.connect() for _ in range(8)]
    for client in clients:
        await client.send(POST + b"content-length: 19000000\r\n\r\n" + b'"' + b"x" * 10 * MEGABYTE)
    answers = asyncio.gather(*(client.answer() for client in clients), return_exceptions=True)
    small = await web.fleet.client.post(f"{web.member.url}/threads", json={"metadata": {"a": "x" * 100_000}})
    assert small.status_code == 200
    found = await answers
    # A client that goes on sending for longer than the server discards what it sends finds a reset connection.
    lost = sum(isinstance(answer, OSError) for answer in found)
    refused = [answer[0] for answer in found if isinstance(answer, tuple)]
    assert refused.count(503) + lost >= 5, found
    assert set(refused) <= {408, 503}
    assert web.memory - before < 100 * MEGABYTE


async def test_requests_sent_ahead_are_bounded(web: Target) -> None:
    client = await web.connect()
    await client.send((GET + b"\r\n") * 5000)
    async with asyncio.timeout(60):
        received = await client.reader.read()
    assert received.count(b"HTTP/1.1 200") < 5000, "the server has kept all of them"
    assert await web.is_well()


async def test_large_handshakes_are_refused(web: Target) -> None:
    for more in (b"a: b\r\n" * 110, b"a: %s\r\n" % (b"x" * 10_000), b"a: %s\r\n" % (b"x" * 70_000)):
        client = await web.connect()
        await client.send(HANDSHAKE + more + b"\r\n")
        assert (await client.answer())[0] == 431


async def test_malformed_requests_are_answered_as_json(web: Target) -> None:
    client = await web.connect()
    await client.send(b"NONSENSE\r\n\r\n")
    assert await client.answer() == (400, "Invalid HTTP request received.")


async def test_nothing_is_left_open(web: Target) -> None:
    """The last test of this module: refused connections are closed even if their clients stay."""
    client = await web.connect()
    await client.send(b"NONSENSE\r\n\r\n")
    await until_true(lambda: web.connections <= 2, "the server has closed what it refused")
    client.close()

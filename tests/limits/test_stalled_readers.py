"""Clients that stop reading a long log, and clients that are sent large events."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import psycopg
import pytest
from websockets.asyncio.client import connect

from tests.limits.target import MEGABYTE, Target, target
from tests.support.waiting import until_true

# Seconds for which the memory is watched while nobody reads.
WATCHED_SECONDS = 4.0
EVENT_BYTES = 100_000

THREAD = "INSERT INTO holdfast.thread (thread_id, last_seq) VALUES (%s, %s)"
RUN = """
INSERT INTO holdfast.run (run_id, thread_id, assistant_id, graph_id, status, attempt, fence, first_seq, kwargs,
                          created_at, finished_at)
SELECT %s, %s, assistant_id, graph_id, 'success', 1, 1, 1, '{}', now(), now() FROM holdfast.assistant LIMIT 1
"""
EVENTS = """
INSERT INTO holdfast.event (thread_id, seq, run_id, kind, data)
SELECT %(thread_id)s, number, %(run_id)s, CASE WHEN number > %(events)s THEN 'end' ELSE 'custom' END,
       convert_to(CASE WHEN number > %(events)s THEN '{"status": "success"}'
                       ELSE to_json(repeat('x', %(size)s))::text END, 'UTF8')
FROM generate_series(1, %(events)s + 1) AS number
"""


@pytest.fixture
async def web(database_url: str, tmp_path: Path) -> AsyncIterator[Target]:
    async with target(database_url, tmp_path, {"MAX_BUFFERED_BYTES": str(32 * MEGABYTE)}) as found:
        yield found


def write_log(database_url: str, events: int, size: int) -> tuple[UUID, UUID]:
    """A run that has ended and has written a log."""
    thread_id, run_id = uuid4(), uuid4()
    with psycopg.connect(database_url) as connection:
        connection.execute(THREAD, (thread_id, events + 1))
        connection.execute(RUN, (run_id, thread_id))
        about = {"thread_id": thread_id, "run_id": run_id, "events": events, "size": size}
        connection.execute(EVENTS, about)
    return thread_id, run_id


async def stalled(web: Target, request: bytes) -> socket.socket:
    """A client that sends a request, receives the first bytes of the answer and then reads nothing."""
    place = urlsplit(web.member.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (place.hostname, place.port))
    await loop.sock_sendall(client, request)
    async with asyncio.timeout(60):
        assert await loop.sock_recv(client, 12) in (b"HTTP/1.1 200", b"HTTP/1.1 101")
    return client


async def most_memory(web: Target) -> int:
    """The most memory that the process has while it is watched. It answers others meanwhile."""
    end, most = time.monotonic() + WATCHED_SECONDS, 0
    while time.monotonic() < end:
        most = max(most, web.memory)
        assert await web.is_well()
        await asyncio.sleep(0.02)
    return most


def get(path: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{more}\r\n".encode()


def post(path: str, body: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


async def test_clients_that_stop_reading_hold_a_portion_each(web: Target, database_url: str) -> None:
    thread_id, run_id = write_log(database_url, events=400, size=EVENT_BYTES)
    before = web.memory
    requests = [
        get(f"/threads/{thread_id}/runs/{run_id}/stream"),
        get(f"/threads/{thread_id}/stream", "last-event-id: 0\r\n"),
        post(f"/threads/{thread_id}/stream/events", '{"channels": ["custom"]}'),
    ]
    clients = [await stalled(web, request) for request in requests for _ in range(3)]
    sockets = []
    for _ in range(3):
        url = web.member.url.replace("http", "ws")
        follower = await connect(f"{url}/threads/{thread_id}/stream/events", max_queue=1, max_size=None)
        await follower.send('{"id": 1, "method": "subscription.subscribe", "params": {"channels": ["custom"]}}')
        follower.transport.pause_reading()
        sockets.append(follower)
    most = await most_memory(web)
    for client in clients:
        client.close()
    for follower in sockets:
        follower.transport.abort()
    assert most - before < 120 * MEGABYTE, f"grew by {(most - before) // MEGABYTE} MB"


async def test_streams_do_not_keep_the_input_of_their_run(web: Target) -> None:
    """It is as large as a body, and several times as large when it is parsed."""
    body = {"assistant_id": "reply", "after_seconds": 3600, "input": {"text": ["ab"] * 800_000}}
    run = (await web.fleet.client.post(f"{web.member.url}/runs", json=body)).json()
    path = f"/threads/{run['thread_id']}/runs/{run['run_id']}"
    before = web.memory
    for what in ("stream", "join", "stream?follow=true"):
        clients = [await stalled(web, get(f"{path}/{what}")) for _ in range(5)]
        assert web.memory - before < 150 * MEGABYTE, f"{what}: grew by {(web.memory - before) // MEGABYTE} MB"
        for client in clients:
            client.close()


async def test_log_of_large_events_is_read_whole(web: Target, database_url: str) -> None:
    """Events that are larger than a portion, and events that are small, by every kind of stream."""
    thread_id, run_id = write_log(database_url, events=6, size=3 * MEGABYTE)
    for path in (f"/threads/{thread_id}/runs/{run_id}/stream", f"/runs/{run_id}/stream"):
        text = (await web.fleet.client.get(f"{web.member.url}{path}")).text
        assert [line for line in text.splitlines() if line.startswith("id:")] == [f"id: {n}" for n in range(1, 7)]
        assert len(text) > 18 * MEGABYTE


async def test_clients_that_take_nothing_are_disconnected_when_there_are_many(web: Target, database_url: str) -> None:
    """Each is sent one large event, and all of them together more than the process may hold."""
    thread_id, run_id = write_log(database_url, events=2, size=8 * MEGABYTE)
    path = f"/threads/{thread_id}/runs/{run_id}/stream"
    clients = [await stalled(web, get(path)) for _ in range(12)]
    await until_disconnected(web)
    assert await web.is_well()
    for client in clients:
        client.close()
    assert web.member.logged("connection.stalled")


async def until_disconnected(web: Target) -> None:
    async with asyncio.timeout(60):
        while web.connections > 6:
            await asyncio.sleep(0.1)


async def test_message_of_a_socket_is_sent_when_its_client_takes_it(database_url: str, tmp_path: Path) -> None:
    """Otherwise the next event would be loaded while the client has not taken this one."""
    begun, sent = (tmp_path / "project" / f"webapp.{name}" for name in ("begun", "sent"))
    handshake = (
        "upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n"
        "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    )
    async with target(database_url, tmp_path, {}, custom_app=True) as web:
        client = await stalled(web, get("/large-message", handshake))
        await until_true(begun.exists, "the message is being sent")
        assert await web.is_well()
        assert not sent.exists()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while not sent.exists():
                assert await loop.sock_recv(client, MEGABYTE)
        client.close()

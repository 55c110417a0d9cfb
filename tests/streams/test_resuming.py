"""Clients that stop reading a stream, and clients that resume after their events have expired."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from uuid import UUID, uuid4

import httpx
import psutil
import pytest

from holdfast.db.connect import Database
from holdfast.settings import Settings
from holdfast.upkeep.sweeps import SWEEP_EVENTS, SWEEP_RUNS
from tests.support.records import post_run, query
from tests.support.sse import Frame, frames
from tests.support.waiting import until_true
from tests.support.watching import parse_frames

# More than the socket buffers hold for a client that does not read.
EVENTS, SIZE = 300, 100_000

END = """
UPDATE run SET status = 'success', ready_at = NULL, attempt = 1, fence = 1, first_seq = 1, finished_at = now()
WHERE run_id = %s RETURNING run_id
"""
WRITE = """
INSERT INTO event (thread_id, seq, run_id, kind, data)
SELECT %s, number, %s, CASE WHEN number > %s THEN 'end' ELSE 'custom' END,
       convert_to(CASE WHEN number > %s THEN '{"status": "success"}' ELSE to_json(repeat('x', %s))::text END, 'UTF8')
FROM generate_series(1, %s + 1) AS number RETURNING seq
"""
AGE = "UPDATE run SET finished_at = now() - interval '2 days' WHERE run_id = %s RETURNING run_id"


def served(port: int) -> list[tuple[str, int]]:
    """The addresses of the clients that are connected to a port of this process."""
    return [
        (connection.raddr.ip, connection.raddr.port)
        for connection in psutil.Process().net_connections("tcp")
        if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
    ]


async def finished_run(database: Database, events: int, size: int) -> tuple[UUID, UUID]:
    run = (await post_run(database, "graph")).run
    thread_id, run_id = run["thread_id"], run["run_id"]
    await query(database, WRITE, thread_id, run_id, events, events, size, events)
    await query(database, END, run_id)
    return thread_id, run_id


async def test_stalled_reader_is_disconnected_and_can_resume(
    client: httpx.AsyncClient, database: Database, settings: Settings
) -> None:
    thread_id, run_id = await finished_run(database, EVENTS, SIZE)
    path = f"/threads/{thread_id}/runs/{run_id}/stream"
    with socket.create_connection(("127.0.0.1", settings.port)) as stalled:
        stalled.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        mine = stalled.getsockname()
        await until_true(lambda: mine in served(settings.port), "the server has the connection")
        await until_true(lambda: mine not in served(settings.port), "the server has dropped it")
    for seen in (0, 100):
        headers = {"last-event-id": str(seen)}
        frames = parse_frames((await client.get(path, headers=headers)).text.splitlines())
        assert [frame.id for frame in frames] == list(range(seen + 1, EVENTS + 1))


async def test_run_stream_answers_410_for_expired_cursor(client: httpx.AsyncClient, database: Database) -> None:
    thread_id, run_id = await finished_run(database, 5, 10)
    path = f"/threads/{thread_id}/runs/{run_id}/stream"
    assert (await client.get(path, headers={"last-event-id": "2"})).status_code == 200
    await query(database, AGE, run_id)
    async with database.connection() as connection:
        await connection.execute("UPDATE event SET created_at = now() - interval '2 days'")
        await connection.execute(SWEEP_EVENTS, {"ttl": 86_400, "batch": 10, "aside": []})
    for place in (path, f"/runs/{run_id}/stream"):
        gone = await client.get(place, headers={"last-event-id": "2"})
        assert gone.status_code == 410
        assert "have expired" in gone.text
        # Without a cursor, the stream starts with the end of the run.
        assert (await client.get(place)).status_code == 200


async def thread_with_a_gap(database: Database) -> UUID:
    """A thread whose first five of ten events have expired."""
    thread_id, run_id = await finished_run(database, 9, 10)
    await query(database, "UPDATE thread SET last_seq = 10 WHERE thread_id = %s RETURNING 1", thread_id)
    await query(database, "DELETE FROM event WHERE run_id = %s AND seq <= 5 RETURNING 1", run_id)
    return thread_id


async def first_of(client: httpx.AsyncClient, method: str, path: str, **given: Any) -> Frame:
    """The first event of an endless stream."""
    async with asyncio.timeout(60), client.stream(method, path, **given) as response:
        assert response.status_code == 200, await response.aread()
        return await anext(frames(response))


async def test_thread_stream_answers_410_for_expired_cursor(client: httpx.AsyncClient, database: Database) -> None:
    thread_id = await thread_with_a_gap(database)
    path = f"/threads/{thread_id}/stream"
    for cursor in (1, 4):
        async with asyncio.timeout(60):
            gone = await client.get(path, headers={"last-event-id": str(cursor)})
        assert gone.status_code == 410
        assert f"The events after {cursor} have expired" in gone.json()["detail"]
        assert "watch on from 5" in gone.json()["detail"]
    assert (await first_of(client, "GET", path, headers={"last-event-id": "5"})).id == 6
    assert (await first_of(client, "GET", path, headers={"last-event-id": "-"})).id == 6
    await query(database, "DELETE FROM event WHERE thread_id = %s RETURNING 1", thread_id)
    assert (await client.get(path, headers={"last-event-id": "9"})).status_code == 410


async def test_event_stream_answers_410_for_expired_since(client: httpx.AsyncClient, database: Database) -> None:
    thread_id = await thread_with_a_gap(database)
    path, wanted = f"/threads/{thread_id}/stream/events", {"channels": ["custom", "lifecycle"]}
    for since in (1, 4):
        async with asyncio.timeout(60):
            gone = await client.post(path, json={**wanted, "since": since})
        assert gone.status_code == 410
        assert "have expired" in gone.json()["detail"]
    for kept in ({"since": 5}, {"since": 0}, {}):
        assert (await first_of(client, "POST", path, json={**wanted, **kept})).id == 6
    # A thread that does not exist yet has no expired events.
    unknown = {**wanted, "since": 3}
    async with client.stream("POST", f"/threads/{uuid4()}/stream/events", json=unknown) as response:
        assert response.status_code == 200


async def test_stream_closes_when_next_events_expire(client: httpx.AsyncClient, database: Database) -> None:
    """If the next events expire while a client is connected, the server closes the connection. When the client
    reconnects, it gets status 410."""
    thread_id, run_id = await finished_run(database, 4, 10)
    path = f"/threads/{thread_id}/stream"
    async with client.stream("GET", path, headers={"last-event-id": "-"}) as response:
        seen = frames(response)
        async with asyncio.timeout(60):
            assert [(await anext(seen)).id for _ in range(5)] == [1, 2, 3, 4, 5]
        await query(
            database,
            "INSERT INTO event (thread_id, seq, run_id, kind, data) VALUES (%s, 8, %s, 'custom', '1') RETURNING seq",
            thread_id,
            run_id,
        )
        with pytest.raises(httpx.RemoteProtocolError):
            async with asyncio.timeout(60):
                await anext(seen)
    assert (await client.get(path, headers={"last-event-id": "5"})).status_code == 410


async def test_removed_run_has_no_stream(client: httpx.AsyncClient, database: Database) -> None:
    thread_id, run_id = await finished_run(database, 5, 10)
    await query(database, AGE, run_id)
    async with database.connection() as connection:
        for statement in (SWEEP_EVENTS, SWEEP_RUNS):
            await connection.execute(statement, {"ttl": 86_400, "batch": 10, "aside": []})
    for place in ("", "/stream", "/join"):
        for path in (f"/threads/{thread_id}/runs/{run_id}{place}", f"/runs/{run_id}/stream"):
            gone = await client.get(path, headers={"last-event-id": "2"})
            assert gone.status_code == 404
            assert gone.json()["detail"].startswith(f"Run {run_id}")
            assert "not found" in gone.json()["detail"]
    assert (await client.get(f"/threads/{thread_id}")).status_code == 200
    assert (await client.get(f"/threads/{thread_id}/runs")).json() == []


async def test_run_that_never_started_has_no_expired_events(client: httpx.AsyncClient, database: Database) -> None:
    run = (await post_run(database, "graph")).run
    await query(
        database,
        "UPDATE run SET status = 'interrupted', ready_at = NULL, finished_at = now() WHERE run_id = %s RETURNING 1",
        run["run_id"],
    )
    path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/stream"
    assert (await client.get(path, headers={"last-event-id": "2"})).status_code == 200


async def test_stream_of_new_run_starts_at_end_of_log(database: Database) -> None:
    """It does not start at the beginning of the thread: the log may be long, and contains no events of this run."""
    thread_id, _ = await finished_run(database, 5, 10)
    await query(database, "UPDATE thread SET last_seq = 6 WHERE thread_id = %s RETURNING 1", thread_id)
    created = await post_run(database, "graph", thread_id=thread_id)
    assert created.run["first_seq"] == 7
    assert (await post_run(database, "graph")).run["first_seq"] == 1

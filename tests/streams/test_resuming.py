"""Readers that stop reading, and readers that come back too late."""

from __future__ import annotations

import socket
from uuid import UUID

import httpx
import psutil

from holdfast.db.connect import Database
from holdfast.settings import Settings
from holdfast.upkeep.sweeps import SWEEP_EVENTS
from tests.support.records import post_run, query
from tests.support.waiting import until_true
from tests.support.watching import parse_frames

# More than the kernel takes for a client that does not read.
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
    """The clients that this process serves on a port."""
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


async def test_a_reader_that_stops_reading_is_dropped_and_resumes_where_it_was(
    client: httpx.AsyncClient, database: Database, settings: Settings
) -> None:
    thread_id, run_id = await finished_run(database, EVENTS, SIZE)
    path = f"/threads/{thread_id}/runs/{run_id}/stream"
    with socket.create_connection(("127.0.0.1", settings.port)) as stalled:
        stalled.sendall(f"GET {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode())
        mine = stalled.getsockname()
        await until_true(lambda: mine in served(settings.port), "the server has the connection")
        await until_true(lambda: mine not in served(settings.port), "the server has dropped it")
    for seen in (0, 100):
        headers = {"last-event-id": str(seen)}
        frames = parse_frames((await client.get(path, headers=headers)).text.splitlines())
        assert [frame.id for frame in frames] == list(range(seen + 1, EVENTS + 1))


async def test_a_cursor_into_expired_events_is_answered_410(client: httpx.AsyncClient, database: Database) -> None:
    thread_id, run_id = await finished_run(database, 5, 10)
    path = f"/threads/{thread_id}/runs/{run_id}/stream"
    assert (await client.get(path, headers={"last-event-id": "2"})).status_code == 200
    await query(database, AGE, run_id)
    async with database.connection() as connection:
        await connection.execute("UPDATE event SET created_at = now() - interval '2 days'")
        await connection.execute(SWEEP_EVENTS, {"ttl": 86_400, "batch": 10})
    for place in (path, f"/runs/{run_id}/stream"):
        gone = await client.get(place, headers={"last-event-id": "2"})
        assert gone.status_code == 410
        assert "have expired" in gone.text
        # Without one it is the run that is asked for, which has ended.
        assert (await client.get(place)).status_code == 200


async def test_a_run_that_never_started_has_no_expired_events(client: httpx.AsyncClient, database: Database) -> None:
    run = (await post_run(database, "graph")).run
    await query(
        database,
        "UPDATE run SET status = 'interrupted', ready_at = NULL, finished_at = now() WHERE run_id = %s RETURNING 1",
        run["run_id"],
    )
    path = f"/threads/{run['thread_id']}/runs/{run['run_id']}/stream"
    assert (await client.get(path, headers={"last-event-id": "2"})).status_code == 200


async def test_a_new_run_is_watched_from_where_the_thread_is(database: Database) -> None:
    """Not from the thread's beginning: its history may be long, and none of it is the run's."""
    thread_id, _ = await finished_run(database, 5, 10)
    await query(database, "UPDATE thread SET last_seq = 6 WHERE thread_id = %s RETURNING 1", thread_id)
    created = await post_run(database, "graph", thread_id=thread_id)
    assert created.run["first_seq"] == 7
    assert (await post_run(database, "graph")).run["first_seq"] == 1

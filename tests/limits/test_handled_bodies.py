"""Complete bodies and messages: how many of them are handled at once is bounded by their bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from holdfast.api.body_turns import BodyTurns
from tests.limits.target import MEGABYTE, Target, target
from tests.support.json_body import JSON
from tests.support.waiting import until

# An eighth of it is handled at once.
LIMITS = {"MAX_BUFFERED_BYTES": str(64 * MEGABYTE), "MAX_BODY_BYTES": str(12 * MEGABYTE)}


# A thread that a graph has left large values in.
LARGE_THREAD = """
UPDATE holdfast.thread SET metadata = '{"graph_id": "reply"}',
       "values" = jsonb_build_object('text', (SELECT jsonb_agg('ab'::text) FROM generate_series(1, 600000)))
WHERE thread_id = %s
"""
WAITING_FOR_LOCK = """
SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


@pytest.fixture
async def web(database_url: str, tmp_path: Path) -> AsyncIterator[Target]:
    async with target(database_url, tmp_path, LIMITS) as found:
        yield found


@contextmanager
def locked(database_url: str, thread_id: str) -> Iterator[None]:
    """No run is created in a thread for as long as the block lasts: who asks for one has to wait."""
    with psycopg.connect(database_url) as connection:
        connection.execute("SELECT FROM holdfast.thread WHERE thread_id = %s FOR UPDATE", (thread_id,))
        yield


async def waits_for_lock(web: Target) -> None:
    """Until a request of the web process is being handled, as far as the lock lets it."""

    async def waiting() -> bool:
        return bool(await web.fleet.query(WAITING_FOR_LOCK))

    await until(waiting, "a session waits for the lock")


async def new_thread(web: Target) -> str:
    thread_id: str = (await web.fleet.client.post(f"{web.member.url}/threads", json={})).json()["thread_id"]
    return thread_id


def run(size: int) -> bytes:
    return json.dumps({"assistant_id": "reply", "input": {"text": "x" * size}}).encode()


async def test_large_bodies_are_parsed_one_after_another(web: Target) -> None:
    """A list of short texts takes almost twenty times its bytes when it is parsed."""
    body = json.dumps({"metadata": {"a": ["ab"] * 600_000}}, separators=(",", ":")).encode()

    async def send() -> int:
        return (await web.fleet.client.post(f"{web.member.url}/threads", content=body, headers=JSON)).status_code

    assert await send() == 200
    before = web.memory
    web.forget_peak()
    assert await asyncio.gather(*(send() for _ in range(16))) == [200] * 16
    grown = web.peak_memory - before
    assert grown < 350 * MEGABYTE, f"grew by {grown // MEGABYTE} MB"


async def test_large_body_waits_while_others_are_handled(web: Target, database_url: str) -> None:
    thread_id, other_id = await new_thread(web), await new_thread(web)

    async def create(thread_id: str, size: int) -> int:
        url = f"{web.member.url}/threads/{thread_id}/runs"
        return (await web.fleet.client.post(url, content=run(size), headers=JSON)).status_code

    with locked(database_url, thread_id):
        first = asyncio.create_task(create(thread_id, 7 * MEGABYTE))
        await waits_for_lock(web)
        second = asyncio.create_task(create(other_id, 7 * MEGABYTE))
        assert await create(other_id, 1000) == 200
        done, _ = await asyncio.wait({first, second}, timeout=1)
        assert not done
    assert [await first, await second] == [200, 200]
    assert await create(other_id, 7 * MEGABYTE) == 200


async def test_client_that_leaves_gives_its_turn_to_others(web: Target, database_url: str) -> None:
    thread_id, other_id = await new_thread(web), await new_thread(web)
    body = run(7 * MEGABYTE)
    head = (
        f"POST /threads/{thread_id}/runs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with locked(database_url, thread_id):
        clients = [await web.connect() for _ in range(3)]
        for client in clients:
            await client.send(head.encode() + body)
        await waits_for_lock(web)
        for client in clients:
            client.close()
    async with asyncio.timeout(30):
        url = f"{web.member.url}/threads/{other_id}/runs"
        assert (await web.fleet.client.post(url, content=body, headers=JSON)).status_code == 200


async def test_large_messages_that_are_handled_are_bounded(web: Target, database_url: str) -> None:
    thread_id = await new_thread(web)
    url = f"{web.member.url.replace('http', 'ws')}/threads/{thread_id}/stream/events"
    params = {"assistant_id": "reply", "input": {"text": "x" * 5 * MEGABYTE}}
    start = json.dumps({"id": 1, "method": "run.start", "params": params})
    async with connect(url) as first, connect(url) as second, connect(url) as third:
        with locked(database_url, thread_id):
            await first.send(start)
            await waits_for_lock(web)
            await second.send(start)
            with pytest.raises(ConnectionClosed) as closed:
                async with asyncio.timeout(30):
                    await second.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1013
        assert json.loads(await first.recv())["type"] == "success"
        await third.send(start)
        assert json.loads(await third.recv())["type"] == "success"


async def test_requests_do_not_hold_the_values_of_a_thread_that_they_do_not_show(
    web: Target, database_url: str
) -> None:
    """They take almost twenty times their bytes when they are parsed, and a request may wait for the database."""
    thread_id = await new_thread(web)
    with psycopg.connect(database_url) as connection:
        connection.execute(LARGE_THREAD, (thread_id,))
    thread = f"{web.member.url}/threads/{thread_id}"

    async def send(method: str, **params: Any) -> str:
        body = {"id": 1, "method": method, "params": params}
        answer = await web.fleet.client.post(f"{thread}/commands", json=body)
        assert answer.json().get("error") in (None, "no_such_interrupt", "no_such_run"), answer.text
        return method

    run = {"assistant_id": "reply", "input": {}}
    asked = {"interrupt_id": "x", "response": 1}
    before = web.memory
    web.forget_peak()
    for method, params in (("agent.getTree", {}), ("run.start", run), ("input.respond", asked)):
        await asyncio.gather(*(send(method, **params) for _ in range(20)))
    answers = await asyncio.gather(*map(web.fleet.client.get, [f"{thread}/state"] * 20))
    assert {answer.status_code for answer in answers} == {200}
    grown = web.peak_memory - before
    assert grown < 150 * MEGABYTE, f"grew by {grown // MEGABYTE} MB"


async def test_large_rows_are_not_held_by_requests_that_wait_for_the_database(web: Target) -> None:
    large = ["ab"] * 600_000
    url, client = web.member.url, web.fleet.client
    run = {"assistant_id": "reply", "after_seconds": 3600, "input": {"text": large}}
    created = (await client.post(f"{url}/runs", json=run)).json()
    body = {"graph_id": "reply", "context": {"text": large}}
    assistant_id = (await client.post(f"{url}/assistants", json=body)).json()["assistant_id"]
    before = web.memory
    web.forget_peak()
    for path in (f"/runs/{created['run_id']}", f"/threads/{created['thread_id']}/runs/{created['run_id']}"):
        answers = await asyncio.gather(*map(client.get, [f"{url}{path}"] * 30))
        assert {answer.json()["status"] for answer in answers} == {"pending"}
    answers = await asyncio.gather(*map(client.post, [f"{url}/assistants/{assistant_id}/versions"] * 30))
    assert {answer.status_code for answer in answers} == {200}
    grown = web.peak_memory - before
    assert grown < 550 * MEGABYTE, f"grew by {grown // MEGABYTE} MB"


@pytest.mark.parametrize("batch", [False, True], ids=["runs", "batches"])
async def test_runs_of_a_large_assistant_are_made_a_few_at_a_time(web: Target, batch: bool) -> None:
    url, client = web.member.url, web.fleet.client
    large = {"graph_id": "reply", "context": {"text": ["ab"] * 600_000}}
    assistant_id = (await client.post(f"{url}/assistants", json=large)).json()["assistant_id"]
    run = {"assistant_id": assistant_id, "after_seconds": 3600, "input": {}}

    async def create() -> int:
        path, body = ("/runs/batch", [run]) if batch else ("/runs", run)
        # The last of thirty waits for the others, a few of which are made at a time. On a slow machine, after a minute,
        # it is told to come again.
        answer = await client.post(f"{url}{path}", json=body, timeout=180)
        return answer.status_code

    assert await create() == 200
    before = web.memory
    web.forget_peak()
    assert {200} <= set(await asyncio.gather(*(create() for _ in range(30)))) <= {200, 503}
    grown = web.peak_memory - before
    assert grown < 900 * MEGABYTE, f"grew by {grown // MEGABYTE} MB"


def test_turns_come_in_order_and_one_alone_has_any_size() -> None:
    turns, started = BodyTurns(10), list[str]()

    def begin(name: str, size: int) -> bool:
        return turns.begin(name, size, lambda: started.append(name))

    assert begin("a", 100)
    assert not begin("b", 5)
    assert not begin("c", 6)
    assert not begin("d", 1)
    turns.end("a")
    assert started == ["a", "b"]
    turns.end("b")
    assert started == ["a", "b", "c", "d"]
    assert not begin("e", 9)
    turns.end("e")
    assert started[-1] == "e"
    for name in "cd":
        turns.end(name)
    assert begin("f", 10)

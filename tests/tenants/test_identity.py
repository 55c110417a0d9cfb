"""Under which identity a request is carried out, and for how long the key that it shows counts."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest

from tests.tenants.conftest import House
from tests.tenants.test_keys import becomes

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_SECONDS = 30.0
LATER = {"assistant_id": "echo", "after_seconds": 3600}
CRON = {"assistant_id": "echo", "schedule": "0 0 1 1 *", "input": {"n": 1}}
GIVE_UP = """
UPDATE run SET status = 'error', ready_at = NULL, finished_at = now(), dead_letter = 'retries_exhausted',
               error = '{"error": "ConnectionError", "message": "refused"}'
WHERE run_id = %s RETURNING run_id
"""


async def two_of_a_tenant(house: House) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
    """Two keys that see the same threads and crons. Every request forwards its id to the runs that it creates."""
    creator, other = await house.tenant("shared"), await house.tenant("shared")
    for client, name in ((creator, "creator"), (other, "other")):
        client.headers["x-request-id"] = name
        await becomes(client, 200)
    return creator, other


async def identity(client: httpx.AsyncClient) -> str:
    """The user that runs of this client have."""
    run = (await client.post("/runs", json=LATER)).json()
    return str(run["kwargs"]["config"]["configurable"]["user_id"])


async def dead_letter(house: House, client: httpx.AsyncClient) -> str:
    thread = (await client.post("/threads", json={})).json()["thread_id"]
    run: str = (await client.post(f"/threads/{thread}/runs", json={**LATER, "input": {"n": 1}})).json()["run_id"]
    await house.query(GIVE_UP, run)
    return run


@pytest.mark.parametrize(
    ("body", "runs_as"), [({"from": "start", "input": {"n": 2}}, "other"), ({"from": "start"}, "creator")]
)
async def test_retry_with_another_input_runs_as_its_caller(house: House, body: dict[str, Any], runs_as: str) -> None:
    creator, other = await two_of_a_tenant(house)
    letter = await dead_letter(house, creator)
    retried = await other.post(f"/dead-letters/{letter}/retry", json=body)
    assert retried.status_code == 200, retried.text
    [row] = await house.query("SELECT kwargs FROM run WHERE run_id = %s", retried.json()["run_id"])
    expected = await identity(other if runs_as == "other" else creator)
    assert row["kwargs"]["user"]["identity"] == expected
    assert row["kwargs"]["forwarded"]["langgraph_request_id"] == runs_as
    assert row["kwargs"]["input"] == body.get("input", {"n": 1})


@pytest.mark.parametrize(
    ("patch", "runs_as"),
    [
        ({"input": {"n": 2}}, "other"),
        ({"input": {"n": True}}, "other"),
        ({"config": {"configurable": {"a": 1}}}, "other"),
        ({"webhook": "https://example.com/hook", "enabled": False}, "other"),
        ({"input": {"n": 1}, "schedule": "0 0 2 1 *"}, "creator"),
        ({"enabled": False, "timezone": "Europe/Berlin", "end_time": None, "metadata": {"a": 1}}, "creator"),
    ],
    ids=str,
)
async def test_cron_runs_as_the_last_who_changed_what_it_runs(
    house: House, patch: dict[str, Any], runs_as: str
) -> None:
    creator, other = await two_of_a_tenant(house)
    cron = (await creator.post("/runs/crons", json=CRON)).json()["cron_id"]
    patched = await other.patch(f"/runs/crons/{cron}", json=patch)
    assert patched.status_code == 200, patched.text
    [row] = await house.query("SELECT template FROM cron WHERE cron_id = %s", cron)
    expected = await identity(other if runs_as == "other" else creator)
    assert patched.json()["user_id"] == expected
    assert row["template"]["kwargs"]["user"]["identity"] == expected
    assert row["template"]["kwargs"]["forwarded"]["langgraph_request_id"] == runs_as


@pytest.mark.parametrize("path", ["/threads", "/threads/{}/runs", "/threads/{}/runs/stream", "/assistants"])
async def test_repeated_request_needs_the_scope_of_the_first(house: House, path: str) -> None:
    key = await house.key("acme")
    client = await house.client(**{"x-api-key": key})
    await becomes(client, 200)
    thread = (await client.post("/threads", json={})).json()["thread_id"]
    body = {"graph_id": "echo"} if path == "/assistants" else LATER
    headers = {"Idempotency-Key": str(uuid4())}

    async def sent() -> int:
        async with client.stream("POST", path.format(thread), json=body, headers=headers) as answer:
            return answer.status_code

    assert [await sent(), await sent()] == [200, 200]
    await house.query("UPDATE api_key SET scopes = '{read}' WHERE prefix = %s RETURNING 1", key[:9])
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await client.post("/threads", json={})).status_code != 403:
            await asyncio.sleep(0.05)
    assert await sent() == 403


@pytest.mark.parametrize(
    ("method", "path", "more"),
    [("POST", "/threads", ""), ("POST", "/assistants", ""), ("POST", "/threads", "idempotency-key: unfinished\r\n")],
)
async def test_revoked_key_creates_nothing_by_a_body_that_it_left_unfinished(
    house: House, method: str, path: str, more: str
) -> None:
    key = await house.key("unfinished")
    client = await house.client(**{"x-api-key": key})
    await becomes(client, 200)
    body = orjson.dumps({"graph_id": "echo", "metadata": {"unfinished": True}})
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\nx-api-key: {key}\r\n{more}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", house.settings.port)
    try:
        writer.write(head.encode() + body[:5])
        await writer.drain()
        await becomes(client, 200)  # The server has read the head by then.
        await house.revoke(key)
        await becomes(client, 401)
        writer.write(body[5:])
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
    finally:
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 401 "), answer
    assert b"was revoked" in answer
    assert b"www-authenticate: Bearer" in answer
    for table in ("thread", "assistant"):
        assert await house.query(f"SELECT 1 FROM {table} WHERE tenant_id = 'unfinished'") == []

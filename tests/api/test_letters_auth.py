"""Letters and keys of somebody else: neither to be seen nor to be used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.support.records import query
from tests.support.serving import answering

PROJECT = Path(__file__).parents[1] / "support" / "auth_project" / "langgraph.json"

# As if it had failed. It has no thread-mates, so nothing else has to be told.
GIVE_UP = """
UPDATE run SET status = 'error', ready_at = NULL, finished_at = now(), dead_letter = 'retries_exhausted',
               error = '{"error": "ConnectionError", "message": "refused"}'
WHERE run_id = %s RETURNING run_id
"""


@pytest.fixture
async def users(settings: Settings) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with answering(settings, GraphCatalog.load(load_config(PROJECT))) as server:
        clients = [
            httpx.AsyncClient(base_url=server.base_url, headers={"authorization": f"Bearer {user}"}, timeout=30)
            for user in ("alice", "bob")
        ]
        yield clients
        for client in clients:
            await client.aclose()


async def created(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    body = {"assistant_id": GRAPH, "input": {}, "if_not_exists": "create"}
    return await client.post(f"/threads/{uuid4()}/runs", json=body, headers=headers)


GRAPH = next(iter(load_config(PROJECT).graphs))


async def test_a_letter_is_for_those_who_see_its_thread(users: list[httpx.AsyncClient], database: Database) -> None:
    alice, bob = users
    run: dict[str, Any] = (await created(alice)).json()
    await query(database, GIVE_UP, run["run_id"])
    path = f"/dead-letters/{run['run_id']}"
    assert (await bob.get("/dead-letters")).json() == []
    everything = {"all": True}
    assert (await bob.post("/dead-letters/retry", json=everything)).json()["runs"] == []
    assert (await bob.post("/dead-letters/discard", json=everything)).json()["runs"] == []
    for response in (
        await bob.get(path),
        await bob.post(f"{path}/retry", json={}),
        await bob.post(f"{path}/discard"),
        await bob.delete(path),
    ):
        assert response.status_code == 404
        assert "thread" not in response.json()["detail"].lower()
    assert [letter["run_id"] for letter in (await alice.get("/dead-letters")).json()] == [run["run_id"]]
    retried = (await alice.post(f"{path}/retry", json={})).json()
    # The run is still the one's who made it.
    assert retried["kwargs"]["config"]["configurable"]["user_id"] == "alice"
    assert (await bob.get(f"/runs/{retried['run_id']}")).status_code == 404


async def test_a_key_is_its_users_own(users: list[httpx.AsyncClient], database: Database) -> None:
    alice, bob = users
    thread = {"metadata": {"a": 1}}
    headers = {"Idempotency-Key": "the-same"}
    answers = [await client.post("/threads", json=thread, headers=headers) for client in (alice, bob, alice)]
    assert [answer.status_code for answer in answers] == [200] * 3
    ids = [answer.json()["thread_id"] for answer in answers]
    assert ids[0] == ids[2] != ids[1]
    assert ["idempotency-replayed" in answer.headers for answer in answers] == [False, False, True]
    stranger = await alice.post("/threads", json=thread, headers={**headers, "authorization": "Bearer mallory"})
    assert stranger.status_code == 403


@pytest.mark.parametrize("what", ["threads/{}/runs/stream", "threads/{}/runs", "threads"])
async def test_repeated_request_is_refused_when_what_it_created_is_another_users(
    users: list[httpx.AsyncClient], database: Database, what: str
) -> None:
    _, bob = users
    thread_id = str(uuid4())
    run = {"assistant_id": GRAPH, "input": {}, "if_not_exists": "create", "after_seconds": 3600}
    body: dict[str, Any] = {"thread_id": thread_id} if what == "threads" else run
    headers = {"Idempotency-Key": "k"}

    async def sent() -> tuple[int, bool]:
        async with bob.stream("POST", f"/{what.format(thread_id)}", json=body, headers=headers) as answer:
            return answer.status_code, "idempotency-replayed" in answer.headers

    assert await sent() == (200, False)
    assert await sent() == (200, True)
    give = 'UPDATE thread SET metadata = \'{"owner": "alice"}\' WHERE thread_id = %s RETURNING 1'
    await query(database, give, thread_id)
    assert await sent() == (404, False)
    await query(database, "DELETE FROM run WHERE thread_id = %s RETURNING 1", thread_id)
    assert await sent() == (404, False)

"""`Idempotency-Key`: what is sent twice is created once, and answered as it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from holdfast.api.idempotency import CREATING
from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.api.test_runs import thread, until
from tests.support import waiting
from tests.support.databases import own_database
from tests.support.json_body import JSON
from tests.support.servers import free_port
from tests.support.serving import serving
from tests.support.smoke import EXAMPLES

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICK = {"assistant_id": "steps", "input": {"seconds": 0}}
LATER = {"assistant_id": "steps", "input": {"seconds": 0}, "after_seconds": 3600}
SLOW = {"assistant_id": "steps", "input": {"seconds": 3600}}
CRON = {**QUICK, "schedule": "0 0 1 1 *"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(server_url: str) -> AsyncIterator[tuple[httpx.AsyncClient, Settings]]:
    """A server and a worker that does not look for runs by itself: it has to hear of them."""
    with own_database(server_url) as database_url:
        environ = {"POSTGRES_POLL_INTERVAL_SECONDS": "60", "HOLDFAST_STREAM_HEARTBEAT_SECONDS": "0.2"}
        settings = load_settings(environ, database_url=database_url, port=free_port())
        async with serving(settings, GraphCatalog.load(load_config(EXAMPLES))) as client:
            yield client, settings


@pytest.fixture
def web(served: tuple[httpx.AsyncClient, Settings]) -> httpx.AsyncClient:
    return served[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def database(served: tuple[httpx.AsyncClient, Settings]) -> AsyncIterator[Database]:
    opened = Database(served[1], "test")
    await opened.open()
    yield opened
    await opened.close()


def key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid4())}


async def count(database: Database, table: str) -> int:
    async with database.connection() as connection:
        row = await (await connection.execute(f"SELECT count(*) AS found FROM {table}".encode())).fetchone()
    assert row is not None
    return int(row["found"])


async def is_known(database: Database, headers: dict[str, str]) -> bool:
    async with database.connection() as connection:
        found = await connection.execute("SELECT FROM idempotency_key WHERE key = %s", (headers["Idempotency-Key"],))
        return await found.fetchone() is not None


async def both(web: httpx.AsyncClient, path: str, body: Any) -> tuple[httpx.Response, httpx.Response]:
    """The same request twice. The second must be told as a repetition, and the first must not."""
    headers = key()
    first = await web.post(path, json=body, headers=headers)
    second = await web.post(path, json=body, headers=headers)
    assert first.is_success, first.text
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert second.status_code == first.status_code
    for name in ("content-location", "location", "content-type"):
        assert second.headers.get(name) == first.headers.get(name)
    return first, second


@pytest_asyncio.fixture(loop_scope="module")
async def place(web: httpx.AsyncClient) -> str:
    return await thread(web)


@pytest.mark.parametrize(
    ("path", "body", "table"),
    [
        ("/threads", {"metadata": {"a": 1}}, "thread"),
        ("/threads/{place}/copy", {}, "thread"),
        ("/assistants", {"graph_id": "steps"}, "assistant"),
        ("/runs/crons", CRON, "cron"),
        ("/threads/{place}/runs/crons", CRON, "cron"),
        ("/threads/{place}/runs", LATER, "run"),
        ("/runs", LATER, "run"),
        ("/runs/batch", [LATER, LATER], "run"),
    ],
)
async def test_what_is_sent_twice_is_created_once(
    web: httpx.AsyncClient, database: Database, place: str, path: str, body: Any, table: str
) -> None:
    before = await count(database, table)
    first, second = await both(web, path.format(place=place), body)
    assert second.content == first.content
    assert await count(database, table) - before == (len(body) if isinstance(body, list) else 1)


@pytest.mark.parametrize(
    ("stored", "status"), [(b'{"metadata": {"a": "a\\ud800b"}}', 200), (b"{", 410), (b"\xff\xfe", 410), (b"5", 200)]
)
async def test_stored_answer_of_any_shape_is_repeated_or_refused(
    web: httpx.AsyncClient, database: Database, stored: bytes, status: int
) -> None:
    headers = key()
    assert (await web.post("/threads", json={}, headers=headers)).is_success
    async with database.connection() as connection:
        change = "UPDATE idempotency_key SET body = %s WHERE key = %s"
        await connection.execute(change, (stored, headers["Idempotency-Key"]))
    again = await web.post("/threads", json={}, headers=headers)
    assert again.status_code == status, again.text
    assert (again.content == stored) == (status == 200)


async def test_a_repeated_wait_gives_the_result_of_the_same_run(web: httpx.AsyncClient, database: Database) -> None:
    before = await count(database, "run")
    first, second = await both(web, f"/threads/{await thread(web)}/runs/wait", QUICK)
    assert second.json() == first.json()
    assert first.json()["done"]
    stateless, repeated = await both(web, "/runs/wait", QUICK)
    assert repeated.json() == stateless.json()
    assert await count(database, "run") - before == 2


@pytest.mark.parametrize("stateless", [False, True])
async def test_a_repeated_stream_is_the_same_runs_from_its_start(
    web: httpx.AsyncClient, database: Database, stateless: bool
) -> None:
    before = await count(database, "run")
    path = "/runs/stream" if stateless else f"/threads/{await thread(web)}/runs/stream"
    first, second = await both(web, path, QUICK)
    assert [line for line in second.text.splitlines() if line[:2] != ": "] == [
        line for line in first.text.splitlines() if line[:2] != ": "
    ]
    assert "event: values" in first.text
    assert await count(database, "run") - before == 1


async def test_a_command_that_starts_a_run_starts_one(web: httpx.AsyncClient, database: Database) -> None:
    before = await count(database, "run")
    path = f"/threads/{uuid4()}/commands"
    start = {"id": 1, "method": "run.start", "params": {"assistant_id": "steps", "input": {"seconds": 0}}}
    first, second = await both(web, path, start)
    assert second.json() == first.json()
    assert first.json()["type"] == "success"
    assert await count(database, "run") - before == 1


async def test_a_command_that_is_refused_does_not_use_up_its_key(web: httpx.AsyncClient, database: Database) -> None:
    headers = key()
    place = await thread(web)
    path = f"/threads/{place}/commands"
    await web.post(f"/threads/{place}/runs", json=LATER)
    # This one has locked the thread before it is refused.
    busy = {"assistant_id": "steps", "input": {}, "multitask_strategy": "reject"}
    for params in ({"assistant_id": "nobody", "input": {}}, busy):
        refused = await web.post(path, json={"id": 1, "method": "run.start", "params": params}, headers=headers)
        assert refused.json()["type"] == "error"
    assert not await is_known(database, headers)
    right = {"id": 1, "method": "run.start", "params": {"assistant_id": "steps", "input": {}}}
    answer = await web.post(path, json=right, headers=headers)
    assert (answer.json()["type"], "idempotency-replayed" in answer.headers) == ("success", False)
    # One that only reads has nothing to remember either.
    tree = {"id": 2, "method": "agent.getTree", "params": {}}
    headers = key()
    for _ in range(2):
        answer = await web.post(path, json=tree, headers=headers)
        assert (answer.json()["type"], "idempotency-replayed" in answer.headers) == ("success", False)


async def test_a_repeated_update_of_the_state_is_one_update(web: httpx.AsyncClient) -> None:
    place = await thread(web)
    await web.post(f"/threads/{place}/runs/wait", json=QUICK)
    _, second = await both(web, f"/threads/{place}/state", {"values": {"done": ["by hand"]}, "as_node": "s5"})
    state = (await web.get(f"/threads/{place}/state")).json()
    assert state["values"]["done"].count("by hand") == 1
    assert state["checkpoint"]["checkpoint_id"] == second.json()["checkpoint"]["checkpoint_id"]


async def test_a_key_belongs_to_one_request(web: httpx.AsyncClient, database: Database, place: str) -> None:
    before = await count(database, "run")
    headers = key()
    path = f"/threads/{place}/runs"
    assert (await web.post(path, json=LATER, headers=headers)).status_code == 200
    for other_path, other_body in [
        (path, QUICK),
        ("/runs", LATER),
        (f"{path}/stream", LATER),
        (f"/threads/{await thread(web)}/runs", LATER),
    ]:
        refused = await web.post(other_path, json=other_body, headers=headers)
        assert refused.status_code == 422
        assert "another request" in refused.json()["detail"]
    # The same said in another order is the same.
    again = await web.post(path, json=dict(reversed(LATER.items())), headers=headers)
    assert again.headers["idempotency-replayed"] == "true"
    assert await count(database, "run") - before == 1


@pytest.mark.parametrize(
    "wrong", ["", "x" * 256, "with space", b"\xc3\xa4", b"tab\tinside"], ids=["empty", "long", "space", "umlaut", "tab"]
)
async def test_what_cannot_be_a_key_is_refused(web: httpx.AsyncClient, database: Database, wrong: str | bytes) -> None:
    before = await count(database, "thread")
    response = await web.post("/threads", json={}, headers=[("Idempotency-Key", wrong)])  # type: ignore[arg-type]
    assert response.status_code == 422
    assert "Idempotency-Key" in response.json()["detail"]
    twice = [("Idempotency-Key", "one"), ("Idempotency-Key", "two")]
    assert (await web.post("/threads", json={}, headers=twice)).status_code == 422
    assert await count(database, "thread") - before == 0
    assert (await web.post("/threads", json={}, headers={"Idempotency-Key": "x" * 255})).status_code == 200


async def test_duplicates_at_the_same_moment_are_one(web: httpx.AsyncClient, database: Database, place: str) -> None:
    before = await count(database, "run")
    headers = key()
    path = f"/threads/{place}/runs"
    # While this holds the thread, none of them can finish: the first is in the middle, the others behind it.
    async with database.transaction() as connection:
        await connection.execute("SELECT FROM thread WHERE thread_id = %s FOR UPDATE", (place,))
        posts = [asyncio.create_task(web.post(path, json=LATER, headers=headers)) for _ in range(6)]

        async def blocked() -> bool:
            statement = (
                "SELECT count(*) AS found FROM pg_locks JOIN pg_stat_activity USING (pid) "
                "WHERE NOT granted AND locktype = 'advisory' AND datname = current_database()"
            )
            async with database.connection() as other:
                row = await (await other.execute(statement)).fetchone()
            return row is not None and row["found"] >= 5

        await waiting.until(blocked, "five of them wait for the first")
    answers = await asyncio.gather(*posts)
    assert [answer.status_code for answer in answers] == [200] * 6
    assert len({answer.json()["run_id"] for answer in answers}) == 1
    assert sorted("idempotency-replayed" in answer.headers for answer in answers) == [False] + [True] * 5
    assert await count(database, "run") - before == 1


async def test_what_failed_does_not_use_up_its_key(web: httpx.AsyncClient, database: Database, place: str) -> None:
    headers = key()
    path = f"/threads/{place}/runs"
    reject = {**LATER, "multitask_strategy": "reject"}
    busy = (await web.post(path, json=LATER)).json()
    assert (await web.post(path, json=reject, headers=headers)).status_code == 409
    assert (await web.post(path, json={**LATER, "assistant_id": "nobody"}, headers=headers)).status_code in (404, 422)
    assert (await web.post(path, content=b"{", headers={**JSON, **headers})).status_code == 422
    assert (await web.post(f"/threads/{uuid4()}/runs", json=LATER, headers=headers)).status_code == 404
    assert not await is_known(database, headers)
    await web.post(f"{path}/{busy['run_id']}/cancel")
    created = await web.post(path, json=reject, headers=headers)
    assert (created.status_code, "idempotency-replayed" in created.headers) == (200, False)


async def test_a_batch_with_a_key_is_all_or_nothing(web: httpx.AsyncClient, database: Database) -> None:
    before = await count(database, "run")
    headers = key()
    assert (await web.post("/runs/batch", json=[LATER, {"assistant_id": "nobody"}], headers=headers)).is_client_error
    assert await count(database, "run") == before
    assert not await is_known(database, headers)


async def test_an_expired_key_is_a_new_one(web: httpx.AsyncClient, database: Database, place: str) -> None:
    headers = key()
    path = f"/threads/{place}/runs"
    first = (await web.post(path, json=LATER, headers=headers)).json()
    async with database.connection() as connection:
        await connection.execute("UPDATE idempotency_key SET created_at = now() - interval '2 days'")
    second = await web.post(path, json=QUICK, headers=headers)
    assert (second.status_code, "idempotency-replayed" in second.headers) == (200, False)
    assert second.json()["run_id"] != first["run_id"]
    again = await web.post(path, json=QUICK, headers=headers)
    assert again.json()["run_id"] == second.json()["run_id"]


async def test_a_run_that_is_gone_is_not_created_again(web: httpx.AsyncClient, database: Database) -> None:
    before = await count(database, "run")
    headers = key()
    place = await thread(web)
    path = f"/threads/{place}/runs/wait"
    assert (await web.post(path, json=QUICK, headers=headers)).status_code == 200
    assert (await web.delete(f"/threads/{place}")).status_code == 204
    gone = await web.post(path, json=QUICK, headers=headers)
    assert gone.status_code == 410
    assert await count(database, "run") - before == 0


async def test_reads_ignore_the_header(web: httpx.AsyncClient, database: Database) -> None:
    headers = key()
    path = "/threads/count"
    before = (await web.post(path, json={}, headers=headers)).json()
    await thread(web)
    assert (await web.post(path, json={}, headers=headers)).json() == before + 1
    assert not await is_known(database, headers)


async def test_every_creating_route_says_that_it_takes_the_header(web: httpx.AsyncClient) -> None:
    paths = (await web.get("/openapi.json")).json()["paths"]
    told = {
        path
        for path, operations in paths.items()
        for operation in operations.values()
        if [parameter["name"] for parameter in operation.get("parameters", ())].count("Idempotency-Key") == 1
    }
    assert told == set(CREATING)


async def test_a_run_that_is_followed_by_its_repeated_stream_is_cancelled_only_when_asked(
    web: httpx.AsyncClient,
) -> None:
    headers = key()
    path = f"/threads/{await thread(web)}/runs/stream"
    for _ in range(2):
        async with web.stream("POST", path, json=SLOW, headers=headers) as response:
            place = response.headers["content-location"]
            async for line in response.aiter_lines():
                if line.startswith("event: metadata"):
                    break
    await until(web, place, status="running")
    await web.post(f"{place}/cancel?wait=1")
    headers = key()
    body = {**SLOW, "on_disconnect": "cancel"}
    async with web.stream("POST", path, json=body, headers=headers) as first:
        place = first.headers["content-location"]
        async with web.stream("POST", path, json=body, headers=headers) as second:
            assert second.headers["content-location"] == place
        await until(web, place, status="interrupted")


async def test_a_stream_that_follows_is_repeated_as_one(client: httpx.AsyncClient) -> None:
    thread_id = (await client.post("/threads", json={})).json()["thread_id"]
    body = {"assistant_id": "echo", "input": {"messages": [{"role": "user", "content": "hello"}]}}
    for kind in ("stream", "wait"):
        headers = {"idempotency-key": f"follow-{kind}"}
        url = f"/threads/{thread_id}/runs/{kind}?follow=true"
        first, again = [await client.post(url, json=body, headers=headers) for _ in range(2)]
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["location"] == first.headers["location"]
        assert "follow=true" in again.headers["location"]

"""The express way answers as FastAPI's does: the same status, headers and body, for what is good and what is not."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import uuid4

import httpx
import orjson
import psycopg
import pytest
import pytest_asyncio
from fastapi import FastAPI
from starlette.types import Message
from structlog.testing import capture_logs

from holdfast.api import runs
from holdfast.api.app import build_app
from holdfast.api.express import Express
from holdfast.auth.keys import KeyAuth
from holdfast.auth.known_keys import Roster
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.graphs.http import HttpSection
from holdfast.settings import load_settings
from tests.conformance.server import own_database
from tests.support.http_project import context, project
from tests.support.json_body import JSON
from tests.support.servers import free_port
from tests.support.serving import serving
from tests.support.smoke import EXAMPLES

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 100_000
NOWHERE = load_settings({}, database_url="postgresql://nowhere.invalid/none")
ID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00")
PATHS = ("/threads", "/runs", "/runs/wait", "/runs/stream")
OF_THREAD = ("/threads/{}/runs", "/threads/{}/runs/wait", "/threads/{}/runs/stream")
# Nothing of this is read by a route, and with a query no request goes the express way.
LONG_WAY = "?long=way"

RUN: dict[str, Any] = {"assistant_id": "echo", "input": {"messages": [{"role": "user", "content": "hello"}]}}
GOOD_RUNS: dict[str, dict[str, Any]] = {
    "least": RUN,
    "nulls": {**RUN, "metadata": None, "config": None, "webhook": None, "stream_mode": None},
    "unknown fields": {**RUN, "assistantId": "echo", "what": [1]},
    "all kinds": {
        **RUN,
        "metadata": {"a": 1, "run_id": "mine"},
        "config": {"tags": ["t"], "recursion_limit": 7, "configurable": {"b": 2}, "metadata": {"c": 3}},
        "stream_mode": ["updates", "values"],
        "durability": "sync",
        "on_disconnect": "cancel",
        "multitask_strategy": "enqueue",
        "priority": 3,
        "max_steps": 9,
    },
}
BAD_RUNS: dict[str, Any] = {
    "no assistant": {},
    "wrong types": {**RUN, "priority": "5", "config": 1, "stream_mode": ["x"], "after_seconds": True},
    "unknown assistant": {**RUN, "assistant_id": str(uuid4())},
    "unknown graph": {**RUN, "assistant_id": "nowhere"},
    "both names": {**RUN, "context": {"a": 1}, "config": {"configurable": {"b": 1}}},
    "resumes nothing": {"assistant_id": "echo", "command": {"resume": 1}, "strict_resume": True},
    "NUL": {**RUN, "input": {"messages": "\0"}, "metadata": {"a\0": 1}},
    "NUL in a value": {**RUN, "metadata": {"a": "\0"}},
    "bad webhook": {**RUN, "webhook": "ftp://x"},
    "array": [RUN],
    "null": None,
    "text": "run",
}
BAD_BYTES: dict[str, bytes] = {
    "empty": b"",
    "half": b'{"assistant_id": ',
    "not a number": b'{"assistant_id": "echo", "input": NaN}',
    "lone surrogate": b'{"assistant_id": "\\ud800"}',
    "too deep": b'{"assistant_id": "echo", "input": ' + b"[" * 220 + b"]" * 220 + b"}",
    "too long": b'{"assistant_id": "echo", "input": "' + b"x" * LIMIT + b'"}',
}
GOOD_THREADS: dict[str, Any] = {
    "empty": {},
    "metadata": {"metadata": {"a": [1, None]}, "if_exists": "do_nothing"},
    "ttl": {"ttl": 5},
    "ttl in full": {"ttl": {"ttl": 5.5, "strategy": "delete"}},
}
BAD_THREADS: dict[str, Any] = {
    "wrong types": {"thread_id": 5, "metadata": [], "if_exists": "x"},
    "supersteps of nothing": {"supersteps": [{"updates": []}]},
    "supersteps without a graph": {"supersteps": [{"updates": [{"values": {}, "as_node": "x"}]}]},
    "NUL": {"metadata": {"a\0": 1}},
    "ttl": {"ttl": -1},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with a worker, the same for all tests here."""
    with own_database(server_url) as database_url:
        settings = load_settings({}, database_url=database_url, port=free_port(), max_body_bytes=LIMIT)
        async with serving(settings, GraphCatalog.load(load_config(EXAMPLES))) as found:
            yield found


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of requests that came to FastAPI."""
    seen: list[str] = []
    original = FastAPI.__call__

    async def called(self: FastAPI, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.append(scope["path"])
        await original(self, scope, receive, send)

    monkeypatch.setattr(FastAPI, "__call__", called)
    return seen


def told(response: httpx.Response) -> tuple[int, dict[str, str], str]:
    """What a response says, apart from ids, times, and the length that goes with them."""
    headers = {name: _plain(value) for name, value in response.headers.multi_items() if name != "date"}
    return response.status_code, headers, _plain(response.text)


def _plain(text: str) -> str:
    text = text.replace("\r\n", "\n")
    # Events are numbered, and token by token they may come in other packets.
    return TIME.sub("TIME", ID.sub("ID", text)).replace(": heartbeat\n\n", "")


async def thread_of(client: httpx.AsyncClient) -> str:
    return str((await client.post("/threads", json={})).json()["thread_id"])


async def paths(client: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Every path with an express way for runs, once for each way: in threads alike."""
    stateless = [(path, path + LONG_WAY) for path in PATHS[1:]]
    threads = [(await thread_of(client), await thread_of(client)) for _ in OF_THREAD]
    places = zip(OF_THREAD, threads, strict=True)
    return stateless + [(path.format(one), path.format(other) + LONG_WAY) for path, (one, other) in places]


@pytest.mark.parametrize("body", GOOD_RUNS.values(), ids=GOOD_RUNS)
async def test_good_runs(client: httpx.AsyncClient, general: list[str], body: dict[str, Any]) -> None:
    for short, long in await paths(client):
        general.clear()
        express = await client.post(short, json=body)
        assert general == [], short
        slow = await client.post(long, json=body)
        assert len(general) == 1
        assert express.status_code == 200
        assert told(express) == told(slow), short


@pytest.mark.parametrize("body", BAD_RUNS.values(), ids=BAD_RUNS)
async def test_bad_runs(client: httpx.AsyncClient, body: Any) -> None:
    for short, long in await paths(client):
        express, slow = await client.post(short, json=body), await client.post(long, json=body)
        assert told(express) == told(slow), short
        stateless = not short.startswith("/threads")
        assert 400 <= express.status_code < 500 or (body == BAD_RUNS["resumes nothing"] and not stateless)


@pytest.mark.parametrize("body", BAD_BYTES.values(), ids=BAD_BYTES)
async def test_bad_bytes(client: httpx.AsyncClient, body: bytes) -> None:
    for short, long in [*await paths(client), ("/threads", "/threads" + LONG_WAY)]:
        express = await client.post(short, content=body, headers=JSON)
        slow = await client.post(long, content=body, headers=JSON)
        assert told(express) == told(slow), short


@pytest.mark.parametrize("body", [*GOOD_THREADS.values(), *BAD_THREADS.values()], ids=[*GOOD_THREADS, *BAD_THREADS])
async def test_threads(client: httpx.AsyncClient, general: list[str], body: Any) -> None:
    express = await client.post("/threads", json=body)
    assert (general == []) == (body in GOOD_THREADS.values())
    assert told(express) == told(await client.post("/threads" + LONG_WAY, json=body))
    assert (express.status_code == 200) == (body in GOOD_THREADS.values())


async def test_a_thread_that_is_there_or_not(client: httpx.AsyncClient) -> None:
    thread_id = await thread_of(client)
    for body in ({"thread_id": thread_id}, {"thread_id": thread_id, "if_exists": "do_nothing"}):
        answers = [told(await client.post("/threads" + way, json=body)) for way in ("", LONG_WAY)]
        assert answers[0] == answers[1]
    for path in OF_THREAD:
        nowhere = path.format(uuid4())
        answers = [told(await client.post(nowhere + way, json=RUN)) for way in ("", LONG_WAY)]
        assert answers[0] == answers[1]
        assert answers[0][0] == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},
        {"x-request-id": "mine"},
        {"content-type": "application/json; charset=utf-8"},
        {"content-type": "application/merge-patch+json"},
        {"authorization": "Bearer somebody-elses"},
        {"accept-encoding": "gzip"},
    ],
    ids=lambda headers: "-".join(headers),
)
async def test_headers(client: httpx.AsyncClient, general: list[str], headers: Mapping[str, str]) -> None:
    content = orjson.dumps(RUN)
    express = await client.post("/runs/wait", content=content, headers={**JSON, **headers})
    assert general == []
    slow = await client.post("/runs/wait" + LONG_WAY, content=content, headers={**JSON, **headers})
    assert express.status_code == 200
    assert told(express) == told(slow)


async def test_what_is_out_of_the_ordinary_goes_the_long_way(client: httpx.AsyncClient, general: list[str]) -> None:
    thread_id = await thread_of(client)

    async def parts() -> AsyncIterator[bytes]:
        yield orjson.dumps(RUN)

    key = {"idempotency-key": str(uuid4())}
    first = await client.post("/runs/wait", json=RUN, headers=key)
    again = await client.post("/runs/wait", json=RUN, headers=key)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["content-location"] == first.headers["content-location"]
    assert (await client.post("/runs/wait", content=parts(), headers=JSON)).status_code == 200
    assert (await client.post(f"/threads/{thread_id.upper()}/runs/wait", json=RUN)).status_code == 200
    assert (await client.post(f"/threads/{thread_id.replace('-', '')}/runs/wait", json=RUN)).status_code == 200
    assert (await client.post(f"/threads/{thread_id}/runs/wait?follow=true", json=RUN)).status_code == 200
    assert (await client.post("/runs/wait", content=orjson.dumps(RUN))).status_code == 415
    assert (await client.post("/threads", content=b"")).status_code == 200
    assert (await client.put("/threads", json={})).status_code == 405
    assert (await client.post(f"/threads/{thread_id}/runs/nothing", json=RUN)).status_code in (404, 405)
    assert len(general) == 10


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError, 500), (psycopg.OperationalError, 503)],
    ids=["unexpected", "outage"],
)
async def test_what_is_raised(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, error: type[Exception], status: int
) -> None:
    calls: list[Any] = []

    async def failing(*given: Any, **__: Any) -> Any:
        calls.append(given)
        raise error("nobody expects it")

    monkeypatch.setattr(runs, "described_run", failing)
    for short, long in (await paths(client))[:2]:
        calls.clear()
        with capture_logs() as express_log:
            express = await client.post(short, json=RUN, headers={"origin": "http://localhost:3000"})
        assert len(calls) == 1, "nothing is tried twice"
        with capture_logs() as slow_log:
            slow = await client.post(long, json=RUN, headers={"origin": "http://localhost:3000"})
        assert [line["event"] for line in express_log] == [line["event"] for line in slow_log]
        assert told(express) == told(slow)
        assert express.status_code == status
        assert "access-control-allow-origin" in express.headers


async def test_a_body_that_comes_in_parts_is_read_once() -> None:
    """And FastAPI gets all of it when it has to answer."""
    app = build_app(context(project(), NOWHERE))
    answered: list[Message] = []

    async def send(message: Message) -> None:
        answered.append(message)

    parts = [b'{"metadata": ', b"5", b"}"]
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": part != parts[-1]} for part in parts]

    async def receive() -> Message:
        return messages.pop(0)

    length = str(sum(map(len, parts))).encode()
    await app(_scope("/threads", (b"content-length", length), JSON_TYPE), receive, send)
    assert answered[0]["status"] == 422
    assert b"metadata" in answered[1]["body"]
    assert not messages


async def test_a_request_that_cannot_be_read() -> None:
    """Whether the client has gone, or a layer around the API refuses to hand over its body, FastAPI decides."""

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def refused() -> Message:
        raise ValueError("no more of this")

    app = build_app(context(project(), NOWHERE))
    for receive in (gone, refused):
        answered: list[Message] = []

        async def send(message: Message, answered: list[Message] = answered) -> None:
            answered.append(message)

        await app(_scope("/threads", (b"content-length", b"2"), JSON_TYPE), receive, send)
        assert answered[0]["status"] == 400


JSON_TYPE = (b"content-type", b"application/json")


def _scope(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": list(headers),
        "root_path": "",
    }


async def test_who_has_an_express_way() -> None:
    """Not a server whose project has its own authentication, nor routes that are switched off."""
    web = context(project(), NOWHERE)
    lengthy = (b"content-length", b"2")
    everything = [*PATHS, *(path.format(uuid4()) for path in OF_THREAD)]

    def express(disabled: frozenset[str] = frozenset()) -> list[str]:
        found = build_app(web, HttpSection(disabled=disabled)).express  # type: ignore[attr-defined]
        assert isinstance(found, Express)
        return [path for path in everything if found.find(_scope(path, lengthy, JSON_TYPE)) is not None]

    assert express() == everything
    assert express(frozenset({"threads"})) == everything[1:]
    assert express(frozenset({"runs"})) == ["/threads"]
    web.auth = KeyAuth(Roster(web.database))
    assert express() == everything
    custom = context(project(auth={"path": "./auth.py:auth"}), NOWHERE)
    assert custom.auth is not None
    web.auth = custom.auth
    assert express() == []

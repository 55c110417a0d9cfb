"""The router: which route a request comes to, and that the answer does not depend on how the request is written."""

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
from starlette.routing import Match
from starlette.types import Message
from structlog.testing import capture_logs

from holdfast.api import submit
from holdfast.api.app import ROUTES, build_app, describe
from holdfast.api.router import Router
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.graphs.http import HttpSection
from holdfast.settings import load_settings
from tests.support.databases import own_database
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
# What no route reads changes nothing.
UNKNOWN_QUERY = "?unknown=1"

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


async def places(client: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Each path that creates runs, as it is mostly written and in another form: in threads alike."""
    stateless = [(path, path + UNKNOWN_QUERY) for path in PATHS[1:]]
    threads = [(await thread_of(client), await thread_of(client)) for _ in OF_THREAD]
    pairs = zip(OF_THREAD, threads, strict=True)
    return stateless + [(path.format(one), path.format(other.upper()) + UNKNOWN_QUERY) for path, (one, other) in pairs]


async def in_parts(body: bytes) -> AsyncIterator[bytes]:
    """A body whose length is not declared."""
    size = 1 + len(body) // 3
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def both(client: httpx.AsyncClient, usual: str, other: str, body: bytes) -> httpx.Response:
    """The answer to a body at two places that are to answer alike."""
    first = await client.post(usual, content=body, headers=JSON)
    second = await client.post(other, content=in_parts(body), headers=JSON)
    assert told(first) == told(second), usual
    return first


@pytest.mark.parametrize("body", GOOD_RUNS.values(), ids=GOOD_RUNS)
async def test_run_is_created_at_every_path(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    for usual, other in await places(client):
        assert (await both(client, usual, other, orjson.dumps(body))).status_code == 200


@pytest.mark.parametrize("body", BAD_RUNS.values(), ids=BAD_RUNS)
async def test_bad_run_is_refused_at_every_path(client: httpx.AsyncClient, body: Any) -> None:
    for usual, other in await places(client):
        answer = await both(client, usual, other, orjson.dumps(body))
        stateless = not usual.startswith("/threads")
        assert 400 <= answer.status_code < 500 or (body == BAD_RUNS["resumes nothing"] and not stateless)


@pytest.mark.parametrize("body", BAD_BYTES.values(), ids=BAD_BYTES)
async def test_bad_bytes_are_refused_at_every_path(client: httpx.AsyncClient, body: bytes) -> None:
    for usual, other in [*await places(client), ("/threads", "/threads" + UNKNOWN_QUERY)]:
        answer = await both(client, usual, other, body)
        # An empty body is a thread without metadata.
        assert answer.status_code in (413, 422) or (not body and usual == "/threads")


@pytest.mark.parametrize("body", [*GOOD_THREADS.values(), *BAD_THREADS.values()], ids=[*GOOD_THREADS, *BAD_THREADS])
async def test_thread_bodies(client: httpx.AsyncClient, body: Any) -> None:
    answer = await both(client, "/threads", "/threads" + UNKNOWN_QUERY, orjson.dumps(body))
    assert (answer.status_code == 200) == (body in GOOD_THREADS.values())


async def test_thread_that_exists_or_not(client: httpx.AsyncClient) -> None:
    thread_id = await thread_of(client)
    for body, status in (({"thread_id": thread_id}, 409), ({"thread_id": thread_id, "if_exists": "do_nothing"}, 200)):
        answer = await both(client, "/threads", "/threads" + UNKNOWN_QUERY, orjson.dumps(body))
        assert answer.status_code == status
    for path in OF_THREAD:
        nowhere = path.format(uuid4())
        assert (await both(client, nowhere, nowhere + UNKNOWN_QUERY, orjson.dumps(RUN))).status_code == 404


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
async def test_headers_do_not_change_the_route(client: httpx.AsyncClient, headers: Mapping[str, str]) -> None:
    answer = await client.post("/runs/wait", content=orjson.dumps(RUN), headers={**JSON, **headers})
    assert answer.status_code == 200
    assert answer.json()["messages"]


async def test_forms_of_a_request(client: httpx.AsyncClient) -> None:
    thread_id = await thread_of(client)
    key = {"idempotency-key": str(uuid4())}
    first = await client.post("/runs/wait", json=RUN, headers=key)
    again = await client.post("/runs/wait", json=RUN, headers=key)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["content-location"] == first.headers["content-location"]
    assert (await client.post(f"/threads/{thread_id.replace('-', '')}/runs/wait", json=RUN)).status_code == 200
    assert (await client.post(f"/threads/{thread_id}/runs/wait?follow=true", json=RUN)).status_code == 200
    assert (await client.post("/runs/wait", content=orjson.dumps(RUN))).status_code == 415
    assert (await client.post("/threads", content=b"")).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError, 500), (psycopg.OperationalError, 503)],
    ids=["unexpected", "outage"],
)
async def test_error_of_an_endpoint_is_answered_and_logged_once(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, error: type[Exception], status: int
) -> None:
    calls: list[Any] = []

    async def failing(*given: Any, **__: Any) -> Any:
        calls.append(given)
        raise error("nobody expects it")

    monkeypatch.setattr(submit, "make_requested_run", failing)
    for path in ("/runs", "/runs/wait"):
        calls.clear()
        with capture_logs() as lines:
            answer = await client.post(path, json=RUN, headers={"origin": "http://localhost:3000"})
        assert len(calls) == 1, "nothing is tried twice"
        assert [line["event"] for line in lines if line["log_level"] == "error"] == ["http.failed"] * (status == 500)
        assert answer.status_code == status
        assert set(answer.json()) == {"detail"}
        assert "access-control-allow-origin" in answer.headers, "a page can read it"


JSON_TYPE = (b"content-type", b"application/json")
ID_IN_PATH = "5f1a7c1e-0d0b-4d39-8c54-7d4f4a5f8a11"


def scope(method: str, path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> dict[str, Any]:
    where = {"path": path, "query_string": b"", "root_path": "", "scheme": "http", "server": ("localhost", 80)}
    return {"type": kind, "headers": list(headers), **where, **({"method": method} if kind == "http" else {})}


async def answered(app: Router, scope: dict[str, Any], receive: Any = None) -> tuple[int, dict[bytes, bytes], bytes]:
    """How the router answers a request: status, headers and body."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def nothing() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(scope, receive or nothing, send)
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message.get("body", b"") for message in sent[1:])


async def test_body_in_parts_is_read_once() -> None:
    app = build_app(context(project(), NOWHERE))
    parts = [b'{"metadata": ', b"5", b"}"]
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": part != parts[-1]} for part in parts]

    async def receive() -> Message:
        return messages.pop(0)

    length = str(sum(map(len, parts))).encode()
    status, _, body = await answered(app, scope("POST", "/threads", (b"content-length", length), JSON_TYPE), receive)
    assert status == 422
    assert b"metadata" in body
    assert not messages


async def test_unreadable_body_is_answered_400() -> None:
    """Whether the client has gone, or a layer around the API refuses to hand over its body."""

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def refused() -> Message:
        raise ValueError("no more of this")

    app = build_app(context(project(), NOWHERE))
    for receive in (gone, refused):
        request = scope("POST", "/threads", (b"content-length", b"2"), JSON_TYPE)
        assert (await answered(app, request, receive))[0] == 400


async def test_every_described_operation_comes_to_its_endpoint() -> None:
    """The route that is declared first among those that match, with what it declares about itself."""
    web = context(project(), NOWHERE)
    app, document = build_app(web), describe(web).document()
    declared = [route for _, routes in ROUTES for route in routes.declared]
    operations = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    assert len(operations) > 80
    for method, path in operations:
        asked = re.sub(r"\{\w+\}", ID_IN_PATH, path)
        found = app.find(method, asked)
        assert found is not None, (method, path)
        route, parameters = found
        assert route.path.replace(":path", "") == path
        assert set(parameters.values()) <= {ID_IN_PATH}
        assert re.findall(r"\{(\w+)\}", path) == list(parameters)
        matching = [one for one in declared if method in one.methods and one.pattern.fullmatch(asked)]
        assert route is (matching[0] if matching else route)


async def test_path_parameter_of_any_depth_takes_slashes() -> None:
    found = build_app(context(project(), NOWHERE)).find("GET", "/assistants/echo/subgraphs/a/b/c")
    assert found is not None
    assert found[1] == {"assistant_id": "echo", "namespace": "a/b/c"}


@pytest.mark.parametrize(
    ("method", "path", "status", "header"),
    [
        ("GET", "/nowhere/at/all", 404, None),
        ("POST", "/threads/a/runs/b/c/d", 404, None),
        ("PUT", "/threads", 405, (b"allow", b"POST")),
        ("HEAD", f"/threads/{ID_IN_PATH}/copy", 405, (b"allow", b"POST")),
        ("PUT", f"/threads/{ID_IN_PATH}", 405, (b"allow", b"DELETE, GET, PATCH")),
        ("POST", "/docs", 405, (b"allow", b"GET, HEAD")),
        ("HEAD", "/docs", 200, None),
        ("POST", "/threads/search/", 307, (b"location", b"http://localhost/threads/search")),
        ("GET", "/docs/", 307, (b"location", b"http://localhost/docs")),
        ("GET", "/runs/crons/not-an-id", 422, None),
    ],
)
async def test_path_or_method_without_a_route(
    method: str, path: str, status: int, header: tuple[bytes, bytes] | None
) -> None:
    app = build_app(context(project(), NOWHERE))
    found, headers, _ = await answered(app, scope(method, path))
    assert found == status
    assert header is None or header in headers.items()


async def test_switched_off_routes_are_not_found() -> None:
    web = context(project(), NOWHERE)
    everything = [*PATHS, *(path.format(uuid4()) for path in OF_THREAD)]

    def found(disabled: frozenset[str] = frozenset()) -> list[str]:
        app = build_app(web, HttpSection(disabled=disabled))
        return [path for path in everything if app.match(scope("POST", path)) is Match.FULL]

    assert found() == everything
    assert found(frozenset({"threads"})) == everything[1:]
    assert found(frozenset({"runs"})) == ["/threads"]


@pytest.mark.parametrize("path", ["/nowhere", "/threads/not-an-id/stream/events"])
async def test_websocket_without_a_route_is_refused(path: str) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    app = build_app(context(project(), NOWHERE))
    assert app.match(scope("", path, kind="websocket")) is (Match.NONE if path == "/nowhere" else Match.FULL)
    await app(scope("", path, kind="websocket"), receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]

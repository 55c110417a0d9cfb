"""`http.app` of langgraph.json: a project's own routes, middleware and lifespan."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import websockets
from structlog.testing import capture_logs

from holdfast.api.main import serve
from holdfast.auth.bounded_json import MAX_CONTAINERS
from holdfast.db.connect import Database
from holdfast.errors import ConfigError
from holdfast.graphs.catalog import GraphCatalog
from holdfast.resources.api_keys import SCOPES, Scope, create_key
from holdfast.settings import Settings
from tests.support.http_project import APP, calling, project, serving, webapp, working
from tests.support.json_body import JSON
from tests.support.waiting import until

AUTH = {"path": "./auth.py:auth"}
ANNA = {"authorization": "Bearer anna"}


@pytest.fixture
async def custom() -> AsyncIterator[httpx.AsyncClient]:
    async with calling({"app": APP}) as client:
        yield client


async def test_routes_of_the_app_come_before_those_of_the_api(custom: httpx.AsyncClient) -> None:
    assert (await custom.get("/info")).json() == {"custom": "info"}
    assert (await custom.get("/threads/mine")).json() == {"shadowed": "mine"}


@pytest.mark.parametrize("path", ["/ok", "/docs", "/openapi.json"])
async def test_what_describes_the_server_is_not_shadowed(custom: httpx.AsyncClient, path: str) -> None:
    answer = await custom.get(path)
    assert answer.status_code == 200
    assert "custom" not in answer.text.partition("paths")[0]
    assert answer.headers["x-wrapped"] == "nobody"


async def test_path_of_the_app_with_another_method_stays_with_the_api(custom: httpx.AsyncClient) -> None:
    # The API's own answer: it has no such thread to change, and knows what a thread's id is.
    assert (await custom.patch("/threads/mine", json={})).status_code == 422
    assert (await custom.request("DELETE", "/threads/mine")).status_code == 422
    not_allowed = await custom.post("/hello")
    assert (not_allowed.status_code, not_allowed.headers["allow"]) == (405, "GET")
    assert (await custom.put("/runs")).status_code == 405


async def test_api_answers_for_paths_without_a_route(custom: httpx.AsyncClient) -> None:
    answer = await custom.get("/nowhere")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Path /nowhere not found."})
    redirect = await custom.get("/slash")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "http://localhost/slash/")


async def test_middleware_of_the_app_wraps_everything(custom: httpx.AsyncClient) -> None:
    for path in ("/info", "/ok", "/assistants/none", "/nowhere"):
        assert (await custom.get(path)).headers["x-wrapped"] == "nobody"
    stopped = await custom.post("/runs", json={}, headers={"x-stop": "here"})
    assert (stopped.status_code, stopped.text) == (403, "stopped")


async def test_bodies_for_routes_of_the_app_are_not_changed(custom: httpx.AsyncClient) -> None:
    answer = await custom.post("/form", content="a=1", headers={"content-type": "application/x-www-form-urlencoded"})
    assert answer.json() == {"type": "application/x-www-form-urlencoded", "body": "a=1", "user": None}


async def test_errors_of_the_app_are_answered_by_the_app(custom: httpx.AsyncClient) -> None:
    assert (await custom.get("/teapot")).json() == {"brewing": True}
    with capture_logs() as logged:
        failed = await custom.get("/fails", headers={"origin": "http://localhost:3000"})
    assert (failed.status_code, failed.text) == (500, "Internal Server Error")
    assert failed.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert [line["event"] for line in logged] == ["http.failed"]
    assert (await custom.get("/teapot")).status_code == 418


async def test_an_application_that_is_not_of_starlette_gets_what_the_api_does_not_have() -> None:
    async with calling({"app": "./webapp.py:plain"}) as client:
        assert (await client.get("/info")).json()["version"]
        assert (await client.get("/home")).text == "plain /home"
        assert (await client.put("/runs")).status_code == 405


async def test_routes_of_the_app_are_described(custom: httpx.AsyncClient) -> None:
    described = (await custom.get("/openapi.json")).json()
    assert "get" in described["paths"]["/hello"]
    shadowed = described["paths"]["/threads/{thread_id}"]
    assert {"get", "patch", "delete"} <= set(shadowed)
    schema = shadowed["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"].keys() == {"shadowed"}
    assert "thread_id" in described["components"]["schemas"]["Thread"]["properties"]


async def test_security_is_described_as_the_project_says() -> None:
    scheme = {"type": "http", "scheme": "bearer"}
    openapi = {
        "securitySchemes": {"bearer": scheme},
        "security": [{"bearer": []}],
        "paths": {"/threads": {"POST": [{"bearer": ["threads"]}]}},
    }
    async with calling(auth={**AUTH, "openapi": openapi}) as client:
        described = (await client.get("/openapi.json")).json()
    assert described["components"]["securitySchemes"]["bearer"] == scheme
    assert described["security"] == [{"bearer": []}]
    assert described["paths"]["/threads"]["post"]["security"] == [{"bearer": ["threads"]}]


class TestAuth:
    async def test_routes_of_the_app_are_open_by_default(self) -> None:
        async with calling({"app": APP}, auth=AUTH) as client:
            assert (await client.get("/who")).json() == {"user": None}
            assert (await client.post("/threads", json={})).status_code == 401

    async def test_routes_of_the_app_can_require_a_login(self) -> None:
        async with calling({"app": APP, "enable_custom_route_auth": True}, auth=AUTH) as client:
            refused = await client.get("/who", headers={"origin": "https://page.example"})
            assert (refused.status_code, refused.json()) == (401, {"detail": "Say who you are."})
            assert refused.headers["x-hint"] == "bearer"
            assert refused.headers["x-wrapped"] == "nobody"
            assert refused.headers["access-control-allow-origin"] == "*"
            assert (await client.get("/who", headers=ANNA)).json() == {"user": "anna"}
            assert (await client.get("/ok")).status_code == 200
            assert (await client.get("/nowhere")).status_code == 404

    async def test_an_authenticator_that_reads_the_body_leaves_it_to_the_route(self) -> None:
        nosy = {"path": "./auth.py:nosy"}
        for order in ("middleware_first", "auth_first"):
            http = {"app": APP, "enable_custom_route_auth": True, "middleware_order": order}
            async with calling(http, auth=nosy) as client:
                posted = await client.post("/form", content='{"a": 1}', headers=ANNA)
                assert (posted.json()["body"], posted.json()["user"]) == ('{"a": 1}', "anna")

    @pytest.mark.parametrize(
        ("order", "stopped", "seen"), [("middleware_first", 403, "nobody"), ("auth_first", 401, "anna")]
    )
    async def test_middleware_of_the_app_comes_before_authentication_or_after(
        self, order: str, stopped: int, seen: str
    ) -> None:
        async with calling({"app": APP, "middleware_order": order}, auth=AUTH) as client:
            assert (await client.post("/threads", headers={"x-stop": "here"})).status_code == stopped
            known = await client.get("/threads/not-an-id/state", headers=ANNA)
            assert (known.status_code, known.headers["x-wrapped"]) == (422, seen)
            assert (await client.get("/info")).status_code == 200
            assert (await client.get("/who")).status_code == 200

    @pytest.mark.parametrize("order", ["middleware_first", "auth_first"])
    @pytest.mark.parametrize("app", [APP, "./webapp.py:plain"])
    async def test_scopes_of_a_key_hold_for_routes_of_the_app(self, settings: Settings, order: str, app: str) -> None:
        http = {"app": app, "enable_custom_route_auth": True, "middleware_order": order}
        reading, writing = "/who", "/form"
        async with serving(settings, project(http)) as client:
            keys = {scope: await _key(settings, scope) for scope in SCOPES[:2]}

            async def answered(method: str, path: str, scope: Scope | None) -> int:
                headers = {} if scope is None else {"x-api-key": keys[scope]}
                answer = await client.request(method, path, headers=headers)
                assert answer.status_code != 403 or f"scope '{'read' if method == 'GET' else 'write'}'" in answer.text
                return answer.status_code

            async def closed() -> bool:
                return await answered("GET", reading, None) == 401

            await until(closed, "the first key closes the server")
            assert await answered("POST", writing, None) == 401
            assert await answered("GET", reading, "read") == 200
            assert await answered("POST", writing, "read") == 403
            assert await answered("DELETE", "/nowhere", "read") == (403 if app != APP else 404)
            assert await answered("GET", reading, "write") == 403
            assert await answered("POST", writing, "write") == 200
            if app == APP:
                url = f"ws://127.0.0.1:{settings.port}/echo"
                with pytest.raises(websockets.InvalidStatus) as refused:
                    await websockets.connect(url, additional_headers={"x-api-key": keys["read"]})
                assert refused.value.response.status_code == 403
                async with websockets.connect(url, additional_headers={"x-api-key": keys["write"]}) as socket:
                    await socket.send("this")
                    assert await socket.recv() == "you said this"

    @pytest.mark.parametrize(
        ("http", "routes"),
        [
            ({"app": APP}, "/hello, /who, /info"),
            ({"app": "./webapp.py:plain"}, "all that the API does not have"),
            ({"app": APP, "enable_custom_route_auth": False}, None),
            ({"app": APP, "enable_custom_route_auth": True}, None),
            ({}, None),
        ],
    )
    async def test_a_warning_at_start_names_routes_that_need_no_login(
        self, http: dict[str, Any], routes: str | None
    ) -> None:
        with capture_logs() as logged:
            async with calling(http, auth=AUTH):
                pass
        warnings = [line for line in logged if line["event"] == "app.routes_open"]
        assert len(warnings) == (0 if routes is None else 1)
        if routes is not None:
            assert warnings[0]["log_level"] == "warning"
            assert warnings[0]["routes"].startswith(routes)

    @pytest.mark.expects_errors("http.failed")
    @pytest.mark.parametrize("order", ["middleware_first", "auth_first"])
    @pytest.mark.parametrize("auth", ["nosy", "nosy_by_request"])
    async def test_a_body_that_is_read_before_login_is_limited(self, settings: Settings, order: str, auth: str) -> None:
        http = {"app": APP, "enable_custom_route_auth": True, "middleware_order": order}
        config = project(http, auth={"path": f"./auth.py:{auth}"})
        requests = (("POST", "/form"), ("GET", "/who"), ("POST", "/threads"), ("GET", f"/runs/{uuid4()}"))
        async with serving(settings.model_copy(update={"body_timeout": 0.5}), config) as client:
            for method, path in requests:
                slow = await _answer_to_unfinished_body(client, method, path)
                assert slow.startswith(b"HTTP/1.1 408 "), (method, path, slow)
                assert b"BODY_TIMEOUT_SECONDS" in slow
        async with serving(settings.model_copy(update={"max_body_bytes": 5_000}), config) as client:
            for method, path in requests:
                for body in (_large(), b"x" * 100_000):
                    large = await client.request(method, path, content=body, headers=JSON)
                    assert large.status_code == 413, (method, path, large.text)
                    assert "MAX_BODY_BYTES" in large.json()["detail"]
                known = await client.request(method, path, content=b"{}", headers={**JSON, **ANNA})
                assert known.status_code in (200, 404), (method, path, known.text)

    @pytest.mark.parametrize("order", ["middleware_first", "auth_first"])
    async def test_a_body_of_many_objects_is_not_parsed_for_an_authenticator(
        self, settings: Settings, order: str
    ) -> None:
        """Anybody can send it, and it takes many times its bytes when it is parsed."""
        http = {"app": APP, "enable_custom_route_auth": True, "middleware_order": order}
        body = b"[" + b"[]," * MAX_CONTAINERS + b"[]]"
        roomy = settings.model_copy(update={"max_body_bytes": 2 * len(body)})
        async with serving(roomy, project(http, auth={"path": "./auth.py:nosy"})) as client:
            for method, path in (("POST", "/form"), ("POST", "/threads"), ("GET", f"/runs/{uuid4()}")):
                answer = await client.request(method, path, content=body, headers=JSON)
                assert answer.status_code == 422, (method, path, answer.text)
                assert "objects and arrays" in answer.json()["detail"]

    async def test_plain_app_can_require_a_login(self) -> None:
        async with calling({"app": "./webapp.py:plain", "enable_custom_route_auth": True}, auth=AUTH) as client:
            assert (await client.get("/home")).status_code == 401
            assert (await client.get("/home", headers=ANNA)).text == "plain /home"


async def _key(settings: Settings, scope: Scope) -> str:
    database = Database(settings, "test")
    await database.open()
    try:
        async with database.transaction() as connection:
            return (await create_key(connection, "acme", "test", [scope]))[0]
    finally:
        await database.close()


async def _answer_to_unfinished_body(client: httpx.AsyncClient, method: str, path: str) -> bytes:
    """What the server says to a request whose body does not come."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


async def _large() -> AsyncIterator[bytes]:
    """A body of 100 KB whose length is not declared."""
    for _ in range(100):
        yield b" " * 1_000


async def test_lifespan_of_the_app_is_the_servers_and_its_sockets_work(settings: Settings) -> None:
    webapp.happened.clear()
    http = {"app": APP, "enable_custom_route_auth": True, "mount_prefix": "/api"}
    async with serving(settings, project(http, auth=AUTH)) as client:
        assert webapp.happened == ["startup"]
        told = (await client.get("/api/hello", headers=ANNA)).json()
        assert told == {"greeting": "hello", "lent": "for the lifespan"}
        url = f"ws://127.0.0.1:{settings.port}/api/echo"
        async with websockets.connect(url, additional_headers=ANNA) as socket:
            await socket.send("this")
            assert await socket.recv() == "you said this"
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(url)
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body) == {"detail": "Say who you are."}
        with pytest.raises(websockets.InvalidStatus):
            await websockets.connect(url.replace("/api", ""), additional_headers=ANNA)
    assert webapp.happened == ["startup", "shutdown"]


async def second(stream: httpx.Response) -> str:
    """What comes after the run has been accepted."""
    coming = stream.aiter_text()
    assert "metadata" in (await anext(coming)).lower()
    return await anext(coming)


async def test_streams_pass_through_middleware_of_the_app(settings: Settings) -> None:
    config = project({"app": APP})
    async with serving(settings, config) as web:
        body = {"assistant_id": "seen", "input": {"ask": False}, "on_disconnect": "cancel"}
        async with web.stream("POST", "/runs/stream", json=body) as stream:
            assert stream.headers["x-wrapped"] == "nobody"
            run_id = stream.headers["content-location"].rpartition("/")[2]
            # Nobody works here, so this is what keeps the stream open.
            assert await second(stream) == ": heartbeat\r\n"

        async def cancelled() -> bool:
            found: bool = (await web.get(f"/runs/{run_id}")).json().get("status") == "interrupted"
            return found

        await until(cancelled, "a client that goes away is noticed behind the middleware too")
        async with working(settings, config), web.stream("POST", "/runs/stream", json=body) as stream:
            assert "event: values" in (await stream.aread()).decode()


async def test_nothing_goes_past_a_middleware_that_changes_what_is_sent(settings: Settings) -> None:
    async with serving(settings, project({"app": "./webapp.py:shouting"})) as web:
        body = {"assistant_id": "seen", "input": {"ask": False}}
        async with web.stream("POST", "/runs/stream", json=body) as stream:
            assert await second(stream) == ": HEARTBEAT\r\n"


async def test_a_plain_application_needs_no_lifespan(settings: Settings) -> None:
    async with serving(settings, project({"app": "./webapp.py:plain"})) as client:
        assert (await client.get("/home")).text == "plain /home"


@pytest.mark.expects_errors("uvicorn.error")
@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ("./broken.py:app", "forgot a password"),
        ("./webapp.py:late", "no cache to connect to"),
        ("./webapp.py:unbuilt", "its middleware cannot be built"),
    ],
)
async def test_a_server_whose_app_cannot_start_does_not(settings: Settings, spec: str, cause: str) -> None:
    async def started() -> Any:
        await serve(settings, GraphCatalog.load(project({"app": spec})), asyncio.Event())

    with pytest.raises((ConfigError, ExceptionGroup)) as caught:
        await started()
    error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
    assert isinstance(error, ConfigError)
    assert "http.app: " in str(error)
    assert spec in str(error)
    assert cause in str(error)

"""Which web pages may call the server, and by which host names, with and without a login."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio
import websockets

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import load_settings
from tests.support.databases import own_database
from tests.support.http_project import APP, calling, project
from tests.support.intruder import Intruder, operations
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES
from tests.support.waiting import until
from tests.tenants.conftest import House, open_house

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOREIGN = [
    "https://evil.example",
    "null",
    "",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example",
    "http://evil.example:8123",
    "http://notlocalhost:3000",
    "https://evil.example/http://localhost:3000",
    "http://localhost:3000@evil.example",
    "file://localhost",
    "http://10.0.0.1:3000",
]
LOCAL = [
    "http://localhost",
    "http://localhost:3000",
    "https://LOCALHOST:3000",
    "http://app.localhost:5173",
    "http://127.0.0.1:3000",
    "http://127.9.8.7",
    "http://[::1]:3000",
]
EVIL = {"origin": "https://evil.example"}
IMAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
FRAME = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(server_url: str) -> AsyncIterator[House]:
    async with open_house(server_url) as house:
        yield house


def is_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 403, answer.text
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    detail = answer.json()["detail"]
    assert "http.cors.allow_origins" in detail or "HOLDFAST_ALLOWED_HOSTS" in detail


class TestWithoutALogin:
    @pytest.mark.parametrize("origin", FOREIGN)
    async def test_foreign_page_may_call_no_operation(self, intruder: Intruder, origin: str) -> None:
        document = (await intruder.client.get("/openapi.json")).json()
        before = intruder.everything()
        for method, path, _ in operations(document):
            body: Any = None if method == "GET" else {}
            target = intruder.path(path)
            is_refused(await intruder.client.request(method, target, json=body, headers={"origin": origin}))
        assert intruder.everything() == before

    @pytest.mark.parametrize("origin", FOREIGN)
    async def test_foreign_page_is_refused_when_it_asks_first(self, intruder: Intruder, origin: str) -> None:
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-private-network": "true",
        }
        is_refused(await intruder.client.options("/threads", headers=asked))

    @pytest.mark.parametrize("origin", LOCAL)
    async def test_page_of_this_machine_may_call_without_credentials(self, intruder: Intruder, origin: str) -> None:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        for answer in (
            await intruder.client.options("/threads", headers=asked),
            await intruder.client.post("/threads", json={}, headers={"origin": origin}),
            await intruder.client.post("/threads?long=way", json={}, headers={"origin": origin}),
            await intruder.client.get("/info", headers={"origin": origin}),
        ):
            assert answer.status_code == 200, answer.text
            assert answer.headers["access-control-allow-origin"] == origin
            assert "access-control-allow-credentials" not in answer.headers
            assert "Origin" in answer.headers["vary"]

    @pytest.mark.parametrize("headers", [IMAGE, FRAME], ids=["image", "frame"])
    async def test_foreign_page_cannot_embed_answers(self, intruder: Intruder, headers: dict[str, str]) -> None:
        is_refused(await intruder.client.get("/assistants/echo", headers=headers))

    async def test_link_on_a_foreign_page_may_be_followed(self, intruder: Intruder) -> None:
        assert (await intruder.client.get("/docs", headers=LINK)).status_code == 200

    @pytest.mark.parametrize("host", ["evil.example", "evil.example:8123", "localhost.evil.example", "laptop", "x:y"])
    async def test_other_host_names_are_refused(self, intruder: Intruder, host: str) -> None:
        """DNS rebinding: the page's own name leads to this machine, so the page is of the same origin."""
        for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
            is_refused(await intruder.client.get("/threads/search", headers=headers))
            is_refused(await intruder.client.post("/threads", json={}, headers=headers))

    @pytest.mark.parametrize(
        "host", ["localhost", "LocalHost.:1", "web.localhost:80", "127.0.0.1", "192.168.1.5:8123", "[::1]:8123"]
    )
    async def test_names_of_this_machine_and_addresses_are_served(self, intruder: Intruder, host: str) -> None:
        headers = {"host": host, "origin": f"http://{host.lower()}"}
        assert (await intruder.client.post("/threads", json={}, headers=headers)).status_code == 200

    @pytest.mark.parametrize(
        "hosts", [("evil.example", "localhost"), ("localhost", "evil.example"), ("localhost",) * 2]
    )
    async def test_request_with_two_origins_is_refused(self, intruder: Intruder, hosts: tuple[str, ...]) -> None:
        headers = [("Origin", f"http://{host}") for host in hosts]
        for path in ("/threads", "/threads?long=way"):
            answer = await intruder.client.post(path, json={}, headers=headers)
            detail = "The request has more than one Origin header. Send one."
            assert (answer.status_code, answer.json()) == (400, {"detail": detail})
            assert not [name for name in answer.headers if name.startswith("access-control-")]
        url = str(intruder.client.base_url).replace("http", "ws", 1)
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"{url}/threads/{uuid4()}/stream/events", additional_headers=headers)
        assert refused.value.response.status_code == 400

    async def test_sockets_are_refused_before_they_open(self, intruder: Intruder) -> None:
        thread_id = intruder.ids["thread_id"]
        url = f"{str(intruder.client.base_url).replace('http', 'ws', 1)}/threads/{thread_id}/stream/events"
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
            with pytest.raises(websockets.InvalidStatus) as refused:
                await websockets.connect(url, additional_headers=headers)
            assert refused.value.response.status_code == 403
            assert "http.cors" in (said := json.loads(refused.value.response.body)["detail"]) or "HOSTS" in said
        for headers in ({}, {"Origin": "http://localhost:3000"}):
            async with websockets.connect(url, additional_headers=headers) as socket:
                await socket.send("{}")
                assert "error" in str(await socket.recv())

    async def test_rules_hold_for_routes_of_the_project_too(self) -> None:
        form = {"content-type": "application/x-www-form-urlencoded"}
        async with calling({"app": APP}) as client:
            is_refused(await client.post("/form", content="a=1", headers={**form, **EVIL}))
            is_refused(await client.get("/who", headers={"host": "evil.example"}))
            assert (await client.post("/form", content="a=1", headers=form)).json()["body"] == "a=1"

    @pytest.mark.parametrize(
        ("allowed", "host", "status"),
        [
            ("agents.example.com, web", "web:8123", 200),
            ("agents.example.com, web", "agents.example.com", 200),
            ("*.example.com", "a.b.example.com:1", 200),
            ("*.example.com", "example.com", 403),
            ("*.example.com", "evilexample.com", 403),
            ("*", "anything", 200),
        ],
    )
    async def test_hosts_can_be_named(self, allowed: str, host: str, status: int) -> None:
        async with calling({}, {"HOLDFAST_ALLOWED_HOSTS": allowed}) as client:
            assert (await client.get("/info", headers={"host": host})).status_code == status

    @pytest.mark.parametrize(
        ("http", "environ", "credentials"),
        [
            ({"cors": {"allow_origins": ["https://smith.langchain.com/"]}}, {}, "true"),
            ({"cors": {"allow_origins": ["https://smith.langchain.com"], "allow_credentials": False}}, {}, None),
            ({}, {"CORS_ALLOW_ORIGINS": "https://smith.langchain.com"}, "true"),
            ({"cors": {"allow_credentials": False}}, {"CORS_ALLOW_ORIGINS": "https://smith.langchain.com"}, None),
            ({"cors": {"allow_origins": ["*"]}}, {}, None),
            ({}, {"CORS_ALLOW_ORIGINS": "*"}, None),
        ],
    )
    async def test_origins_can_be_named(
        self, http: dict[str, Any], environ: dict[str, str], credentials: str | None
    ) -> None:
        async with calling(http, environ) as client:
            asked = {
                "origin": "https://smith.langchain.com",
                "access-control-request-method": "POST",
                "access-control-request-private-network": "true",
            }
            answer = await client.options("/threads", headers=asked)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-private-network"] == "true"
            assert answer.headers.get("access-control-allow-credentials") == credentials
            assert (await client.get("/info", headers={"origin": "http://localhost:3000"})).status_code == 200


class TestWithALogin:
    async def test_rules_follow_the_keys_while_the_server_runs(self, house: House) -> None:
        async with httpx.AsyncClient(base_url=house.url) as page:
            is_refused(await page.post("/threads", json={}, headers=EVIL))
            key = await house.key("acme")
            shown = {**EVIL, "x-api-key": key}

            async def may_call() -> bool:
                answer = await page.post("/threads", json={}, headers=shown)
                return answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"

            await until(may_call, "the first key lets every origin in that holds it")
            assert (await page.post("/threads", json={}, headers=EVIL)).status_code == 401
            assert (await page.get("/info", headers={"host": "agents.example.com"})).status_code == 200
            await house.revoke(key)

            async def has_noticed() -> bool:
                return (await page.post("/threads", json={}, headers=shown)).status_code == 401

            await until(has_noticed, "a server whose only key is revoked is closed")
            await house.revoke(key, forget=True)

            async def is_keyless() -> bool:
                return (await page.post("/threads", json={}, headers=EVIL)).status_code == 403

            await until(is_keyless, "without any key the rules for pages hold again")

    async def test_header_that_anybody_can_send_is_no_login(self, server_url: str) -> None:
        """`holdfast dev` lets Studio past the project's authenticator."""
        studio = {"x-auth-scheme": "langsmith"}
        with own_database(server_url) as database_url:
            for allowed, status in ((True, 403), (False, 401)):
                config = load_config(EXAMPLES)
                path = str(EXAMPLES.parent.parent / "tests/support/http_project/auth.py:auth")
                config = replace(config, raw={**config.raw, "auth": {"path": path}})
                settings = load_settings({}, database_url=database_url, port=free_port(), studio_auth=allowed)
                async with answering(settings, GraphCatalog.load(config)) as client:
                    answer = await client.post("/threads/search", json={}, headers={**EVIL, **studio})
                    assert answer.status_code == status
                    local = {"origin": "http://localhost:3000", **studio}
                    answer = await client.post("/threads/search", json={}, headers=local)
                    assert answer.status_code == (200 if allowed else 401)

    @pytest.mark.parametrize(
        ("http", "page", "admitted"),
        [
            ({}, EVIL, False),
            ({"cors": {"allow_origins": ["*"]}}, EVIL, False),
            ({"cors": {"allow_origins": ["https://evil.example"], "allow_credentials": False}}, EVIL, False),
            ({"cors": {"allow_origins": ["https://evil.example"]}}, EVIL, True),
            ({}, {"origin": "https://api.example.com", "host": "api.example.com"}, True),
            ({}, {"origin": "https://api.example.com", "sec-fetch-site": "same-origin"}, True),
            ({}, {}, True),
        ],
    )
    async def test_cookies_are_for_named_origins_and_the_servers_own(
        self, server_url: str, http: dict[str, Any], page: dict[str, str], admitted: bool
    ) -> None:
        """A browser sends cookies with requests that need no preflight, and with WebSockets, whatever CORS says."""
        config = project(http, auth={"path": "./auth.py:by_cookie"})
        headers = {**page, "cookie": "session=ann"}
        with own_database(server_url) as database_url:
            settings = load_settings({}, database_url=database_url, port=free_port())
            async with answering(settings, GraphCatalog.load(config)) as client:
                answer = await client.post("/threads", headers=headers)
                assert answer.status_code == (200 if admitted else 401)
                url = f"ws://127.0.0.1:{settings.port}/threads/{uuid4()}/stream/events"
                async with websockets.connect(url, additional_headers=headers) as socket:
                    if admitted:
                        await socket.send("{}")
                        assert "error" in str(await socket.recv())
                    else:
                        await socket.wait_closed()
                        assert socket.close_code == 4401

    async def test_named_origins_are_the_only_ones(self) -> None:
        http = {"cors": {"allow_origins": ["https://app.example.com"]}}
        async with calling(http, auth={"path": "./auth.py:auth"}) as client:
            named = await client.get("/info", headers={"origin": "https://app.example.com"})
            assert (named.status_code, named.headers["access-control-allow-credentials"]) == (200, "true")
            is_refused(await client.get("/info", headers=EVIL))
            is_refused(await client.get("/info", headers={"origin": "http://localhost:3000"}))
            own = {"host": "api.example.com", "origin": "https://api.example.com"}
            assert (await client.get("/info", headers=own)).status_code == 200

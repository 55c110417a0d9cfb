"""`http` of langgraph.json, besides the app and the headers: other origins, a prefix, switches; and the meta routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from langgraph_sdk.client import LangGraphClient
from structlog.testing import capture_logs

from holdfast.graphs.http import EXPOSED_HEADERS
from holdfast.settings import Settings
from tests.support.http_project import calling, project, serving, working
from tests.support.json_body import JSON

PAGE = {"origin": "http://localhost:3000"}
NAMED = {"origin": "https://page.example"}
AUTH = {"path": "./auth.py:auth"}
ANYBODY = "00000000-0000-0000-0000-000000000000"


def preflight(method: str = "POST", **more: str) -> dict[str, str]:
    return {**PAGE, "access-control-request-method": method, **more}


class TestOtherOrigins:
    async def test_every_origin_may_call_a_server_that_asks_for_a_login(self) -> None:
        async with calling(auth=AUTH) as client:
            asked = preflight("DELETE", **NAMED, **{"access-control-request-headers": "x-api-key, x-mine"})
            answer = await client.options("/threads", headers=asked)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "DELETE" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == "x-api-key, x-mine"
            assert answer.headers["access-control-max-age"] == "600"
            assert "access-control-allow-credentials" not in answer.headers
            plain = await client.get("/ok", headers=NAMED)
            assert plain.headers["access-control-expose-headers"] == ", ".join(EXPOSED_HEADERS)

    @pytest.mark.parametrize(("cors", "status"), [({"allow_origins": [NAMED["origin"]]}, 200), ({}, 403)])
    async def test_a_page_may_reach_a_private_network_when_its_origin_is_allowed(
        self, cors: dict[str, Any], status: int
    ) -> None:
        async with calling({"cors": cors}) as client:
            asked = preflight(**NAMED, **{"access-control-request-private-network": "true"})
            answer = await client.options("/threads", headers=asked)
        allowed = answer.headers.get("access-control-allow-private-network")
        assert (answer.status_code, allowed) == (status, "true" if status == 200 else None)

    @pytest.mark.parametrize(
        ("cors", "environ"),
        [
            ({"allow_origins": ["https://page.example"]}, {}),
            ({"allow_origin_regex": r"https://[a-z]+\.example"}, {}),
            ({"allow_origins": ["https://other.test"]}, {"CORS_ALLOW_ORIGINS": "https://x.test,https://page.example"}),
        ],
    )
    async def test_named_origins_may_with_credentials_and_others_may_not(
        self, cors: dict[str, Any], environ: dict[str, str]
    ) -> None:
        async with calling({"cors": cors}, environ) as client:
            answer = await client.options("/threads", headers=preflight(**NAMED))
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
            assert answer.headers["access-control-allow-credentials"] == "true"
            stranger = await client.options("/threads", headers={**preflight(), "origin": "https://stranger.test"})
            assert stranger.status_code == 403
            assert "access-control-allow-origin" not in stranger.headers
            assert "http.cors" in stranger.json()["detail"]
            read = await client.get("/ok", headers={"origin": "https://stranger.test"})
            assert "access-control-allow-origin" not in read.headers

    async def test_every_cors_option_is_applied(self) -> None:
        cors = {
            "allow_methods": ["GET"],
            "allow_headers": ["x-one"],
            "allow_credentials": False,
            "expose_headers": ["x-mine"],
            "max_age": 5,
        }
        async with calling({"cors": cors}) as client:
            answer = await client.options("/threads", headers=preflight("GET"))
            assert answer.headers["access-control-allow-methods"] == "GET"
            assert "x-one" in answer.headers["access-control-allow-headers"]
            assert answer.headers["access-control-max-age"] == "5"
            assert (await client.options("/threads", headers=preflight("POST"))).status_code == 400
            exposed = (await client.get("/ok", headers=PAGE)).headers["access-control-expose-headers"]
            assert exposed == ", ".join((*EXPOSED_HEADERS, "x-mine"))

    @pytest.mark.parametrize(
        ("method", "path", "content", "status"),
        [
            ("GET", "/nowhere", "", 404),
            ("PUT", "/threads", "", 405),
            ("POST", "/threads", "x" * 2000, 413),
            ("POST", "/threads", "{", 422),
            ("POST", "/threads/count", "{}", 503),
        ],
    )
    async def test_errors_can_be_read(self, method: str, path: str, content: str, status: int) -> None:
        async with calling({}, {"MAX_BODY_BYTES": "1024", "DATABASE_TIMEOUT": "0.1"}) as client:
            answer = await client.request(method, path, content=content, headers={**JSON, **PAGE})
        assert answer.status_code == status
        assert isinstance(answer.json()["detail"], str)
        assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
        assert answer.headers["x-request-id"]

    async def test_failures_of_the_server_can_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fail(*_: Any) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr("holdfast.api.threads.count_threads", fail)
        monkeypatch.setattr("holdfast.db.connect.Database.connection", lambda self: _Nothing())
        async with calling() as client:
            with capture_logs() as logged:
                answer = await client.post("/threads/count", json={}, headers=PAGE)
        assert [(line["event"], str(line["exc_info"])) for line in logged] == [("http.failed", "a defect")]
        assert answer.status_code == 500
        assert "log" in answer.json()["detail"]
        assert answer.headers["access-control-allow-origin"] == PAGE["origin"]


class _Nothing:
    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> None:
        return None


class TestPrefix:
    async def test_every_path_is_under_the_mount_prefix(self) -> None:
        async with calling({"mount_prefix": "/api/v1"}) as client:
            assert (await client.get("/api/v1/info")).json()["version"]
            assert (await client.get("/api/v1")).json()["ok"] is True
            assert (await client.get("/api/v1/ok")).json()["ok"] is True
            assert (await client.get("/ok")).json()["ok"] is True
            for path in ("/info", "/", "/api/v10/info", "/api"):
                missing = await client.get(path, headers=PAGE)
                assert missing.status_code == 404
                assert "/api/v1" in missing.json()["detail"]
                assert missing.headers["access-control-allow-origin"] == PAGE["origin"]

    async def test_mount_prefix_is_in_the_description(self) -> None:
        async with calling({}, {"MOUNT_PREFIX": "/api"}) as client:
            assert (await client.get("/api/openapi.json")).json()["servers"] == [{"url": "/api"}]
            assert "'/api/openapi.json'" in (await client.get("/api/docs")).text

    async def test_clients_reconnect_through_the_mount_prefix(self, settings: Settings) -> None:
        config = project({"mount_prefix": "/api"})
        url = f"http://127.0.0.1:{settings.port}/api"
        broken = Broken()
        async with (
            serving(settings, config) as web,
            working(settings, config),
            httpx.AsyncClient(base_url=url, transport=broken, timeout=30) as http,
        ):
            sdk = LangGraphClient(http)
            thread = (await web.post("/api/threads", json={})).json()["thread_id"]
            created: list[Any] = []
            stream = sdk.runs.stream(thread, "seen", input={"ask": False}, on_run_created=created.append)
            parts = [part async for part in stream]
            assert parts[-1].data["told"]["thread_id"] == thread
            run = f"/api/threads/{thread}/runs/{created[0]['run_id']}"
            assert broken.asked[:2] == [f"POST /api/threads/{thread}/runs/stream", f"GET {run}/stream"]
            assert (await sdk.runs.join(thread, created[0]["run_id"]))["told"]["thread_id"] == thread


class Broken(httpx.AsyncHTTPTransport):
    """A network that loses the connection of every POST once it has answered."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path}")
        answer = await super().handle_async_request(request)
        if request.method == "POST":
            assert isinstance(answer.stream, httpx.AsyncByteStream)
            answer.stream = Cut(answer.stream)
        return answer


class Cut(httpx.AsyncByteStream):
    """The beginning of a stream: two events, for the SDK takes an event in when the next one comes."""

    def __init__(self, whole: httpx.AsyncByteStream) -> None:
        self._whole = whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        said = b""
        async for piece in self._whole:
            yield piece
            said += piece.replace(b"\r\n", b"\n")
            if said.count(b"\n\n") > 1:
                raise httpx.ReadError("the connection is lost")

    async def aclose(self) -> None:
        await self._whole.aclose()


class TestSwitches:
    @pytest.mark.parametrize(
        ("switch", "gone", "kept"),
        [
            ("assistants", ["/assistants", "/assistants/{assistant_id}"], "/threads"),
            ("threads", ["/threads", "/threads/{thread_id}/state", "/threads/{thread_id}/stream"], "/runs"),
            ("runs", ["/runs", "/threads/{thread_id}/runs", "/runs/crons", "/runs/cancel"], "/threads"),
            ("store", ["/store/items", "/store/namespaces"], "/threads"),
            (
                "event_streaming",
                ["/threads/{thread_id}/commands", "/threads/{thread_id}/stream/events"],
                "/threads/{thread_id}/runs",
            ),
        ],
    )
    async def test_disabled_routes_are_not_found(self, switch: str, gone: list[str], kept: str) -> None:
        async with calling() as client:
            before = (await client.get("/openapi.json")).json()["paths"]
        async with calling({f"disable_{switch}": True}) as client:
            paths = (await client.get("/openapi.json")).json()["paths"]
            for path in gone:
                assert path in before
                assert path not in paths
                filled = path.replace("{thread_id}", ANYBODY).replace("{assistant_id}", ANYBODY)
                for method in before[path]:
                    assert (await client.request(method, filled)).status_code in (404, 405), path
            assert kept in paths

    @pytest.mark.parametrize(
        ("variable", "gone", "flag"),
        [
            ("FF_CRONS_ENABLED", "/runs/crons", "crons"),
            ("FF_V2_EVENT_STREAMING", "/threads/{thread_id}/commands", "event_streaming"),
        ],
    )
    async def test_environment_disables_routes_too(self, variable: str, gone: str, flag: str) -> None:
        for value, there in (("false", False), ("true", True)):
            async with calling({}, {variable: value}) as client:
                assert (gone in (await client.get("/openapi.json")).json()["paths"]) is there
                assert (await client.get("/info")).json()["flags"][flag] is there

    @pytest.mark.parametrize("switch", ["mcp", "a2a", "ui"])
    async def test_switches_for_absent_routes_are_accepted(self, switch: str) -> None:
        async with calling({f"disable_{switch}": True}) as client:
            assert (await client.get("/info")).status_code == 200

    async def test_meta(self) -> None:
        async with calling({"disable_meta": True}) as client:
            for path in ("/", "/info", "/docs", "/redoc", "/openapi.json"):
                assert (await client.get(path)).status_code == 404
            # Without asking the database, which is not there.
            assert (await client.get("/ok?check_db=1")).json() == {"ok": True, "services": {"postgres": "skipped"}}

    async def test_info_names_the_enabled_routes(self) -> None:
        async with calling({"disable_assistants": True, "disable_event_streaming": True}) as client:
            flags = (await client.get("/info")).json()["flags"]
        assert (flags["assistants"], flags["event_streaming"], flags["crons"]) == (False, False, True)


class TestMeta:
    async def test_information(self) -> None:
        async with calling(auth={"path": "./auth.py:auth"}) as client:
            information = (await client.get("/info")).json()
        assert information.keys() == {"version", "langgraph_py_version", "flags", "host"}
        assert information["flags"] == {
            "assistants": True,
            "crons": True,
            "event_streaming": True,
            "langsmith": False,
            "langsmith_tracing_replicas": False,
            "langsmith_tracing_session_on_runs": False,
            "strict_resume": True,
        }
        assert information["host"].keys() == {"kind", "project_id", "host_revision_id", "revision_id", "tenant_id"}

    @pytest.mark.parametrize("path", ["/", "/ok", "/info", "/docs", "/openapi.json"])
    async def test_everybody_may_ask(self, path: str) -> None:
        async with calling(auth={"path": "./auth.py:auth"}) as client:
            assert (await client.get(path)).status_code == 200
            assert (await client.post("/threads", json={})).status_code == 401

    @pytest.mark.parametrize("path", ["/", "/ok"])
    async def test_a_database_that_is_gone(self, path: str) -> None:
        async with calling({}, {"DATABASE_TIMEOUT": "0.1"}) as client:
            answer = await client.get(f"{path}?check_db=1")
        assert (answer.status_code, answer.json()) == (503, {"ok": False, "services": {"postgres": "unhealthy"}})


class TestThreadsThatExpire:
    async def test_new_ones_get_the_default(self, settings: Settings) -> None:
        config = project(checkpointer={"ttl": {"strategy": "keep_latest", "default_ttl": 30}})
        async with serving(settings, config) as web:

            async def ttl(thread_id: str) -> Any:
                found = (await web.get(f"/threads/{thread_id}?include=ttl")).json()["ttl"]
                return None if found is None else (found["ttl_minutes"], found["strategy"])

            created = (await web.post("/threads", json={})).json()["thread_id"]
            assert await ttl(created) == (30, "keep_latest")
            own = (await web.post("/threads", json={"ttl": {"ttl": 5}})).json()["thread_id"]
            assert await ttl(own) == (5, "delete")
            run = {"assistant_id": "seen", "if_not_exists": "create"}
            assert (await web.post(f"/threads/{ANYBODY}/runs", json=run)).status_code == 200
            assert await ttl(ANYBODY) == (30, "keep_latest")
            kept = (await web.post("/runs", json={"assistant_id": "seen", "on_completion": "keep"})).json()
            assert await ttl(kept["thread_id"]) == (30, "keep_latest")
            temporary = (await web.post("/runs", json={"assistant_id": "seen"})).json()
            assert await ttl(temporary["thread_id"]) is None

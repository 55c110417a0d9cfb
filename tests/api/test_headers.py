"""What a request's headers do: for its runs, for the log, and on the answer."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import httpx
import pytest
from structlog.testing import capture_logs

from holdfast.api.request_context import RequestContext, baggage, forward, joined
from holdfast.db.connect import Database
from holdfast.graphs.http import HeaderPatterns
from holdfast.resources.crons import upcoming_crons
from holdfast.settings import Settings
from holdfast.upkeep.crons import fire
from tests.support.http_project import calling, project, serving, working

NEVER = {"authorization": "Bearer b", "x-api-key": "k", "x-tenant-id": "t", "x-service-key": "s"}


def told(headers: dict[str, str], includes: list[str] | None = None, excludes: list[str] | None = None) -> Any:
    """What a run is told of these headers, but for the request's id."""
    patterns = HeaderPatterns(tuple(includes or ()), tuple(excludes or ()))
    configurable = RequestContext("id", headers, patterns).configurable()
    assert configurable.pop("langgraph_request_id") == "id"
    return configurable


@pytest.mark.parametrize(
    ("headers", "includes", "excludes", "expected"),
    [
        ({"x-a": "1", "user-agent": "u"}, [], [], []),
        ({"x-a": "1", "x-b": "2", "user-agent": "u"}, ["x-*"], ["x-b"], ["x-a"]),
        (NEVER, ["*"], [], []),
        ({"langsmith-trace": "t", "baggage": "a=b"}, [], [], ["langsmith-trace", "baggage"]),
        ({"langsmith-trace": "t", "baggage": "a=b"}, [], ["*"], []),
        ({"langgraph_auth_user": "root", "thread_id": "x", "checkpoint_id": "y", "user_id": "z"}, ["*"], [], []),
    ],
)
def test_configured_headers_are_forwarded_to_runs(
    headers: dict[str, str], includes: list[str], excludes: list[str], expected: list[str]
) -> None:
    assert told(headers, includes, excludes) == {name: headers[name] for name in expected}


def test_headers_sent_twice_are_one() -> None:
    assert joined([(b"X-A", b"1"), (b"x-b", b"2"), (b"x-a", b"3")]) == {"x-a": "1, 3", "x-b": "2"}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", {}),
        ("a=b", {"a": "b"}),
        ("a=b, langsmith-tags=x%2Cy;property=1", {"a": "b", "langsmith-tags": "x,y"}),
        ("nonsense,=,b=%00", {}),
    ],
)
def test_baggage_is_read_leniently(header: str, expected: dict[str, str]) -> None:
    assert baggage({"baggage": header}) == expected


def test_outside_of_a_request_nothing_is_added() -> None:
    kwargs: dict[str, Any] = {"config": {}}
    assert forward(kwargs) is kwargs


class TestRuns:
    async def test_graphs_see_what_is_forwarded_however_the_run_was_made(self, settings: Settings) -> None:
        config = project({"configurable_headers": {"includes": ["X-Tenant*"], "excludes": ["x-tenant-secret"]}})
        headers = {**NEVER, "X-Tenant": "acme", "x-tenant-secret": "s", "X-Request-Id": "req-1"}
        seen = {"x-tenant": "acme", "langgraph_request_id": "req-1"}
        hidden = {*NEVER, "x-tenant-secret"}

        def check(values: dict[str, Any]) -> None:
            assert values["told"].items() >= seen.items()
            assert not hidden & set(values["told"])

        async with serving(settings, config) as web, working(settings, config):
            web.headers.update(headers)
            spoof = {"configurable": {"x-tenant": "other", "langgraph_request_id": "other"}}
            body = {"assistant_id": "seen", "input": {"ask": False}, "config": spoof}
            check((await web.post("/runs/wait", json=body)).json())

            thread_id = str(uuid4())
            await command(web, thread_id, "run.start", assistant_id="seen", input={"ask": True})
            state = await settled(web, thread_id)
            [interrupt] = state["interrupts"]
            await command(web, thread_id, "input.respond", interrupt_id=interrupt["id"], response="yes")
            check((await settled(web, thread_id))["values"])

            runs = (await web.get(f"/threads/{thread_id}/runs")).json()
            assert len(runs) == 2
            # Whoever may read a run need not be whoever's header it was.
            assert all("acme" not in str(run) for run in runs)

    async def test_forwarded_headers_are_seen_by_the_graph_only(self, settings: Settings) -> None:
        config = project({"configurable_headers": {"includes": ["x-tenant"]}})
        async with serving(settings, config) as web, working(settings, config):
            thread_id = (await web.post("/threads", json={})).json()["thread_id"]
            for modes in (["values", "debug", "checkpoints", "tasks", "updates", "messages-tuple"], ["events"]):
                body = {"assistant_id": "seen", "input": {"ask": True}, "stream_mode": modes}
                streamed = await web.post(f"/threads/{thread_id}/runs/stream", json=body, headers={"x-tenant": "acme"})
                assert "__interrupt__" in streamed.text or "on_chain_end" in streamed.text
                assert "acme" not in streamed.text
            for method, path in (("GET", ""), ("GET", "/state"), ("POST", "/history"), ("GET", "/runs")):
                shown = await web.request(method, f"/threads/{thread_id}{path}", json={"limit": 100})
                assert shown.status_code == 200
                assert "acme" not in shown.text, path

    async def test_the_runs_of_a_cron_have_those_of_its_creation(self, settings: Settings, database: Database) -> None:
        config = project({"configurable_headers": {"includes": ["x-tenant"]}})
        async with serving(settings, config) as web:
            body = {"assistant_id": "seen", "schedule": "0 0 1 1 *"}
            created = await web.post("/runs/crons", json=body, headers={"x-tenant": "acme", "x-request-id": "one"})
            cron_id = created.json()["cron_id"]
            assert "acme" not in created.text
            patched = await web.patch(f"/runs/crons/{cron_id}", json={"input": {"ask": False}})
            assert patched.status_code == 200
            async with database.connection() as connection:
                await connection.execute("UPDATE cron SET next_run_date = now() WHERE cron_id = %s", (UUID(cron_id),))
                [due] = [cron for cron in await upcoming_crons(connection, 10) if str(cron["cron_id"]) == cron_id]
            firing = await fire(database, due)
            if firing is not None:  # Else the server's own upkeep was quicker.
                assert firing.created is not None
            async with database.connection() as connection:
                cursor = await connection.execute("SELECT kwargs FROM run")
                [run] = await cursor.fetchall()
        assert run["kwargs"]["forwarded"] == {"x-tenant": "acme", "langgraph_request_id": "one"}

    async def test_tracing_context_becomes_metadata_tags_and_project(self, settings: Settings) -> None:
        async with serving(settings, project()) as web:
            metadata = quote('{"origin": "parent", "shared": "parent", "deep": {"a": 1}, "assistant_id": "x"}')
            sent = {
                "langsmith-trace": "20260101T000000000000Zabc",
                "baggage": f"langsmith-metadata={metadata},langsmith-tags=one%2Ctwo,langsmith-project=parent%20project",
            }
            body = {"assistant_id": "seen", "config": {"tags": ["own", "one"], "metadata": {"shared": "child"}}}
            run = (await web.post("/runs", json=body, headers=sent)).json()
            assert run["kwargs"]["config"]["tags"] == ["own", "one", "two"]
            assert run["metadata"].items() >= {"origin": "parent", "shared": "child"}.items()
            assert "deep" not in run["metadata"]
            assert run["metadata"]["assistant_id"] == run["assistant_id"]
            assert run["langsmith_session_name"] == "parent project"

    async def test_malformed_trace_header_does_not_refuse_a_run(self, settings: Settings) -> None:
        strange = (
            "=",
            "langsmith-metadata=%7B",
            "langsmith-metadata=%5B1%5D",
            "langsmith-metadata=%7B%22a%22%3A%22%5Cu0000%22%7D",
            "langsmith-tags=%00",
            "langsmith-project=%FF%00",
            "langsmith-metadata=" + quote('{"a":' * 300 + "1" + "}" * 300),
        )
        async with serving(settings, project()) as web:
            for header in strange:
                answer = await web.post("/runs", json={"assistant_id": "seen"}, headers={"baggage": header})
                assert answer.status_code == 200, (header, answer.text)


async def command(web: httpx.AsyncClient, thread_id: str, method: str, **params: Any) -> None:
    answer = await web.post(f"/threads/{thread_id}/commands", json={"id": 1, "method": method, "params": params})
    assert answer.json()["type"] == "success", answer.text


async def settled(web: httpx.AsyncClient, thread_id: str) -> Any:
    """The thread's state once its last run has ended."""
    [run] = (await web.get(f"/threads/{thread_id}/runs", params={"limit": 1})).json()
    await web.get(f"/threads/{thread_id}/runs/{run['run_id']}/join")
    return (await web.get(f"/threads/{thread_id}/state")).json()


class TestRequestIds:
    @pytest.mark.parametrize("path", ["/ok", "/nowhere", "/threads/x"])
    async def test_are_on_every_answer(self, path: str) -> None:
        async with calling() as client:
            given = await client.get(path, headers={"x-request-id": "mine-1"})
            made = [(await client.get(path)).headers["x-request-id"] for _ in range(2)]
        assert given.headers["x-request-id"] == "mine-1"
        assert len({UUID(one) for one in made}) == 2

    @pytest.mark.parametrize("strange", ["a b", "x" * 201, ""], ids=["space", "long", "empty"])
    async def test_malformed_request_id_is_replaced(self, strange: str) -> None:
        async with calling() as client:
            answer = await client.get("/ok", headers={"x-request-id": strange})
        UUID(answer.headers["x-request-id"])

    async def test_are_on_the_lines_of_the_log(self) -> None:
        from structlog.contextvars import merge_contextvars

        async with calling({"app": "./webapp.py:app"}) as client:
            with capture_logs(processors=[merge_contextvars]) as logged:
                await client.get("/fails", headers={"x-request-id": "mine-2"})
        assert [(line["event"], line["request_id"]) for line in logged] == [("http.failed", "mine-2")]


class TestLogging:
    async def test_requests_are_logged_with_the_headers_that_are_asked_for(self) -> None:
        http = {"logging_headers": {"includes": ["*"], "excludes": ["*secret*", "accept*", "connection", "host"]}}
        sent = {**NEVER, "cookie": "c", "x-secret": "s", "user-agent": "tests", "x-request-id": "r"}
        async with calling(http) as client:
            with capture_logs() as logged:
                await client.get("/nowhere", headers=sent)
        [line] = logged
        assert line.pop("milliseconds") >= 0
        assert line == {
            "event": "http.request",
            "log_level": "info",
            "method": "GET",
            "path": "/nowhere",
            "status": 404,
            "headers": {"user-agent": "tests", "x-request-id": "r"},
        }

    async def test_nothing_is_logged_unless_it_is_asked_for(self) -> None:
        async with calling() as client:
            with capture_logs() as logged:
                await client.get("/ok")
        assert logged == []

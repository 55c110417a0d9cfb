"""C16, C17, C56: what is asked before anything else, browsers of other origins, and requests that are wrong."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.conformance.calls import HELLO, ok, refused
from tests.support.json_body import JSON

# Named in the project's http.cors: without keys, other pages of the internet may not call.
ORIGIN = {"Origin": "https://chat.example.com"}


async def test_c16_signs_that_the_server_is_there(client: httpx.AsyncClient) -> None:
    info = await ok(client.get("/info"))
    assert isinstance(info["version"], str)
    assert isinstance(info["langgraph_py_version"], str)
    assert {"assistants": True, "crons": True, "langsmith": False}.items() <= info["flags"].items()
    assert {"langsmith_tracing_replicas", "langsmith_tracing_session_on_runs"} <= set(info["flags"])
    assert {"kind", "project_id", "host_revision_id", "revision_id", "tenant_id"} == set(info["host"])
    for path in ("/ok", "/"):
        assert (await ok(client.get(path)))["ok"] is True
    probed = await ok(client.get("/ok?check_db=1"))
    assert probed["ok"] is True
    assert set(probed["services"].values()) == {"healthy"}


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
async def test_c17_a_browser_may_ask_first(client: httpx.AsyncClient, method: str) -> None:
    asked = ["content-type", "x-api-key", "last-event-id", "x-auth-scheme"]
    preflight = {
        **ORIGIN,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": ", ".join(asked),
    }
    answer = await client.options("/threads/search", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in ("*", ORIGIN["Origin"])
    assert method in answer.headers["access-control-allow-methods"]
    allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
    assert set(asked) <= allowed


async def test_c17_a_public_page_may_use_a_server_on_this_machine(client: httpx.AsyncClient) -> None:
    preflight = {
        **ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
    }
    answer = await client.options("/threads/search", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-private-network"] == "true"


async def test_c17_a_browser_may_read_what_clients_need(client: httpx.AsyncClient) -> None:
    answers = [
        await client.get("/info", headers=ORIGIN),
        await client.post("/threads/search", json={}, headers=ORIGIN),
        await client.post("/runs/stream", json={"assistant_id": "echo", "input": HELLO}, headers=ORIGIN),
        await client.get(f"/threads/{uuid4()}", headers=ORIGIN),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 404]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] in ("*", ORIGIN["Origin"])
        exposed = {name.strip().lower() for name in answer.headers["access-control-expose-headers"].split(",")}
        assert {"x-pagination-total", "x-pagination-next", "content-location", "location"} <= exposed


BAD_ENUMS: list[tuple[str, dict[str, Any]]] = [
    ("/threads", {"if_exists": "perhaps"}),
    ("/threads/search", {"status": "tired"}),
    ("/threads/search", {"sort_by": "beauty"}),
    ("/runs/wait", {"assistant_id": "echo", "stream_mode": ["smoke"]}),
    ("/runs/wait", {"assistant_id": "echo", "multitask_strategy": "fight"}),
    ("/runs/wait", {"assistant_id": "echo", "durability": "eternal"}),
    ("/runs/wait", {"assistant_id": "echo", "on_completion": "forget"}),
]


async def test_c56_what_is_wrong_with_a_request(client: httpx.AsyncClient, thread_id: str) -> None:
    for path in ("/threads/no-uuid", "/threads/no-uuid/state", f"/threads/{thread_id}/runs/no-uuid"):
        await refused(client.get(path), 422)
    await refused(client.post("/threads/no-uuid/runs/wait", json={"assistant_id": "echo"}), 422)
    await refused(client.post("/threads", json={"thread_id": "no-uuid"}), 422)
    for broken in ("{", '{"metadata":', "nothing", '{"a": NaN}'):
        for path in ("/threads", "/threads/search", "/runs/wait", "/assistants"):
            await refused(client.post(path, content=broken, headers=JSON), 422)
    for path in ("/runs", "/runs/wait", "/runs/stream", "/assistants", "/runs/crons", f"/threads/{thread_id}/runs"):
        await refused(client.post(path, json={}), 422)
    await refused(client.put("/store/items", json={"namespace": ["a"]}), 422)
    for path, body in BAD_ENUMS:
        await refused(client.post(path, json=body), 422)
    await refused(client.get(f"/threads/{thread_id}/runs?status=tired"), 422)
    for path in ("/nothing/here", "/threads/x/y/z"):
        await refused(client.get(path), 404)
        await refused(client.post(path, json={}), 404)
    refusal = await client.put("/threads", json={})
    assert refusal.status_code == 405
    assert "POST" in refusal.headers["allow"]
    assert await ok(client.get(f"/threads/{thread_id}/runs")) == []

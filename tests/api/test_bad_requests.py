"""Bad input gets its 4xx and a sentence, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import httpx
import psycopg
import pytest

from holdfast.settings import Settings

RUN = {"assistant_id": "echo"}
# An id that nothing has. Not a new one each time: test ids must be the same in every process.
NOBODY = "00000000-0000-4000-8000-000000000000"


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/threads/not-a-uuid", "", 422),
        ("GET", f"/threads/{NOBODY}", "", 404),
        ("GET", f"/threads/{NOBODY}/runs/{NOBODY}", "", 404),
        ("GET", f"/threads/{NOBODY}/runs", "", 404),
        ("GET", f"/runs/{NOBODY}/stream", "", 404),
        ("GET", f"/threads/{NOBODY}/runs/{NOBODY}/join", "", 404),
        ("POST", f"/threads/{NOBODY}/runs/{NOBODY}/cancel", "", 404),
        ("DELETE", f"/threads/{NOBODY}", "", 404),
        ("GET", "/nothing/here", "", 404),
        ("DELETE", "/runs", "", 405),
        ("POST", "/threads", "{", 422),
        ("POST", "/threads", "[]", 422),
        ("POST", "/threads", '{"thread_id": 5}', 422),
        ("POST", "/threads", '{"metadata": [1]}', 422),
        ("POST", "/threads", '{"if_exists": "maybe"}', 422),
        ("POST", "/threads", '{"metadata": {"a": "\\u0000"}}', 422),
        ("POST", "/threads", '{"metadata": {"a": "\\ud800"}}', 422),
        ("POST", "/threads", '{"metadata": {"a": NaN}}', 422),
        ("POST", "/threads", '{"metadata": ' + '{"a":' * 5000 + "1" + "}" * 5001, 422),
        ("POST", "/runs", "", 422),
        ("POST", "/runs", "{}", 422),
        ("POST", "/runs", '{"assistant_id": "missing"}', 422),
        ("POST", "/runs", '{"assistant_id": "00000000-0000-0000-0000-000000000000"}', 404),
        ("POST", "/runs", '{"assistant_id": "echo", "input": "\\u0000 is fine in json, not in text"}', 200),
        ("POST", "/runs", '{"assistant_id": "echo", "metadata": {"\\u0000": 1}}', 422),
        ("POST", "/runs", '{"assistant_id": "echo", "stream_mode": "loud"}', 422),
        ("POST", "/runs", '{"assistant_id": "echo", "multitask_strategy": "fight"}', 422),
        ("POST", "/runs", '{"assistant_id": "echo", "after_seconds": -1}', 422),
        ("POST", "/runs", '{"assistant_id": "echo", "after_seconds": 1e300}', 422),
        ("POST", "/runs", '{"assistant_id": "echo", "priority": 99999999999}', 422),
        ("POST", "/runs", '{"assistant_id": "echo", "checkpoint_id": "x"}', 422),
        ("POST", "/runs", '{"assistant_id": "echo", "command": {"resume": 1}}', 400),
        ("POST", "/runs", '{"assistant_id": "echo", "command": {"jump": 1}}', 422),
        ("POST", "/runs", '{"assistant_id": "echo", "config": {"recursion_limit": 0}}', 422),
        ("POST", "/runs", '{"assistant_id": "echo", "context": {"a": 1}, "config": {"configurable": {"b": 1}}}', 400),
        ("POST", "/runs", '{"assistant_id": "echo", "webhook": "http://x"}', 422),
        ("POST", f"/threads/{NOBODY}/runs", '{"assistant_id": "echo"}', 404),
        ("GET", "/runs?limit=0", "", 422),
        ("GET", "/runs?status=lost", "", 422),
    ],
)
async def test_the_answer(
    web: httpx.AsyncClient, settings: Settings, method: str, path: str, content: str, status: int
) -> None:
    response = await web.request(method, path, content=content)
    assert response.status_code == status, response.text
    if status >= 400:
        detail = response.json()["detail"]
        assert isinstance(detail, str)
        assert detail
        with psycopg.connect(str(settings.database_url)) as connection:
            counts = connection.execute(
                "SELECT (SELECT count(*) FROM holdfast.run), (SELECT count(*) FROM holdfast.thread)"
            ).fetchone()
        assert counts == (0, 0)


async def test_a_body_over_the_limit(web: httpx.AsyncClient) -> None:
    large = '{"metadata": {"a": "' + "x" * 200_000 + '"}}'
    declared = await web.post("/threads", content=large)

    async def chunks() -> Any:
        for start in range(0, len(large), 10_000):
            yield large[start : start + 10_000].encode()

    counted = await web.post("/threads", content=chunks())
    assert (declared.status_code, counted.status_code) == (413, 413)
    assert "MAX_BODY_BYTES" in declared.json()["detail"]


async def test_a_last_event_id_that_is_none(web: httpx.AsyncClient) -> None:
    run = (await web.post("/runs", json=RUN)).json()
    response = await web.get(f"/runs/{run['run_id']}/stream", headers={"Last-Event-ID": "x"})
    assert response.status_code == 422


async def test_unknown_fields_and_any_content_type_are_accepted(web: httpx.AsyncClient) -> None:
    body = '{"assistant_id": "echo", "strict_resume": true, "assistantId": "echo"}'
    response = await web.post("/runs", content=body, headers={"content-type": "text/plain"})
    assert response.status_code == 200


async def test_cors(web: httpx.AsyncClient) -> None:
    preflight = await web.options(
        "/threads", headers={"Origin": "https://app", "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 200
    exposed = (await web.get("/ok", headers={"Origin": "https://app"})).headers["access-control-expose-headers"]
    assert {"content-location", "location"} <= {name.strip() for name in exposed.split(",")}


async def test_health(web: httpx.AsyncClient) -> None:
    assert (await web.get("/ok?check_db=1")).json() == {"ok": True, "services": {"postgres": "healthy"}}
    assert (await web.get("/info")).json()["version"]

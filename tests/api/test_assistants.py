"""Assistants over HTTP: versions, searching, and their life beside runs and projects."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest

from holdfast.db.connect import Database
from holdfast.settings import Settings
from tests.support.assistants import ECHO, HELLO, make, ok
from tests.support.json_body import JSON
from tests.support.records import query

FIELDS = {
    "assistant_id",
    "graph_id",
    "name",
    "description",
    "config",
    "context",
    "metadata",
    "version",
    "created_at",
    "updated_at",
}


async def test_C08_a_run_takes_a_graph_name_or_its_assistants_uuid(client: httpx.AsyncClient) -> None:
    for named in ("echo", ECHO):
        body = {"assistant_id": named, "input": HELLO}
        thread_id = (await ok(client.post("/threads", json={})))["thread_id"]
        run = await ok(client.post(f"/threads/{thread_id}/runs", json=body))
        assert (run["assistant_id"], run["metadata"]["assistant_id"]) == (ECHO, ECHO)
        assert run["metadata"]["created_by"] == "system"
        output = await ok(client.get(f"/threads/{thread_id}/runs/{run['run_id']}/join"))
        assert [message["content"] for message in output["messages"]] == ["hello", "hello"]


async def test_C09_every_graph_has_an_assistant_that_a_search_finds(web: httpx.AsyncClient) -> None:
    response = await web.post("/assistants/search", json={"graph_id": "echo"})
    assert response.status_code == 200
    assert response.headers["x-pagination-total"] == "1"
    assert "x-pagination-next" not in response.headers
    [found] = response.json()
    assert set(found) == FIELDS
    assert (found["assistant_id"], found["graph_id"], found["name"], found["version"]) == (ECHO, "echo", "echo", 1)
    assert found["metadata"] == {"created_by": "system"}
    assert (found["config"], found["context"], found["description"]) == ({}, {}, "Says back what it is told.")
    assert found["created_at"].endswith("+00:00")
    assert [one["version"] for one in await ok(web.post(f"/assistants/{ECHO}/versions", json={}))] == [1]


async def test_C54_the_life_of_an_assistant(web: httpx.AsyncClient) -> None:
    first = await make(web, name="One", description="first", context={"model": "a"}, metadata={"team": "x"})
    assert set(first) == FIELDS
    assert UUID(first["assistant_id"]).version == 4
    path = f"/assistants/{first['assistant_id']}"
    assert await ok(web.get(path)) == first

    change = {"name": "Two", "context": {"model": "b"}, "metadata": {"stage": 2}, "graph_id": "steps"}
    second = await ok(web.patch(path, json=change))
    assert (second["version"], second["name"], second["graph_id"]) == (2, "Two", "steps")
    assert (second["description"], second["metadata"]) == ("first", {"team": "x", "stage": 2})
    assert (second["context"], second["config"]) == ({"model": "b"}, {"configurable": {"model": "b"}})
    assert second["created_at"] == first["created_at"]
    assert second["updated_at"] > first["updated_at"]

    versions = await ok(web.post(f"{path}/versions", json={}))
    assert [one["version"] for one in versions] == [2, 1]
    assert all(set(one) == FIELDS - {"updated_at"} for one in versions)
    assert [one["context"] for one in versions] == [{"model": "b"}, {"model": "a"}]
    assert [one["version"] for one in await ok(web.post(f"{path}/versions", json={"limit": 1, "offset": 1}))] == [1]
    assert [one["version"] for one in await ok(web.post(f"{path}/versions", json={"metadata": {"stage": 2}}))] == [2]

    back = await ok(web.post(f"{path}/latest", json={"version": 1}))
    assert {**back, "updated_at": None} == {**first, "updated_at": None}
    assert (await ok(web.get(path)))["version"] == 1
    await ok(web.post(f"{path}/latest", json={"version": 3}), 404)

    third = await ok(web.patch(path, json={"name": "Three"}))
    assert (third["version"], third["context"], third["metadata"]) == (3, {"model": "a"}, {"team": "x"})

    await ok(web.delete(path), 204)
    for gone in (web.get(path), web.delete(path), web.patch(path, json={}), web.post(f"{path}/versions", json={})):
        await ok(gone, 404)
    await ok(web.post(f"{path}/latest", json={"version": 1}), 404)


async def test_an_assistant_that_exists(web: httpx.AsyncClient) -> None:
    identity = str(uuid4())
    first = await make(web, assistant_id=identity, name="kept")
    again = {"graph_id": "steps", "assistant_id": identity}
    await ok(web.post("/assistants", json=again), 409)
    await ok(web.post("/assistants", json={**again, "if_exists": "raise"}), 409)
    assert await ok(web.post("/assistants", json={**again, "if_exists": "do_nothing", "name": "other"})) == first
    await ok(web.post("/assistants", json={"graph_id": "echo", "assistant_id": ECHO}), 409)
    assert (await make(web))["name"] == "Untitled"


async def test_a_run_is_made_of_the_assistant_as_it_is_now(web: httpx.AsyncClient, database: Database) -> None:
    """Although the process remembers it, and another has changed it."""
    made = (await web.post("/assistants", json={"graph_id": "echo", "context": {"tone": "old"}})).json()
    asked = {"assistant_id": made["assistant_id"], "input": {}, "after_seconds": 1000}
    thread_id = (await web.post("/threads", json={})).json()["thread_id"]
    for tone in ("old", "new", "newer"):
        if tone != "old":
            change = "UPDATE assistant SET context = %s::jsonb, updated_at = clock_timestamp() RETURNING assistant_id"
            await query(database, change, json.dumps({"tone": tone}))
        for _ in range(2):
            run = (await web.post(f"/threads/{thread_id}/runs", json=asked)).json()
            assert run["kwargs"]["context"] == {"tone": tone}
    runs = await query(database, "SELECT count(*) AS count FROM run")
    threads = await query(database, "SELECT count(*) AS count FROM thread")
    assert (runs[0]["count"], threads[0]["count"]) == (6, 1), "what was made of the old one has left nothing"


async def test_configurable_and_context_are_two_names_of_one_thing(web: httpx.AsyncClient) -> None:
    spoofed = {"langgraph_auth_user": "root", "__otel_traceparent__": "x"}
    for said in (
        {"config": {"configurable": {"a": None, **spoofed}, "tags": ["t"]}},
        {"context": {"a": None, **spoofed}},
    ):
        made = await make(web, **said)
        assert (made["context"], made["config"]["configurable"]) == ({"a": None}, {"a": None})
    path = f"/assistants/{made['assistant_id']}"

    async def patched(**change: Any) -> tuple[Any, Any]:
        answer = await ok(web.patch(path, json=change))
        return answer["config"], answer["context"]

    assert await patched(config={}) == ({"configurable": {"a": None}}, {"a": None})
    assert await patched(config={"tags": ["x"]}) == ({"tags": ["x"], "configurable": {"a": None}}, {"a": None})
    assert await patched(config={"recursion_limit": 5, "configurable": {"b": 1}}) == (
        {"recursion_limit": 5, "configurable": {"b": 1}},
        {"b": 1},
    )
    assert await patched(context={"c": 1}) == ({"recursion_limit": 5, "configurable": {"c": 1}}, {"c": 1})
    assert await patched(config={"tags": ["y"]}, context={"d": 1}) == (
        {"tags": ["y"], "configurable": {"d": 1}},
        {"d": 1},
    )
    assert await patched(config={"configurable": {"e": 1}}, context={}) == ({"configurable": {"e": 1}}, {"e": 1})
    assert await patched(context={}) == ({}, {})
    await patched(context={"f": 1})
    assert await patched(config={"configurable": {}}) == ({"configurable": {}}, {})

    both = {"config": {"configurable": {"a": 1}}, "context": {"a": 1}}
    await ok(web.patch(path, json=both), 400)
    await ok(web.post("/assistants", json={"graph_id": "echo", **both}), 400)


async def test_metadata_only_the_server_sets_is_left_out(web: httpx.AsyncClient) -> None:
    given = {"assistant_id": "x", "thread_id": "x", "run_id": "x", "cron_id": "x", "owner": "me"}
    made = await make(web, metadata=given)
    assert made["metadata"] == {"owner": "me"}
    changed = await ok(web.patch(f"/assistants/{made['assistant_id']}", json={"metadata": {**given, "owner": "you"}}))
    assert changed["metadata"] == {"owner": "you"}


async def test_searching_and_counting(web: httpx.AsyncClient) -> None:
    team = {"team": "blue", "deep": {"a": 1, "b": 2}}
    for name in ("beta", "Alpha", "100%_sure"):
        await make(web, graph_id="chat", name=name, metadata=team)

    async def found(**search: Any) -> list[str]:
        count = {key: value for key, value in search.items() if key in ("metadata", "graph_id", "name")}
        rows = await ok(web.post("/assistants/search", json={"limit": 100, **search}))
        assert await ok(web.post("/assistants/count", json=count)) == len(rows)
        return [row["name"] for row in rows]

    assert await found(metadata={"team": "blue"}) == ["100%_sure", "Alpha", "beta"]
    assert await found(metadata={"deep": {"b": 2}}, sort_order="asc") == ["beta", "Alpha", "100%_sure"]
    assert await found(metadata={"team": "red"}) == []
    assert await found(name="ALPH") == ["Alpha"]
    assert await found(name="%_") == ["100%_sure"]
    assert await found(name="_") == ["100%_sure"]
    assert await found(graph_id="chat", name="a", sort_by="name", sort_order="asc") == ["Alpha", "beta", "chat"]
    assert await found(graph_id="chat", name="a", sort_by="name") == ["chat", "beta", "Alpha"]
    assert len(await found(metadata={"created_by": "system"})) == 5
    for sort_by in ("assistant_id", "created_at", "updated_at", "name", "graph_id"):
        up, down = [await found(sort_by=sort_by, sort_order=order) for order in ("asc", "desc")]
        assert up == down[::-1]
        assert len(up) == 8
    nothing = await ok(web.post("/assistants/search"))
    assert len(nothing) == await ok(web.post("/assistants/count")) == 8
    assert await ok(web.post("/assistants/search", json={"metadata": None, "limit": None, "select": None})) == nothing


async def test_pages_and_selected_fields(web: httpx.AsyncClient) -> None:
    seen, offset, totals = [], 0, []
    while True:
        body = {"limit": 2, "offset": offset, "select": ["graph_id", "version", "graph_id"]}
        response = await web.post("/assistants/search", json=body)
        seen += response.json()
        totals.append(int(response.headers["x-pagination-total"]))
        if "x-pagination-next" not in response.headers:
            break
        offset = int(response.headers["x-pagination-next"])
    assert sorted(row["graph_id"] for row in seen) == ["ask", "chat", "echo", "parent", "steps"]
    assert all(set(row) == {"graph_id", "version"} for row in seen)
    assert totals == [3, 5, 5]


async def test_changes_at_the_same_time_each_get_their_version_and_lose_nothing(web: httpx.AsyncClient) -> None:
    made = await make(web)
    path = f"/assistants/{made['assistant_id']}"
    many = [ok(web.patch(path, json={"metadata": {f"key{n}": n}})) for n in range(12)]
    answers = await asyncio.gather(*many)
    assert sorted(answer["version"] for answer in answers) == list(range(2, 14))
    final = await ok(web.get(path))
    assert final["metadata"] == {f"key{n}": n for n in range(12)}
    assert len(await ok(web.post(f"{path}/versions", json={"limit": 100}))) == 13


async def test_creating_one_assistant_twice_at_the_same_time(web: httpx.AsyncClient) -> None:
    for if_exists, expected in (("raise", [200, *[409] * 5]), ("do_nothing", [200] * 6)):
        body = {"graph_id": "echo", "assistant_id": str(uuid4()), "if_exists": if_exists}
        answers = await asyncio.gather(*(web.post("/assistants", json=body) for _ in range(6)))
        assert sorted(answer.status_code for answer in answers) == expected
        assert len({answer.text for answer in answers if answer.status_code == 200}) == 1


async def test_deleting_cancels_runs_and_takes_threads_along_when_asked(
    web: httpx.AsyncClient, settings: Settings
) -> None:
    for delete_threads in (False, True):
        made = await make(web)
        path = f"/assistants/{made['assistant_id']}"
        body = {"assistant_id": made["assistant_id"], "if_not_exists": "create"}
        mine, shared = str(uuid4()), str(uuid4())
        runs = [await ok(web.post(f"/threads/{thread}/runs", json=body)) for thread in (mine, mine, shared)]
        # Its last run is another assistant's, so the thread counts as that one's.
        other = await ok(web.post(f"/threads/{shared}/runs", json={"assistant_id": "echo"}))
        await ok(web.delete(f"{path}?delete_threads={delete_threads}"), 204)
        for run in runs:
            gone = delete_threads and run["thread_id"] == mine
            left = await ok(web.get(f"/threads/{run['thread_id']}/runs/{run['run_id']}"), 404 if gone else 200)
            assert gone or left["status"] == "interrupted"
        assert (await ok(web.get(f"/threads/{shared}/runs/{other['run_id']}")))["status"] == "pending"
        await ok(web.get(f"/threads/{mine}"), 404 if delete_threads else 200)
        with psycopg.connect(str(settings.database_url)) as connection:
            kept = "SELECT count(*) FROM holdfast.assistant_version WHERE assistant_id = %s"
            assert connection.execute(kept, (made["assistant_id"],)).fetchone() == (0,)


async def test_deleting_stops_a_run_that_is_under_way(client: httpx.AsyncClient) -> None:
    made = await make(client, graph_id="steps")
    thread_id = str(uuid4())
    body = {"assistant_id": made["assistant_id"], "input": {"seconds": 30}, "if_not_exists": "create"}
    run = await ok(client.post(f"/threads/{thread_id}/runs", json=body))

    async def until(status: str) -> None:
        async with asyncio.timeout(60):
            while (await ok(client.get(f"/threads/{thread_id}/runs/{run['run_id']}")))["status"] != status:
                await asyncio.sleep(0.02)

    await until("running")
    await ok(client.delete(f"/assistants/{made['assistant_id']}"), 204)
    await until("interrupted")


# The same in every process: it is part of the names of tests.
MISSING = "00000000-0000-4000-8000-000000000000"


NESTED = '{"graph_id": "echo", "metadata": ' + '{"a":' * 300 + "1" + "}" * 301


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        *(
            (method, f"/assistants/{MISSING}{path}", "{}", 404)
            for method, path in [
                ("GET", ""),
                ("PATCH", ""),
                ("DELETE", ""),
                ("GET", "/graph"),
                ("GET", "/schemas"),
                ("GET", "/subgraphs"),
                ("GET", "/subgraphs/x"),
                ("POST", "/versions"),
            ]
        ),
        ("POST", f"/assistants/{MISSING}/latest", '{"version": 1}', 404),
        ("POST", "/assistants/echo/latest", "{}", 422),
        ("POST", "/assistants/echo/latest", '{"version": "x"}', 422),
        ("POST", "/assistants/echo/latest", '{"version": 99999999999}', 422),
        ("GET", "/assistants/nobody", "", 422),
        ("GET", "/assistants/a%00b", "", 422),
        ("GET", "/assistants/echo/graph?xray=-1", "", 422),
        ("GET", "/assistants/echo/graph?xray=maybe", "", 422),
        ("GET", "/assistants/echo/subgraphs?recurse=maybe", "", 422),
        ("GET", "/assistants/echo/subgraphs/%00", "", 200),
        ("GET", "/assistants", "", 405),
        ("POST", "/assistants", "{}", 422),
        ("POST", "/assistants", "[]", 422),
        ("POST", "/assistants", '{"graph_id": "nothing"}', 404),
        ("POST", "/assistants", '{"graph_id": "a\\u0000"}', 404),
        ("POST", "/assistants", '{"graph_id": "echo", "assistant_id": "x"}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "if_exists": "maybe"}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "name": 5}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "name": "\\u0000"}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "config": {"configurable": 1}}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "config": {"recursion_limit": 0}}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "context": []}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "context": {"a\\u0000": 1}}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "context": {"a": ["\\u0000"]}}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "metadata": {"a\\u0000": 1}}', 422),
        ("POST", "/assistants", '{"graph_id": "echo", "metadata": {"a": {"\\u0000": 1}}}', 422),
        ("POST", "/assistants", NESTED, 422),
        ("POST", "/assistants/search", '{"metadata": {"a\\u0000": 1}}', 422),
        ("POST", "/assistants/search", '{"name": "\\u0000"}', 422),
        ("POST", "/assistants/search", '{"limit": 0}', 422),
        ("POST", "/assistants/search", '{"limit": 1001}', 422),
        ("POST", "/assistants/search", '{"offset": -1}', 422),
        ("POST", "/assistants/search", '{"offset": 1e300}', 422),
        ("POST", "/assistants/search", '{"sort_by": "version; DROP TABLE run"}', 422),
        ("POST", "/assistants/search", '{"sort_order": "up"}', 422),
        ("POST", "/assistants/search", '{"select": ["secret"]}', 422),
        ("POST", "/assistants/count", '{"metadata": 1}', 422),
        ("PATCH", "/assistants/echo", '{"graph_id": "nothing"}', 404),
        ("PATCH", "/assistants/echo", '{"metadata": {"a": "\\u0000"}}', 422),
        ("POST", "/runs", NESTED.replace("graph_id", "assistant_id"), 422),
        ("POST", "/runs", '{"assistant_id": "echo", "context": {"a\\u0000": 1}}', 422),
    ],
)
async def test_bad_input(web: httpx.AsyncClient, method: str, path: str, content: str, status: int) -> None:
    await ok(web.request(method, path, content=content, headers=JSON), status)
    assert await ok(web.post("/assistants/count")) == 5
    assert [one["version"] for one in await ok(web.post("/assistants/echo/versions"))] == [1]
    assert await ok(web.get("/runs")) == []

"""Threads over HTTP: made, found, changed, copied, pruned and deleted."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest

from holdfast.settings import Settings
from tests.support.json_body import JSON
from tests.support.threads import history, made, ran

STEPS = ["s1", "s2", "s3", "s4", "s5"]


async def found(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post("/threads/search", json=body)
    assert response.status_code == 200, response.text
    rows: list[dict[str, Any]] = response.json()
    return rows


async def ids(client: httpx.AsyncClient, **body: Any) -> list[str]:
    return [row["thread_id"] for row in await found(client, **body)]


async def test_C01_a_new_thread(web: httpx.AsyncClient) -> None:
    for content in ("{}", "", '{"metadata": null, "ttl": null, "thread_id": null}'):
        response = await web.post("/threads", content=content, headers=JSON)
        assert response.status_code == 200
        thread = response.json()
        UUID(thread["thread_id"])
        assert (thread["status"], thread["metadata"]) == ("idle", {})
        assert (thread["values"], thread["interrupts"], thread["error"]) == (None, {}, None)
        assert thread["created_at"].endswith("+00:00")


async def test_C52_a_thread_that_exists(web: httpx.AsyncClient) -> None:
    thread_id = await made(web, thread_id=str(uuid4()), metadata={"a": 1})
    before = (await web.get(f"/threads/{thread_id}")).json()
    for body in ({}, {"if_exists": "raise"}):
        assert (await web.post("/threads", json={"thread_id": thread_id, **body})).status_code == 409
    again: dict[str, Any] = {"thread_id": thread_id, "if_exists": "do_nothing", "metadata": {"b": 2}, "ttl": {"ttl": 5}}
    kept = await web.post("/threads", json=again)
    assert (kept.status_code, kept.json()) == (200, before)
    assert (await web.get(f"/threads/{thread_id}?include=ttl")).json()["ttl"] is None


async def test_C52_patch_merges_metadata(web: httpx.AsyncClient) -> None:
    thread_id = await made(web, metadata={"a": {"deep": 1}, "b": 1})
    path = f"/threads/{thread_id}"
    patched = await web.patch(path, json={"metadata": {"a": {"other": 2}, "c": 3, "run_id": "spoofed"}})
    assert patched.json()["metadata"] == {"a": {"other": 2}, "b": 1, "c": 3}
    minimal = await web.patch(path, json={"metadata": {"d": 4}}, headers={"Prefer": "return=minimal"})
    assert (minimal.status_code, minimal.content) == (204, b"")
    thread = (await web.get(path)).json()
    assert thread["metadata"] == {"a": {"other": 2}, "b": 1, "c": 3, "d": 4}
    assert thread["updated_at"] > thread["created_at"]
    assert (await web.patch(path, json={"metadata": None})).json()["metadata"] == thread["metadata"]
    assert (await web.patch(f"/threads/{uuid4()}", json={"metadata": {}})).status_code == 404


async def test_C52_delete(client: httpx.AsyncClient, settings: Settings) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    path = f"/threads/{thread_id}"
    assert (await client.delete(path)).status_code == 204
    assert (await client.delete(path)).status_code == 404
    for suffix in ("", "/state", "/history", "/storage", "/runs"):
        assert (await client.get(path + suffix)).status_code == 404
    with psycopg.connect(str(settings.database_url)) as connection:
        for table in ("run", "event", "checkpoints", "checkpoint_blobs", "checkpoint_writes"):
            assert connection.execute(f"SELECT count(*) FROM holdfast.{table}".encode()).fetchone() == (0,)


async def test_C52_copy(client: httpx.AsyncClient) -> None:
    thread_id = await made(client, metadata={"owner": "ada"})
    await ran(client, thread_id)
    await ran(client, thread_id)
    source = (await client.get(f"/threads/{thread_id}")).json()
    response = await client.post(f"/threads/{thread_id}/copy")
    assert response.status_code == 200
    copy = response.json()
    assert copy["thread_id"] != thread_id
    assert UUID(copy["thread_id"]).version == 4
    assert (copy["status"], copy["metadata"], copy["values"]) == ("idle", source["metadata"], source["values"])

    def comparable(states: list[dict[str, Any]], thread_id: str) -> list[dict[str, Any]]:
        for state in states:
            assert state["checkpoint"]["thread_id"] == state["metadata"]["thread_id"] == thread_id
        return [
            {
                key: state[key]
                for key in ("values", "next", "tasks", "created_at", "checkpoint_id", "parent_checkpoint_id")
            }
            for state in states
        ]

    old, new = await history(client, thread_id), await history(client, copy["thread_id"])
    assert len(old) == 14
    assert comparable(new, copy["thread_id"]) == comparable(old, thread_id)
    # Each goes its own way from here.
    assert len((await ran(client, copy["thread_id"]))["done"]) == 15
    assert await history(client, thread_id) == old
    assert (await client.delete(f"/threads/{thread_id}")).status_code == 204
    assert len((await ran(client, copy["thread_id"]))["done"]) == 20


async def test_a_copy_waits_for_the_same_answer(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "ask", input={"question": "why?"})
    source = (await client.get(f"/threads/{thread_id}")).json()
    copy = (await client.post(f"/threads/{thread_id}/copy")).json()
    assert (copy["status"], copy["interrupts"]) == ("interrupted", source["interrupts"])
    answered = await ran(client, copy["thread_id"], "ask", input=None, command={"resume": "because"})
    assert answered["answer"] == "because"
    assert (await client.get(f"/threads/{thread_id}")).json() == source


async def test_copying_what_is_not_there_is_a_conflict(web: httpx.AsyncClient) -> None:
    assert (await web.post(f"/threads/{uuid4()}/copy")).status_code == 409


async def test_C51_search_filters(client: httpx.AsyncClient) -> None:
    done = await made(client, metadata={"user": {"id": 1, "name": "ada"}, "tags": ["a", "b"]})
    waiting = await made(client, metadata={"user": {"id": 2}})
    failed = await made(client, metadata={"user": {"id": 2}})
    fresh = await made(client, metadata={"user": {"id": 3}})
    await ran(client, done)
    await ran(client, waiting, "ask", input={"question": "why?"})
    await ran(client, failed, input={"seconds": "soon"})
    assert await ids(client) == [failed, waiting, done, fresh]
    assert await ids(client, metadata={"user": {"id": 1}}) == [done]
    assert await ids(client, metadata={"tags": ["b"]}) == [done]
    assert await ids(client, metadata={"user": {"id": 2}, "graph_id": "ask"}) == [waiting]
    assistant_id = (await client.get(f"/threads/{waiting}")).json()["metadata"]["assistant_id"]
    assert await ids(client, metadata={"assistant_id": assistant_id}) == [waiting]
    for status, thread_id in (("idle", done), ("interrupted", waiting), ("error", failed)):
        assert thread_id in await ids(client, status=status)
        assert [row["status"] for row in await found(client, status=status, ids=[thread_id])] == [status]
    assert await ids(client, status="busy") == []
    assert await ids(client, ids=[fresh, waiting, str(uuid4())]) == [waiting, fresh]
    assert await ids(client, ids=[]) == []
    # Threads without values neither match nor fail.
    assert await ids(client, values={"question": "why?"}) == [waiting]
    assert await ids(client, values={"done": ["s5"]}) == [done]
    assert await ids(client, values={"done": ["s6"]}) == []
    for body, expected in (
        ({}, 4),
        ({"metadata": {"user": {"id": 2}}}, 2),
        ({"values": {"done": ["s1"]}}, 1),
        ({"status": "idle"}, 2),
        ({"status": "idle", "metadata": {"user": {"id": 3}}}, 1),
    ):
        response = await client.post("/threads/count", json=body)
        assert (response.status_code, response.json()) == (200, expected)


async def test_C51_search_sorts_and_pages(web: httpx.AsyncClient) -> None:
    created = [await made(web) for _ in range(5)]
    await web.patch(f"/threads/{created[0]}", json={"metadata": {"touched": True}})
    assert await ids(web) == [created[0], *reversed(created[1:])]
    assert await ids(web, sort_by="created_at") == list(reversed(created))
    assert await ids(web, sort_by="created_at", sort_order="asc") == created
    assert await ids(web, sort_by="thread_id", sort_order="asc") == sorted(created)
    assert await ids(web, sort_order="asc") == [*created[1:], created[0]]
    for column in ("status", "state_updated_at", "updated_at"):
        assert sorted(await ids(web, sort_by=column)) == sorted(created)
    seen: list[str] = []
    offset: str | None = "0"
    while offset is not None:
        body = {"limit": 2, "offset": int(offset), "sort_by": "created_at", "sort_order": "asc"}
        response = await web.post("/threads/search", json=body)
        seen += [row["thread_id"] for row in response.json()]
        offset = response.headers.get("x-pagination-next")
        assert int(response.headers["x-pagination-total"]) == min(5, len(seen) + 1)
    assert seen == created
    assert await ids(web, offset=1000) == []


async def test_C51_search_selects_and_extracts(client: httpx.AsyncClient) -> None:
    thread_id = await made(client, metadata={"user": {"name": "ada"}, "list": [[1, 2], [3]]})
    fresh = await made(client)
    await ran(client, thread_id)
    rows = await found(client, select=["thread_id", "status"])
    assert rows == [{"thread_id": thread_id, "status": "idle"}, {"thread_id": fresh, "status": "idle"}]
    assert await found(client, select=["values"], ids=[fresh]) == [{"values": None}]
    assert await found(client, select=["context"], ids=[fresh]) == [{}]
    extract = {
        "last": "values.done[-1]",
        "second": "values.done[1]",
        "beyond": "values.done[99]",
        "name": "metadata.user.name",
        "nested": "metadata.list[0][-1]",
        "missing": "metadata.user.email.domain",
        "graph": "metadata.graph_id",
        "asked": "interrupts",
        "configured": "config.configurable",
        "everything": "values",
    }
    rows = await found(client, extract=extract, select=["thread_id"])
    assert rows[0] == {
        "thread_id": thread_id,
        "extracted": {
            "last": "s5",
            "second": "s2",
            "beyond": None,
            "name": "ada",
            "nested": 2,
            "missing": None,
            "graph": "steps",
            "asked": {},
            "configured": None,
            "everything": {"seconds": 0, "done": STEPS},
        },
    }
    assert rows[1]["extracted"] == dict.fromkeys(extract) | {"asked": {}}
    whole = (await found(client, extract={"last": "values.done[-1]"}, ids=[thread_id]))[0]
    assert whole == {**(await client.get(f"/threads/{thread_id}")).json(), "extracted": {"last": "s5"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/threads/search", {"limit": 0}),
        ("/threads/search", {"limit": 1001}),
        ("/threads/search", {"limit": 10**30}),
        ("/threads/search", {"offset": -1}),
        ("/threads/search", {"offset": 2**63}),
        ("/threads/search", {"offset": 2**62}),
        ("/threads/search", {"sort_by": "values"}),
        ("/threads/search", {"sort_by": "1; DROP TABLE thread"}),
        ("/threads/search", {"sort_order": "sideways"}),
        ("/threads/search", {"select": ["password"]}),
        ("/threads/search", {"select": "thread_id"}),
        ("/threads/search", {"status": "asleep"}),
        ("/threads/search", {"ids": ["x"]}),
        ("/threads/search", {"ids": "x"}),
        ("/threads/search", {"metadata": []}),
        ("/threads/search", {"metadata": {"a": "\0"}}),
        ("/threads/search", {"metadata": {"\0": 1}}),
        ("/threads/search", {"values": {"\0": 1}}),
        ("/threads/search", {"values": 5}),
        ("/threads/search", {"extract": {f"a{number}": "values" for number in range(11)}}),
        ("/threads/search", {"extract": {"a": "run.kwargs"}}),
        ("/threads/search", {"extract": {"a": "values["}}),
        ("/threads/search", {"extract": {"a": "values[x]"}}),
        ("/threads/search", {"extract": {"a": "values[99999999999999999999]"}}),
        ("/threads/search", {"extract": {"a": "values..b"}}),
        ("/threads/search", {"extract": {"a": "values.b\0"}}),
        ("/threads/search", {"extract": {"a": "values.$[*] ? (@ > 1)]"}}),
        ("/threads/search", {"extract": {"a": "values" + ".b" * 1000}}),
        ("/threads/search", {"extract": {"a": 5}}),
        ("/threads/search", {"extract": {"values": "values.b"}}),
        ("/threads/search", {"extract": {"a b": "values.b"}}),
        ("/threads/search", {"extract": {"a\0": "values.b"}}),
        ("/threads/search", {"extract": {"'); DROP TABLE thread; --": "values.b"}}),
        ("/threads/count", {"status": "asleep"}),
        ("/threads/count", {"metadata": {"a": "\0"}}),
        ("/threads/prune", {}),
        ("/threads/prune", {"thread_ids": ["x"]}),
        ("/threads/prune", {"thread_ids": [], "strategy": "burn"}),
        ("/threads", {"ttl": {"ttl": 0}}),
        ("/threads", {"ttl": {"ttl": -5}}),
        ("/threads", {"ttl": {"ttl": 1e300}}),
        ("/threads", {"ttl": {"ttl": 5, "strategy": "burn"}}),
        ("/threads", {"ttl": "soon"}),
        ("/threads", {"ttl": {"strategy": "delete"}}),
        ("/threads", {"supersteps": [{"updates": []}], "metadata": {"graph_id": "steps"}}),
        ("/threads", {"supersteps": {"updates": []}, "metadata": {"graph_id": "steps"}}),
        (
            "/threads",
            {
                "supersteps": [{"updates": [{"command": {"goto": {"to": "s1"}}, "as_node": "s1"}]}],
                "metadata": {"graph_id": "steps"},
            },
        ),
    ],
)
async def test_what_no_request_may_say(
    web: httpx.AsyncClient, settings: Settings, path: str, body: dict[str, Any]
) -> None:
    response = await web.post(path, json=body)
    assert response.status_code == 422, response.text
    assert isinstance(response.json()["detail"], str)
    with psycopg.connect(str(settings.database_url)) as connection:
        assert connection.execute("SELECT count(*) FROM holdfast.thread").fetchone() == (0,)


async def test_hostile_keys_are_only_keys(web: httpx.AsyncClient) -> None:
    hostile = {"'; DROP TABLE thread; --": "%s %(x)s", "$": "$1", "": "", "a.b": ["\\", '"'], "\u202e": "\U0001f600"}
    thread_id = await made(web, metadata=hostile)
    assert (await web.get(f"/threads/{thread_id}")).json()["metadata"] == hostile
    assert await ids(web, metadata=hostile) == [thread_id]
    assert (await found(web, extract={"a": "metadata.$", "b": "metadata.'; DROP TABLE thread; --"}))[0][
        "extracted"
    ] == {"a": "$1", "b": "%s %(x)s"}


async def test_nesting(web: httpx.AsyncClient) -> None:
    def nested(depth: int) -> str:
        return '{"metadata": ' + '{"a":' * depth + "1" + "}" * depth + "}"

    thread_id = (await web.post("/threads", content=nested(150), headers=JSON)).json()["thread_id"]
    assert len(await found(web, ids=[thread_id])) == 1
    assert (await web.post("/threads/search", content=nested(150), headers=JSON)).json()[0]["thread_id"] == thread_id
    for depth in (260, 900, 5000):
        for path in ("/threads", "/threads/search", "/threads/count"):
            assert (await web.post(path, content=nested(depth), headers=JSON)).status_code == 422
        assert (await web.patch(f"/threads/{thread_id}", content=nested(depth), headers=JSON)).status_code == 422


async def test_time_to_live(web: httpx.AsyncClient) -> None:
    thread_id = await made(web, ttl={"ttl": 60, "strategy": "keep_latest"})
    path = f"/threads/{thread_id}"
    assert "ttl" not in (await web.get(path)).json()
    for query in ("include=ttl", "include=ttl,other", "include=other&include=ttl"):
        thread = (await web.get(f"{path}?{query}")).json()
        assert (thread["ttl"]["strategy"], thread["ttl"]["ttl_minutes"]) == ("keep_latest", 60)
        assert thread["ttl"]["expires_at"] > thread["created_at"]
    await web.patch(path, json={"metadata": None, "ttl": {"ttl": 0.5}})
    later = (await web.get(f"{path}?include=ttl")).json()["ttl"]
    assert (later["strategy"], later["ttl_minutes"]) == ("delete", 0.5)
    assert later["expires_at"] < thread["ttl"]["expires_at"]
    # A number alone means minutes, as the SDKs let their users write it.
    await web.patch(path, json={"ttl": 7})
    assert (await web.get(f"{path}?include=ttl")).json()["ttl"]["ttl_minutes"] == 7
    assert (await web.get(f"/threads/{await made(web)}?include=ttl")).json()["ttl"] is None
    copy = (await web.post(f"{path}/copy")).json()
    assert (await web.get(f"/threads/{copy['thread_id']}?include=ttl")).json()["ttl"]["ttl_minutes"] == 7


async def test_supersteps_make_up_a_history(client: httpx.AsyncClient) -> None:
    supersteps = [
        {"updates": [{"values": {"seconds": 0}, "as_node": "__input__"}]},
        {"updates": [{"values": {"seconds": 0}, "as_node": "__start__", "command": None}]},
        {"updates": [{"values": {"done": ["made up"]}, "as_node": "s1"}]},
        {"updates": [{"command": {"update": {"done": ["also"]}}, "as_node": "s2"}]},
    ]
    response = await client.post("/threads", json={"metadata": {"graph_id": "steps"}, "supersteps": supersteps})
    assert response.status_code == 200, response.text
    thread = response.json()
    assert (thread["status"], thread["values"]) == ("interrupted", {"seconds": 0, "done": ["made up", "also"]})
    states = await history(client, thread["thread_id"])
    assert [state["metadata"]["source"] for state in states] == ["update", "update", "update", "input"]
    assert states[0]["next"] == ["s3"]
    # The thread has state from its first moment on, and runs go on from it.
    done = (await ran(client, thread["thread_id"], input=None))["done"]
    assert done == ["made up", "also", "s3", "s4", "s5"]


async def test_supersteps_that_fail_leave_the_thread(web: httpx.AsyncClient) -> None:
    for update in (
        {"values": {"done": []}, "as_node": "nowhere"},
        {"values": None, "as_node": "__input__"},
        {"values": {"done": 5}, "as_node": "s1"},
        {"values": "text", "as_node": "s1"},
    ):
        thread_id = str(uuid4())
        body = {
            "thread_id": thread_id,
            "metadata": {"graph_id": "steps"},
            "supersteps": [{"updates": [{"values": {"seconds": 0}, "as_node": "__input__"}]}, {"updates": [update]}],
        }
        response = await web.post("/threads", json=body)
        assert response.status_code == 201
        assert thread_id in response.json()["detail"]
        thread = (await web.get(f"/threads/{thread_id}")).json()
        assert (thread["status"], thread["values"]) == ("idle", None)
        assert await history(web, thread_id) == []


async def test_supersteps_need_a_graph(web: httpx.AsyncClient) -> None:
    supersteps = [{"updates": [{"values": {}, "as_node": "__input__"}]}]
    for metadata, status in (({}, 400), ({"graph_id": 5}, 400), ({"graph_id": "missing"}, 404)):
        response = await web.post("/threads", json={"metadata": metadata, "supersteps": supersteps})
        assert response.status_code == status
    assert await ids(web) == []


async def test_prune_deletes(client: httpx.AsyncClient) -> None:
    doomed, kept = await made(client), await made(client)
    await ran(client, doomed)
    await client.post(f"/threads/{doomed}/runs", json={"assistant_id": "steps", "input": {"seconds": 3600}})
    body = {"thread_ids": [doomed, doomed, str(uuid4())]}
    assert (await client.post("/threads/prune", json=body)).json() == {"pruned_count": 1}
    assert await ids(client) == [kept]


async def test_prune_keeps_the_latest_state(client: httpx.AsyncClient) -> None:
    thread_id, other = await made(client), await made(client)
    await ran(client, thread_id)
    await ran(client, other)
    before = (await client.get(f"/threads/{thread_id}/state")).json()
    body = {"thread_ids": [thread_id, str(uuid4())], "strategy": "keep_latest"}
    assert (await client.post("/threads/prune", json=body)).json() == {"pruned_count": 1}
    [state] = await history(client, thread_id)
    assert {**before, "parent_checkpoint": None, "parent_checkpoint_id": None} == state
    assert len(await history(client, other)) == 7
    assert (await ran(client, thread_id))["done"] == STEPS * 2


async def test_prune_leaves_a_busy_threads_history(web: httpx.AsyncClient) -> None:
    thread_id = await made(web)
    await web.post(f"/threads/{thread_id}/runs", json={"assistant_id": "steps"})
    body = {"thread_ids": [thread_id], "strategy": "keep_latest"}
    assert (await web.post("/threads/prune", json=body)).json() == {"pruned_count": 0}


async def test_prunes_at_once_do_not_trip_over_each_other(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    body = {"thread_ids": [thread_id], "strategy": "keep_latest"}
    answers = await asyncio.gather(*(client.post("/threads/prune", json=body) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(await history(client, thread_id)) == 1


async def test_the_hidden_thread_of_a_stateless_run_is_nowhere(client: httpx.AsyncClient) -> None:
    response = await client.post("/runs/wait", json={"assistant_id": "steps", "input": {"seconds": 0}})
    run_id = response.headers["content-location"].rsplit("/", 1)[1]
    path = f"/threads/{(await client.get(f'/runs/{run_id}')).json()['thread_id']}"
    for suffix in ("", "/state", f"/state/{uuid4()}", "/history", "/storage"):
        assert (await client.get(path + suffix)).status_code == 404, suffix
    assert (await client.patch(path, json={})).status_code == 404
    assert (await client.post(f"{path}/state", json={"values": {}})).status_code == 404
    assert (await client.post(f"{path}/state/checkpoint", json={"checkpoint": {}})).status_code == 404
    assert (await client.post(f"{path}/history", json={})).status_code == 404
    assert (await client.post(f"{path}/copy")).status_code == 409
    assert (await client.delete(path)).status_code == 404
    assert await ids(client) == []
    assert (await client.post("/threads/count", json={})).json() == 0

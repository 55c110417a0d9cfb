"""C09, C53 to C55, C61: assistants, the store and crons."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from tests.conformance.calls import HELLO, new_thread, ok, refused, system_assistant, wait_run

SCHEMAS = {"input_schema", "output_schema", "state_schema", "config_schema", "context_schema"}
CRON = {
    "cron_id",
    "assistant_id",
    "thread_id",
    "user_id",
    "end_time",
    "schedule",
    "timezone",
    "payload",
    "next_run_date",
    "metadata",
    "on_run_completed",
    "enabled",
    "created_at",
    "updated_at",
}
# Far from now, so that no check sees it fire.
YEARLY = {"assistant_id": "echo", "schedule": "0 9 29 2 *", "input": HELLO}


async def test_c09_a_graphs_own_assistant_is_found(client: httpx.AsyncClient) -> None:
    for graph in ("echo", "slow", "ask", "ask2", "boom", "llm", "sub"):
        response = await client.post(
            "/assistants/search", json={"graph_id": graph, "metadata": {"created_by": "system"}}
        )
        assert response.status_code == 200
        [assistant] = response.json()
        assert response.headers["x-pagination-total"] == "1"
        assert "x-pagination-next" not in response.headers
        assert assistant["assistant_id"] == system_assistant(graph)
        assert UUID(assistant["assistant_id"]).version == 5
        assert (assistant["graph_id"], assistant["version"]) == (graph, 1)
    page = await client.post("/assistants/search", json={"metadata": {"created_by": "system"}, "limit": 3})
    assert (len(page.json()), page.headers["x-pagination-next"]) == (3, "3")


# --- store ---------------------------------------------------------------------------------------------


async def test_c53_the_life_of_an_item(client: httpx.AsyncClient) -> None:
    root = f"c53-{uuid4().hex}"
    namespace = [root, "memories"]

    async def put(key: str, value: dict[str, Any], within: list[str] | None = None) -> None:
        answer = await client.put("/store/items", json={"namespace": within or namespace, "key": key, "value": value})
        assert (answer.status_code, answer.content) == (204, b"")

    async def found(**asked: Any) -> list[str]:
        items = (await ok(client.post("/store/items/search", json={"namespace_prefix": [root], **asked})))["items"]
        return sorted(item["key"] for item in items)

    await put("young", {"age": 3, "kind": "cat"})
    await put("middle", {"age": 7, "kind": "cat"})
    await put("old", {"age": 12, "kind": "dog"}, [root, "archive", "deep"])
    query = {"namespace": ".".join(namespace), "key": "young"}
    item = await ok(client.get("/store/items", params=query))
    assert {key: item[key] for key in ("namespace", "key", "value")} == {
        "namespace": namespace,
        "key": "young",
        "value": {"age": 3, "kind": "cat"},
    }
    assert datetime.fromisoformat(item["created_at"]) <= datetime.fromisoformat(item["updated_at"])
    missing = await client.get("/store/items", params={**query, "key": "nobody"})
    assert (missing.status_code, missing.json()) == (200, None)

    assert await found() == ["middle", "old", "young"]
    assert await found(namespace_prefix=namespace) == ["middle", "young"]
    assert await found(filter={"kind": "cat"}) == ["middle", "young"]
    assert await found(filter={"age": {"$gte": 7}}) == ["middle", "old"]
    for operator, keys in (
        ("$eq", ["middle"]),
        ("$ne", ["old", "young"]),
        ("$gt", ["old"]),
        ("$lt", ["young"]),
        ("$lte", ["middle", "young"]),
    ):
        assert await found(filter={"age": {operator: 7}}) == keys, operator
    assert len(await found(limit=2)) == 2
    assert len(await found(limit=2, offset=2)) == 1
    [hit] = (await ok(client.post("/store/items/search", json={"namespace_prefix": [root, "archive"]})))["items"]
    assert {"namespace", "key", "value", "created_at", "updated_at", "score"} == set(hit)
    # Without a prefix: everywhere.
    assert (await ok(client.post("/store/items/search", json={})))["items"]

    listed = await ok(client.post("/store/namespaces", json={"prefix": [root]}))
    assert sorted(listed["namespaces"]) == [[root, "archive", "deep"], namespace]
    shallow = await ok(client.post("/store/namespaces", json={"prefix": [root], "max_depth": 1}))
    assert shallow["namespaces"] == [[root]]
    ending = await ok(client.post("/store/namespaces", json={"prefix": [root], "suffix": ["deep"]}))
    assert ending["namespaces"] == [[root, "archive", "deep"]]

    for _ in range(2):  # Also when there is nothing left to delete.
        answer = await client.request("DELETE", "/store/items", json={"namespace": namespace, "key": "young"})
        assert (answer.status_code, answer.content) == (204, b"")
    assert await ok(client.get("/store/items", params=query)) is None
    assert await found() == ["middle", "old"]


# --- assistants ----------------------------------------------------------------------------------------


async def test_c54_versions_of_an_assistant(client: httpx.AsyncClient) -> None:
    made = {
        "graph_id": "echo",
        "name": "One",
        "description": "first",
        "context": {"model": "a"},
        "metadata": {"team": "x"},
    }
    first = await ok(client.post("/assistants", json=made))
    assert {key: first[key] for key in made} == made
    assert (first["version"], first["config"]) == (1, {"configurable": {"model": "a"}})
    path = f"/assistants/{first['assistant_id']}"
    change = {"graph_id": "llm", "name": "Two", "description": "second", "context": {"model": "b"}}
    second = await ok(client.patch(path, json={**change, "metadata": {"stage": 2}}))
    assert {key: second[key] for key in change} == change
    assert (second["version"], second["metadata"]) == (2, {"team": "x", "stage": 2})
    versions = await ok(client.post(f"{path}/versions", json={}))
    assert [one["version"] for one in versions] == [2, 1]
    assert [one["context"] for one in versions] == [{"model": "b"}, {"model": "a"}]

    restored = await ok(client.post(f"{path}/latest", json={"version": 1}))
    assert {**restored, "updated_at": None} == {**first, "updated_at": None}
    assert await ok(client.get(path)) == restored
    await refused(client.post(f"{path}/latest", json={"version": 9}), 404)
    values = await wait_run(client, await new_thread(client), first["assistant_id"], input=HELLO)
    assert values["messages"][-1]["content"] == "hello"  # It runs the graph of the version that was restored.

    answer = await client.delete(path)
    assert (answer.status_code, answer.content) == (204, b"")
    for gone in (client.get(path), client.delete(path), client.post(f"{path}/versions", json={})):
        await refused(gone, 404)


async def test_c55_what_a_graph_looks_like(client: httpx.AsyncClient) -> None:
    path = f"/assistants/{system_assistant('sub')}"
    schemas = await ok(client.get(f"{path}/schemas"))
    assert set(schemas) == {"graph_id", *SCHEMAS}
    assert schemas["graph_id"] == "sub"
    assert set(schemas["state_schema"]["properties"]) == {"topic", "notes", "text"}

    closed = await ok(client.get(f"{path}/graph"))
    assert set(closed) == {"nodes", "edges"}
    assert {node["id"] for node in closed["nodes"]} == {"__start__", "child", "write", "__end__"}
    assert {(edge["source"], edge["target"]) for edge in closed["edges"]} == {
        ("__start__", "child"),
        ("child", "write"),
        ("write", "__end__"),
    }
    assert await ok(client.get("/assistants/sub/graph")) == closed
    assert await ok(client.get(f"{path}/graph?xray=false")) == closed
    for xray in ("true", "1"):
        opened = await ok(client.get(f"{path}/graph?xray={xray}"))
        assert "child:look" in {node["id"] for node in opened["nodes"]}

    for query in ("", "?recurse=true", "/child", "/child?recurse=true"):
        subgraphs = await ok(client.get(f"{path}/subgraphs{query}"))
        assert set(subgraphs) == {"child"}
        assert set(subgraphs["child"]) == SCHEMAS
        assert set(subgraphs["child"]["state_schema"]["properties"]) == {"topic", "notes"}
    assert await ok(client.get(f"{path}/subgraphs/nobody")) == {}


# --- crons ---------------------------------------------------------------------------------------------


async def test_c61_the_life_of_a_cron(client: httpx.AsyncClient, thread_id: str) -> None:
    mark = {"mark": str(uuid4())}
    made = await ok(client.post("/runs/crons", json={**YEARLY, "metadata": mark, "timezone": "Europe/Berlin"}))
    assert set(made) == CRON
    assert UUID(made["cron_id"])
    assert (made["assistant_id"], made["thread_id"]) == (system_assistant("echo"), None)
    assert (made["schedule"], made["timezone"], made["enabled"]) == ("0 9 29 2 *", "Europe/Berlin", True)
    due = datetime.fromisoformat(made["next_run_date"])
    assert (due.tzinfo, due.month, due.day, due.hour) == (UTC, 2, 29, 8)  # Nine o'clock in Berlin.
    payload = made["payload"]
    assert (payload["assistant_id"], payload["input"]) == (made["assistant_id"], HELLO)
    assert payload["config"]["configurable"]["cron_id"] == made["cron_id"]
    path = f"/runs/crons/{made['cron_id']}"
    assert await ok(client.get(path)) == made
    of_thread = await ok(client.post(f"/threads/{thread_id}/runs/crons", json={**YEARLY, "metadata": mark}))
    assert (of_thread["thread_id"], of_thread["metadata"]) == (thread_id, mark)

    async def found(**asked: Any) -> list[str]:
        response = await client.post("/runs/crons/search", json={"metadata": mark, **asked})
        assert response.status_code == 200
        assert "x-pagination-total" in response.headers
        return [cron["cron_id"] for cron in response.json()]

    both = [of_thread["cron_id"], made["cron_id"]]
    assert await found() == both
    assert await found(thread_id=thread_id) == both[:1]
    assert await found(assistant_id=system_assistant("slow")) == []
    assert await found(sort_by="created_at", sort_order="asc") == both[::-1]
    assert await ok(client.post("/runs/crons/count", json={"metadata": mark})) == 2
    assert await ok(client.post("/runs/crons/count", json={"metadata": mark, "thread_id": thread_id})) == 1

    moved = await ok(client.patch(path, json={"schedule": "30 9 29 2 *", "enabled": False}))
    due = datetime.fromisoformat(moved["next_run_date"])
    assert (moved["enabled"], due.hour, due.minute) == (False, 8, 30)
    assert await found(enabled=False) == both[1:]
    await refused(client.patch(path, json={}), 400)
    ended = await ok(client.patch(path, json={"end_time": "2999-01-01T00:00:00+00:00"}))
    assert datetime.fromisoformat(ended["end_time"]) == datetime(2999, 1, 1, tzinfo=UTC)
    assert (await ok(client.patch(path, json={"end_time": None})))["end_time"] is None

    answer = await client.delete(path)
    assert (answer.status_code, answer.content) == (204, b"")
    for gone in (client.get(path), client.delete(path), client.patch(path, json={"enabled": True})):
        await refused(gone, 404)
    assert await found() == both[:1]


@pytest.mark.parametrize(
    "wrong",
    [{"schedule": "now and then"}, {"schedule": "99 * * * *"}, {"schedule": ""}, {"timezone": "Mars/Olympus"}],
)
async def test_c61_no_such_time(client: httpx.AsyncClient, thread_id: str, wrong: dict[str, str]) -> None:
    for path in ("/runs/crons", f"/threads/{thread_id}/runs/crons"):
        await refused(client.post(path, json={**YEARLY, **wrong}), 422)
    cron = await ok(client.post(f"/threads/{thread_id}/runs/crons", json=YEARLY))
    await refused(client.patch(f"/runs/crons/{cron['cron_id']}", json=wrong), 422)
    assert await ok(client.get(f"/runs/crons/{cron['cron_id']}")) == cron
    assert await ok(client.post("/runs/crons/count", json={"thread_id": thread_id})) == 1

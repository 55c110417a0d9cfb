"""Assistants over HTTP: versions, searching, what they lend to runs, and what they say about their graphs."""

from __future__ import annotations

import asyncio
import typing
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.config import get_config
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from typing_extensions import TypedDict

from holdfast.api.main import serve
from holdfast.db.connect import Database
from holdfast.graphs.assistants import assistant_id
from holdfast.graphs.catalog import GraphCatalog
from holdfast.resources.assistants import ensure_system_assistants
from holdfast.settings import Settings
from holdfast.worker.main import Worker
from tests.support.catalogs import catalog_of

ECHO = "046b5dc7-2108-582c-9c6c-31d556d138f0"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
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
SCHEMAS = {"input_schema", "output_schema", "state_schema", "config_schema", "context_schema"}


class Seen(TypedDict, total=False):
    context: dict[str, Any]
    options: dict[str, Any]
    tags: list[str]


@dataclass
class Strict:
    """Refuses keys it does not know."""

    model: str = "none"
    tone: str = "none"


def look(state: Seen, runtime: Runtime[Strict]) -> Seen:
    config = get_config()
    return {
        "context": {"model": runtime.context.model, "tone": runtime.context.tone},
        "options": {key: config["configurable"].get(key) for key in ("model", "tone", "langgraph_auth_user")},
        "tags": config.get("tags") or [],
    }


seeing = StateGraph(Seen, context_schema=Strict).add_node(look).add_edge(START, "look").compile(name="The Seer")


def nested(levels: int) -> Any:
    builder = StateGraph(Seen).add_node("leaf", lambda state: state)
    builder.add_edge(START, "leaf")
    if levels:
        builder.add_node("inner", nested(levels - 1)).add_edge("leaf", "inner")
    return builder.compile()


class Opaque:
    """Nothing that JSON Schema knows."""


class Odd(TypedDict, total=False):
    thing: Opaque


odd = StateGraph(Odd).add_node("only", lambda state: state).add_edge(START, "only").compile()


class Plain(typing.TypedDict, total=False):
    """Before Python 3.12 pydantic, and with it LangGraph, has no schema for this kind of state."""

    words: list[str]


plain = StateGraph(Plain).add_node("only", lambda state: state).add_edge(START, "only").compile()


def factory(config: RunnableConfig) -> Any:
    return nested(1) if config["configurable"]["depth"] == 1 else nested(0)


@asynccontextmanager
async def serving(settings: Settings, catalog: GraphCatalog) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server and a worker with the given graphs."""
    stop, worker = asyncio.Event(), Worker(settings, catalog)
    tasks = asyncio.gather(serve(settings, catalog, stop), worker.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=30) as client:
        try:
            async with asyncio.timeout(20):
                while True:
                    try:
                        await client.get("/ok")
                        break
                    except httpx.TransportError:
                        assert not tasks.done(), tasks.exception()
                        await asyncio.sleep(0.02)
            yield client
        finally:
            stop.set()
            worker.stop()
            await tasks


@pytest.fixture
async def special(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A server with the graphs of this module."""
    graphs: dict[str, Any] = {"seeing": seeing, "deep": nested(2), "odd": odd, "plain": plain, "made": factory}
    async with serving(settings, catalog_of(**graphs)) as client:
        yield client


async def ok(response: Awaitable[httpx.Response], status: int = 200) -> Any:
    answered = await response
    assert answered.status_code == status, answered.text
    if status >= 400:
        assert isinstance(answered.json()["detail"], str)
    return answered.json() if answered.content else None


async def make(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    created: dict[str, Any] = await ok(client.post("/assistants", json={"graph_id": "echo", **body}))
    return created


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


async def test_C55_what_an_assistant_says_about_its_graph(web: httpx.AsyncClient) -> None:
    own = await make(web, graph_id="parent")
    for named in ("parent", str(assistant_id("parent")), own["assistant_id"]):
        schemas = await ok(web.get(f"/assistants/{named}/schemas"))
        assert set(schemas) == {"graph_id", *SCHEMAS}
        assert schemas["graph_id"] == "parent"
        for name in ("input_schema", "output_schema", "state_schema"):
            assert set(schemas[name]["properties"]) == {"topic", "notes", "text"}, name
        assert (schemas["context_schema"], schemas["config_schema"]["properties"]) == (None, {})

        closed = await ok(web.get(f"/assistants/{named}/graph"))
        assert {node["id"] for node in closed["nodes"]} == {"__start__", "research", "write", "__end__"}
        assert {(edge["source"], edge["target"]) for edge in closed["edges"]} == {
            ("__start__", "research"),
            ("research", "write"),
            ("write", "__end__"),
        }
        for xray in ("true", "1"):
            opened = await ok(web.get(f"/assistants/{named}/graph?xray={xray}"))
            assert "research:search" in {node["id"] for node in opened["nodes"]}

        for path in ("", "/research"):
            inside = await ok(web.get(f"/assistants/{named}/subgraphs{path}?recurse=true"))
            assert list(inside) == ["research"]
            assert set(inside["research"]) == SCHEMAS
            assert set(inside["research"]["state_schema"]["properties"]) == {"topic", "notes"}
        assert await ok(web.get(f"/assistants/{named}/subgraphs/nothing")) == {}


async def test_drawing_opens_as_many_levels_as_asked_for(special: httpx.AsyncClient) -> None:
    leaves = {"0": 1, "false": 1, "1": 2, "2": 3, "true": 3, "yes": 3}
    for xray, expected in leaves.items():
        drawn = await ok(special.get(f"/assistants/deep/graph?xray={xray}"))
        assert sum(node["id"].endswith("leaf") for node in drawn["nodes"]) == expected, xray
    assert list(await ok(special.get("/assistants/deep/subgraphs"))) == ["inner"]
    assert list(await ok(special.get("/assistants/deep/subgraphs?recurse=true"))) == ["inner", "inner|inner"]
    assert list(await ok(special.get("/assistants/deep/subgraphs/inner%7Cinner"))) == ["inner|inner"]


async def test_what_cannot_be_described_is_null_and_what_cannot_be_built_is_said(special: httpx.AsyncClient) -> None:
    assert await ok(special.get("/assistants/odd/schemas")) == {
        "graph_id": "odd",
        "input_schema": None,
        "output_schema": None,
        "state_schema": None,
        "config_schema": {"title": "Configurable", "type": "object", "properties": {}},
        "context_schema": None,
    }
    await ok(special.get("/assistants/odd/graph"))
    described = await ok(special.get("/assistants/plain/schemas"))
    for name in ("input_schema", "output_schema", "state_schema"):
        assert described[name]["properties"]["words"]["items"] == {"type": "string"}, name
    for path in ("schemas", "graph", "subgraphs"):
        assert "depth" in (await ok(special.get(f"/assistants/made/{path}"), 422))["detail"]
    for depth, expected in ((0, []), (1, ["inner"])):
        made = await make(special, graph_id="made", context={"depth": depth})
        assert list(await ok(special.get(f"/assistants/{made['assistant_id']}/subgraphs"))) == expected
    options = (await ok(special.get("/assistants/seeing/schemas")))["context_schema"]
    assert set(options["properties"]) == {"model", "tone"}


async def test_an_assistant_that_exists(web: httpx.AsyncClient) -> None:
    identity = str(uuid4())
    first = await make(web, assistant_id=identity, name="kept")
    again = {"graph_id": "steps", "assistant_id": identity}
    await ok(web.post("/assistants", json=again), 409)
    await ok(web.post("/assistants", json={**again, "if_exists": "raise"}), 409)
    assert await ok(web.post("/assistants", json={**again, "if_exists": "do_nothing", "name": "other"})) == first
    await ok(web.post("/assistants", json={"graph_id": "echo", "assistant_id": ECHO}), 409)
    assert (await make(web))["name"] == "Untitled"


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
        async with asyncio.timeout(20):
            while (await ok(client.get(f"/threads/{thread_id}/runs/{run['run_id']}")))["status"] != status:
                await asyncio.sleep(0.02)

    await until("running")
    await ok(client.delete(f"/assistants/{made['assistant_id']}"), 204)
    await until("interrupted")


async def test_a_graphs_own_assistant_stays_while_the_graph_does(web: httpx.AsyncClient, database: Database) -> None:
    for named in ("echo", ECHO):
        await ok(web.delete(f"/assistants/{named}"), 409)
        await ok(web.patch(f"/assistants/{named}", json={"graph_id": "steps"}), 409)
    assert (await ok(web.patch("/assistants/echo", json={"name": "Mine", "graph_id": "echo"})))["version"] == 2

    await ensure_system_assistants(database, catalog_of(gone=odd))
    leftover = str(assistant_id("gone"))
    assert (await ok(web.get(f"/assistants/{leftover}")))["graph_id"] == "gone"
    await ok(web.get("/assistants/gone"), 422)
    await ok(web.post("/runs", json={"assistant_id": leftover}), 404)
    for path in ("graph", "schemas", "subgraphs"):
        await ok(web.get(f"/assistants/{leftover}/{path}"), 404)
    await ok(web.delete(f"/assistants/{leftover}"), 204)


async def test_processes_that_start_together_agree_on_the_graphs_assistants(database: Database) -> None:
    names = [f"graph{n}" for n in range(40)]
    catalogs = [catalog_of(**dict.fromkeys(order, odd)) for order in (names, names[::-1])]
    await asyncio.gather(*(ensure_system_assistants(database, catalog) for catalog in catalogs * 6))
    async with database.connection() as connection:
        for table in ("assistant", "assistant_version"):
            cursor = await connection.execute(f"SELECT assistant_id, version, metadata FROM {table}")
            rows = await cursor.fetchall()
            assert {row["assistant_id"] for row in rows} == {assistant_id(name) for name in names}
            assert len(rows) == len(names)
            assert all((row["version"], row["metadata"]) == (1, {"created_by": "system"}) for row in rows)


async def test_a_graphs_assistant_follows_the_project_until_somebody_changes_it(
    settings: Settings, database: Database
) -> None:
    def renamed(name: str) -> GraphCatalog:
        return catalog_of(seeing=seeing.copy({"name": name}), plain=odd)

    async with serving(settings, renamed("First")) as client:
        assert [(await ok(client.get(f"/assistants/{one}")))["name"] for one in ("seeing", "plain")] == [
            "First",
            "plain",
        ]
        await ensure_system_assistants(database, renamed("Second"))
        seen = await ok(client.get("/assistants/seeing"))
        assert (seen["name"], seen["version"]) == ("Second", 1)
        assert [one["name"] for one in await ok(client.post("/assistants/seeing/versions"))] == ["Second"]
        changed = await ok(client.patch("/assistants/seeing", json={"name": "Ours", "context": {"model": "m"}}))
        await ensure_system_assistants(database, renamed("Third"))
        assert await ok(client.get("/assistants/seeing")) == changed
        assert (await ok(client.post("/assistants/seeing/latest", json={"version": 1})))["name"] == "Second"

        # A process that does not know the graph may delete its assistant as a leftover: it comes back when needed.
        async with database.connection() as connection:
            await connection.execute("DELETE FROM assistant")
        assert (await ok(client.get("/assistants/seeing")))["version"] == 1


async def test_a_run_takes_what_it_does_not_say_from_its_assistant(special: httpx.AsyncClient) -> None:
    standing = {"tags": ["standing"], "recursion_limit": 7, "metadata": {"from": "config", "a": "config"}}
    made = await make(
        special,
        graph_id="seeing",
        config={**standing, "configurable": {"model": "m1", "tone": "t1"}},
        metadata={"from": "assistant", "b": "assistant", "c": "assistant", "d": "assistant"},
    )
    thread = await ok(special.post("/threads", json={"metadata": {"c": "thread", "d": "thread"}}))

    async def run(**body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        path = f"/threads/{thread['thread_id']}/runs"
        posted = await ok(special.post(path, json={"assistant_id": made["assistant_id"], "input": {}, **body}))
        return posted, await ok(special.get(f"{path}/{posted['run_id']}/join"))

    posted, values = await run()
    assert posted["assistant_id"] == made["assistant_id"]
    assert posted["kwargs"]["config"]["recursion_limit"] == 7
    assert values["context"] == {"model": "m1", "tone": "t1"}
    assert values["options"] == {"model": "m1", "tone": "t1", "langgraph_auth_user": None}
    assert values["tags"] == ["standing"]

    posted, values = await run(
        context={"tone": "t2", "langgraph_auth_user": "root"},
        config={"tags": ["mine"], "metadata": {"d": "request config", "e": "request config", "run_id": "x"}},
        metadata={"e": "request", "assistant_id": "x", "thread_id": "x"},
    )
    assert values["context"] == {"model": "m1", "tone": "t2"}
    assert values["options"] == {"model": "m1", "tone": "t2", "langgraph_auth_user": None}
    assert values["tags"] == ["mine"]
    assert posted["metadata"] == {
        "from": "config",
        "a": "config",
        "b": "assistant",
        "c": "thread",
        "d": "request config",
        "e": "request",
        "graph_id": "seeing",
        "assistant_id": made["assistant_id"],
    }

    # What the graph's context does not know stays in `configurable`.
    posted, values = await run(config={"configurable": {"model": "m3", "other": 1}})
    assert values["context"] == {"model": "m3", "tone": "t1"}
    assert values["options"] == {"model": "m3", "tone": "t1", "langgraph_auth_user": None}
    assert posted["kwargs"]["config"]["configurable"]["other"] == 1

    await ok(special.patch(f"/assistants/{made['assistant_id']}", json={"context": {"tone": "t4"}}))
    _, values = await run()
    assert values["context"] == {"model": "none", "tone": "t4"}
    both = {"config": {"configurable": {"model": "x"}}, "context": {"tone": "y"}, "assistant_id": made["assistant_id"]}
    await ok(special.post(f"/threads/{thread['thread_id']}/runs", json=both), 400)


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
    await ok(web.request(method, path, content=content), status)
    assert await ok(web.post("/assistants/count")) == 5
    assert [one["version"] for one in await ok(web.post("/assistants/echo/versions"))] == [1]
    assert await ok(web.get("/runs")) == []

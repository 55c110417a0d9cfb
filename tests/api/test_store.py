"""/store over HTTP: items, filters, namespaces, times to live, search by meaning, and what graphs see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psycopg
import pytest

from holdfast.settings import Settings
from tests.support.store_project import serving, working


@pytest.fixture
async def indexed(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with search by meaning."""
    async with serving(settings) as client:
        yield client


async def put(client: httpx.AsyncClient, namespace: list[str], key: str, value: dict[str, Any], **more: Any) -> None:
    answer = await client.put("/store/items", json={"namespace": namespace, "key": key, "value": value, **more})
    assert (answer.status_code, answer.content) == (204, b"")


async def get(client: httpx.AsyncClient, namespace: str, key: str, **more: Any) -> Any:
    answer = await client.get("/store/items", params={"namespace": namespace, "key": key, **more})
    assert answer.status_code == 200
    return answer.json()


async def search(client: httpx.AsyncClient, prefix: list[str] | None = None, **more: Any) -> list[str]:
    named = {} if prefix is None else {"namespace_prefix": prefix}
    answer = await client.post("/store/items/search", json={**named, **more})
    assert answer.status_code == 200, answer.text
    return [item["key"] for item in answer.json()["items"]]


async def namespaces(client: httpx.AsyncClient, **asked: Any) -> list[list[str]]:
    answer = await client.post("/store/namespaces", json=asked)
    assert answer.status_code == 200, answer.text
    found: list[list[str]] = answer.json()["namespaces"]
    return found


async def test_C53_the_life_of_an_item(web: httpx.AsyncClient) -> None:
    assert await get(web, "people.ada", "profile") is None
    await put(web, ["people", "ada"], "profile", {"name": "Ada", "age": 36})
    item = await get(web, "people.ada", "profile")
    assert set(item) == {"namespace", "key", "value", "created_at", "updated_at"}
    assert (item["namespace"], item["key"], item["value"]) == (["people", "ada"], "profile", {"name": "Ada", "age": 36})
    assert item["created_at"].endswith("+00:00")

    await put(web, ["people", "ada"], "profile", {"name": "Ada", "age": 37})
    newer = await get(web, "people.ada", "profile")
    assert newer["value"]["age"] == 37
    assert newer["created_at"] == item["created_at"]
    assert newer["updated_at"] > item["updated_at"]

    answer = await web.post("/store/items/search", json={"namespace_prefix": ["people"]})
    assert answer.json() == {"items": [{**newer, "score": None}]}
    assert await search(web, ["people"], filter={"age": {"$gte": 37}}) == ["profile"]
    assert await search(web, ["people"], filter={"age": {"$gte": 38}}) == []
    assert await namespaces(web) == [["people", "ada"]]

    for _ in range(2):
        gone = await web.request("DELETE", "/store/items", json={"namespace": ["people", "ada"], "key": "profile"})
        assert (gone.status_code, gone.content) == (204, b"")
    assert await get(web, "people.ada", "profile") is None
    assert await namespaces(web) == []


async def test_filters(web: httpx.AsyncClient) -> None:
    values: dict[str, dict[str, Any]] = {
        "nine": {"n": 9, "name": "ix", "in": {"x": 1, "y": 2}},
        "ten": {"n": 10, "name": "x", "in": {"x": 1}},
        "text": {"n": "9", "name": "IX", "flag": True},
        "none": {"n": None, "list": [1, 2]},
    }
    for key, value in values.items():
        await put(web, ["f"], key, value)

    async def found(**filters: Any) -> set[str]:
        return set(await search(web, ["f"], filter=filters))

    assert await found(n=9) == {"nine"}
    assert await found(n="9") == {"text"}
    assert await found(n=None) == {"none"}
    assert await found(flag=True) == {"text"}
    assert await found(list=[1, 2]) == {"none"}
    assert await found(n={"$eq": 10}) == {"ten"}
    assert await found(n={"$ne": 10}) == {"nine", "text", "none"}
    assert await found(flag={"$ne": True}) == {"nine", "ten", "none"}
    # As text, "9" is greater than "10".
    assert await found(n={"$gt": 9}) == {"ten"}
    assert await found(n={"$gte": 9, "$lt": 10}) == {"nine"}
    assert await found(n={"$lte": 9.5}) == {"nine"}
    assert await found(n={"$lt": 0}) == set()
    assert await found(n={"$gte": "9"}) == {"text"}
    assert await found(name={"$gt": "ix", "$lte": "x"}) == {"ten"}
    assert await found(**{"in": {"x": 1}}) == {"nine", "ten"}
    assert await found(**{"in": {"x": 1, "y": 2}}) == {"nine"}
    assert await found(n=9, name="x") == set()
    assert await found(**{"n'; --": 1}) == set()
    assert await found() == set(values)


async def test_searching_pages_and_prefixes(web: httpx.AsyncClient) -> None:
    for n in range(12):
        await put(web, ["pages", "a_b" if n % 2 else "aXb"], f"k{n:02}", {"n": n})
    await put(web, ["pagesque"], "other", {})
    # The newest first, ten of them.
    assert await search(web, ["pages"]) == [f"k{n:02}" for n in range(11, 1, -1)]
    assert await search(web, ["pages"], offset=10) == ["k01", "k00"]
    assert await search(web, ["pages"], limit=3, offset=1) == ["k10", "k09", "k08"]
    # `_` stands for itself, and a prefix ends where a label does.
    assert len(await search(web, ["pages", "a_b"], limit=100)) == 6
    nothing: dict[str, Any]
    for nothing in ({}, {"namespace_prefix": None}, {"namespace_prefix": []}):
        answer = await web.post("/store/items/search", json={**nothing, "limit": 100})
        assert len(answer.json()["items"]) == 13
    assert len((await web.post("/store/items/search")).json()["items"]) == 10
    # Without an index a query finds what the rest of the search finds.
    assert len(await search(web, ["pages"], query="anything", limit=100)) == 12


async def test_namespaces(web: httpx.AsyncClient) -> None:
    for path in (["a", "b", "c"], ["a", "b", "d"], ["a", "x", "c"], ["z"]):
        await put(web, path, "k", {})
    assert await namespaces(web) == [["a", "b", "c"], ["a", "b", "d"], ["a", "x", "c"], ["z"]]
    assert await namespaces(web, max_depth=2) == [["a", "b"], ["a", "x"], ["z"]]
    assert await namespaces(web, prefix=["a", "b"]) == [["a", "b", "c"], ["a", "b", "d"]]
    assert await namespaces(web, prefix=["a", "*", "c"]) == [["a", "b", "c"], ["a", "x", "c"]]
    assert await namespaces(web, suffix=["c"], max_depth=1) == [["a"]]
    assert await namespaces(web, limit=1, offset=1) == [["a", "b", "d"]]
    assert await namespaces(web, prefix=["nobody"]) == []
    assert await namespaces(web, prefix=[], suffix=None, max_depth=None) == await namespaces(web)
    assert len((await web.post("/store/namespaces")).json()["namespaces"]) == 4


HOSTILE = "{}[]()*+?|^$\\%_'\";-- \n\té漢🙂"


async def test_names_and_values_mean_themselves(web: httpx.AsyncClient) -> None:
    value = {HOSTILE: [HOSTILE, 1.5, -1, 2**63, None, {"": {}}], "long": "x" * 50_000}
    await put(web, [HOSTILE, "b"], HOSTILE, value)
    await put(web, ["other"], "", {})
    item = await get(web, f"{HOSTILE}.b", HOSTILE)
    assert item["value"] == value
    assert await search(web, [HOSTILE], filter={HOSTILE: value[HOSTILE]}) == [HOSTILE]
    assert await namespaces(web, prefix=[HOSTILE]) == [[HOSTILE, "b"]]
    assert await namespaces(web, suffix=[HOSTILE]) == []
    assert (await get(web, "other", ""))["value"] == {}
    assert await get(web, "", "profile") is None


ITEM: dict[str, Any] = {"namespace": ["a"], "key": "k", "value": {}}
DEEP: Any = 1
for _ in range(300):
    DEEP = {"a": DEEP}


BAD_PARTS: dict[str, list[Any]] = {
    "namespace": [["a.b"], ["a", ""], ["a", 5], ["a", None], ["\0"], "a", {}, None, 5, ["a" * 3000], ["a"] * 3000],
    "key": [None, 5, [], "\0", "k" * 3000, "é" * 1001],
    "value": [None, [], "text", 5, {"a": "\0"}, {"\0": 1}, DEEP, {"text": "sea\0"}],
    "ttl": [0, -1, "soon", [], 1e300],
    "index": [True, "text", [5], [""], ["\0"], ["a" * 900], ["a"] * 101],
}
BAD_SEARCHES: list[Any] = [
    [],
    {"namespace_prefix": "a"},
    {"namespace_prefix": ["a.b"]},
    {"namespace_prefix": [""]},
    {"namespace_prefix": ["\0"]},
    {"filter": []},
    {"filter": {"a": {"$regex": "x"}}},
    {"filter": {"a": {"$gt": 1, "b": 2}}},
    {"filter": {"a": {"$gt": True}}},
    {"filter": {"a": {"$gt": None}}},
    {"filter": {"a": {"$lt": [1]}}},
    {"filter": {"\0": 1}},
    {"filter": {"a": "\0"}},
    {"filter": {"a": {"$gt": "\0"}}},
    {"filter": {"a": DEEP}},
    {"filter": dict.fromkeys(map(str, range(5000)), 1)},
    {"limit": 0},
    {"limit": 10**30},
    {"limit": "many"},
    {"offset": -1},
    {"offset": 2**40},
    {"query": 5},
    {"refresh_ttl": "perhaps"},
]
BAD_LISTS: list[Any] = [
    {"prefix": "a"},
    {"prefix": ["a.b"]},
    {"suffix": ["\0"]},
    {"prefix": [""]},
    {"prefix": ["a"] * 3000},
    {"max_depth": 0},
    {"max_depth": -1},
    {"max_depth": 2**40},
    {"limit": 0},
    {"offset": -1},
]
BAD_INPUT: list[tuple[str, str, Any, int]] = [
    ("PUT", "items", {**ITEM, "namespace": []}, 400),
    ("PUT", "items", {**ITEM, "namespace": ["langgraph", "x"]}, 400),
    *(("PUT", "items", {**ITEM, part: bad}, 422) for part, values in BAD_PARTS.items() for bad in values),
    ("PUT", "items", {**ITEM, "value": {"texts": ["a"] * 20_000}, "index": ["texts[*]"]}, 422),
    ("PUT", "items", [], 422),
    ("PUT", "items", {}, 422),
    ("GET", "items?namespace=a", None, 400),
    ("GET", "items?namespace=a..b&key=k", None, 422),
    ("GET", "items?namespace=.&key=k", None, 422),
    ("GET", "items?namespace=a%00&key=k", None, 422),
    ("GET", "items?namespace=a&key=%00", None, 422),
    ("GET", "items?namespace=a&key=k&refresh_ttl=perhaps", None, 422),
    ("DELETE", "items", {}, 422),
    ("DELETE", "items", {"namespace": ["a"], "key": "\0"}, 422),
    ("DELETE", "items", {"namespace": ["a.b"], "key": "k"}, 422),
    ("DELETE", "items", {"namespace": "a", "key": "k"}, 422),
    ("DELETE", "items", None, 422),
    *(("POST", "items/search", body, 422) for body in BAD_SEARCHES),
    *(("POST", "namespaces", body, 422) for body in BAD_LISTS),
    # Strange, but a question that has an answer.
    ("GET", "items?key=k", None, 200),
    ("GET", f"items?namespace={'a.' * 3000}a&key={'k' * 3000}", None, 200),
    ("DELETE", "items", {"namespace": [], "key": "k"}, 204),
    ("POST", "items/search", {"query": "\0", "offset": 2**31 - 1, "filter": {"": {}}}, 200),
    ("POST", "namespaces", {"prefix": ["*"] * 900, "suffix": ["*"] * 900, "max_depth": 2000}, 200),
]


async def test_bad_input_is_refused_and_leaves_nothing(indexed: httpx.AsyncClient) -> None:
    wrong = []
    for method, path, body, status in BAD_INPUT:
        answer = await indexed.request(method, f"/store/{path}", **({} if body is None else {"json": body}))
        if answer.status_code != status or (status >= 400 and not isinstance(answer.json()["detail"], str)):
            wrong.append((method, path[:100], str(body)[:200], status, answer.status_code, answer.text))
    assert wrong == []
    assert await namespaces(indexed) == []


async def test_bad_value_fails_no_other_request(web: httpx.AsyncClient) -> None:
    async def one(n: int) -> int:
        value = {"a": "\0"} if n % 5 == 0 else {"n": n}
        answer = await web.put("/store/items", json={"namespace": ["crowd"], "key": str(n), "value": value})
        return answer.status_code

    assert await asyncio.gather(*map(one, range(20))) == [422 if n % 5 == 0 else 204 for n in range(20)]
    assert len(await search(web, ["crowd"], limit=100)) == 16


def minutes_left(settings: Settings, key: str) -> float | None:
    with psycopg.connect(str(settings.database_url)) as connection:
        row = connection.execute(
            "SELECT extract(epoch FROM expires_at - now())::float8 / 60 FROM holdfast.store WHERE key = %s", (key,)
        ).fetchone()
    assert row is not None
    left: float | None = row[0]
    return left


def change(settings: Settings, statement: str) -> None:
    with psycopg.connect(str(settings.database_url), autocommit=True) as connection:
        connection.execute(statement.encode())


async def test_items_live_for_as_long_as_they_are_told(indexed: httpx.AsyncClient, settings: Settings) -> None:
    await put(indexed, ["t"], "default", {})
    await put(indexed, ["t"], "short", {}, ttl=0.5)
    assert 59 < (minutes_left(settings, "default") or 0) <= 60
    assert 0.4 < (minutes_left(settings, "short") or 0) <= 0.5
    change(settings, "UPDATE holdfast.store SET expires_at = now() + interval '12 seconds' WHERE key = 'short'")
    # The project says that reading does not refresh; the reader may.
    await get(indexed, "t", "short")
    assert await search(indexed, ["t"]) == ["short", "default"]
    assert (minutes_left(settings, "short") or 1) <= 0.2
    await get(indexed, "t", "short", refresh_ttl=True)
    assert 0.4 < (minutes_left(settings, "short") or 0) <= 0.5
    change(settings, "UPDATE holdfast.store SET expires_at = now() + interval '12 seconds' WHERE key = 'short'")
    await search(indexed, ["t"], refresh_ttl=True)
    assert 0.4 < (minutes_left(settings, "short") or 0) <= 0.5

    change(settings, "UPDATE holdfast.store SET expires_at = now() - interval '1 second' WHERE key = 'short'")
    assert await get(indexed, "t", "short", refresh_ttl=True) is None
    assert await search(indexed, ["t"], refresh_ttl=True) == ["default"]
    assert await search(indexed, ["t"], query="sea", refresh_ttl=True) == []
    await put(indexed, ["t"], "short", {"again": True})
    assert (await get(indexed, "t", "short"))["value"] == {"again": True}


async def test_without_a_project_default_items_stay(web: httpx.AsyncClient, settings: Settings) -> None:
    await put(web, ["t"], "kept", {})
    await put(web, ["t"], "told", {}, ttl=5)
    assert minutes_left(settings, "kept") is None
    change(settings, "UPDATE holdfast.store SET expires_at = now() + interval '1 minute' WHERE key = 'told'")
    await get(web, "t", "told")
    assert 4 < (minutes_left(settings, "told") or 0) <= 5
    await put(web, ["t"], "told", {})
    assert minutes_left(settings, "told") is None


async def test_searching_by_meaning(indexed: httpx.AsyncClient) -> None:
    texts = {
        "harbour": "a ship on the sea",
        "hut": "a valley under snow",
        "fair": "a market in the street of a town",
        "ferry": "the ship leaves the town",
    }
    for key, text in texts.items():
        await put(indexed, ["docs"], key, {"text": text, "long": len(text) > 20})
    await put(indexed, ["docs"], "hidden", {"text": "sea sea sea"}, index=False)
    await put(indexed, ["elsewhere"], "wave", {"text": "sea"})

    answer = await indexed.post("/store/items/search", json={"namespace_prefix": ["docs"], "query": "sea and waves"})
    items = answer.json()["items"]
    assert [item["key"] for item in items][:2] == ["harbour", "ferry"]
    assert len(items) == 4
    assert items[0]["score"] == pytest.approx(1, abs=0.01)
    assert [item["score"] for item in items] == sorted((item["score"] for item in items), reverse=True)
    assert await search(indexed, ["docs"], query="sea", filter={"long": True}, limit=1) == ["ferry"]
    assert set(await search(indexed, ["docs"])) == {*texts, "hidden"}

    # What is written anew is found by its new text, by other fields when told so, or not at all.
    await put(indexed, ["docs"], "harbour", {"text": "snow on the mountain"})
    assert (await search(indexed, ["docs"], query="sea"))[0] == "ferry"
    await put(indexed, ["docs"], "harbour", {"text": "snow", "also": ["wave", "sea"]}, index=["also[*]"])
    assert (await search(indexed, ["docs"], query="sea"))[0] == "harbour"
    await put(indexed, ["docs"], "harbour", {"text": "sea"}, index=False)
    assert "harbour" not in await search(indexed, ["docs"], query="sea")


async def test_pages_of_a_search_by_meaning_are_complete(indexed: httpx.AsyncClient) -> None:
    await asyncio.gather(*(put(indexed, ["p"], str(n), {"text": "sea " * n + "town"}) for n in range(30)))
    pages = [await search(indexed, ["p"], query="sea", limit=4, offset=offset) for offset in range(0, 32, 4)]
    assert [key for page in pages for key in page] == [str(n) for n in range(29, -1, -1)]


async def run(client: httpx.AsyncClient, graph: str, **input: Any) -> Any:
    answer = await client.post("/runs/wait", json={"assistant_id": graph, "input": input})
    assert answer.status_code == 200, answer.text
    return answer.json()["seen"]


async def test_graphs_and_clients_share_the_store(indexed: httpx.AsyncClient, settings: Settings) -> None:
    async with working(settings):
        assert await run(indexed, "remember", user="ada") is None
        assert (await get(indexed, "people.ada", "visit"))["value"] == {"text": "went to the market"}
        assert (await search(indexed, ["people"], query="streets of a town")) == ["visit"]
        await put(indexed, ["people", "ada"], "profile", {"born": 1815})
        assert await run(indexed, "remember", user="ada") == {"born": 1815}
        assert await run(indexed, "count_blocking", user="ada") == ["blocking", "profile", "visit"]
        await put(indexed, ["settings"], "greeting", {"text": "hello"})
        assert await run(indexed, "factory", user="ada") == "hello"
    # The server's own looks at a graph see it too.
    drawn = (await indexed.get("/assistants/factory/graph")).json()
    assert "hello" in [node["id"] for node in drawn["nodes"]]

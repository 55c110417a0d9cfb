"""The Python SDK's store, asynchronous and not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from langgraph_sdk.errors import BadRequestError, UnprocessableEntityError

from holdfast.settings import Settings
from tests.support.sdk import Sdk
from tests.support.store_project import serving, working


@pytest.fixture(params=["async", "sync"])
async def sdk(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[Sdk]:
    async with serving(settings):
        opened = Sdk(f"http://127.0.0.1:{settings.port}", blocking=request.param == "sync")
        yield opened
        await opened.close()


async def test_C53_the_life_of_an_item(sdk: Sdk) -> None:
    place = ["people", "ada"]
    assert await sdk("store.get_item", place, key="profile") is None
    assert await sdk("store.put_item", place, key="profile", value={"age": 36, "text": "a ship"}, ttl=5) is None
    await sdk("store.put_item", ["people", "bob"], key="profile", value={"age": 9}, index=False)
    item = await sdk("store.get_item", place, key="profile", refresh_ttl=True)
    assert (item["namespace"], item["key"], item["value"]["age"]) == (place, "profile", 36)

    found = await sdk("store.search_items", ["people"], filter={"age": {"$gte": 10}})
    assert found["items"] == [{**item, "score": None}]
    found = await sdk("store.search_items", [], query="the sea", limit=5, offset=0, refresh_ttl=False)
    assert [one["namespace"] for one in found["items"]] == [place]
    assert found["items"][0]["score"] > 0.9
    listed = await sdk("store.list_namespaces", prefix=["people"], max_depth=2)
    assert listed == {"namespaces": [place, ["people", "bob"]]}

    for _ in range(2):
        assert await sdk("store.delete_item", place, key="profile") is None
    assert await sdk("store.get_item", place, key="profile") is None


async def test_errors_are_told_apart(sdk: Sdk) -> None:
    with pytest.raises(BadRequestError, match="reserved"):
        await sdk("store.put_item", ["langgraph"], key="k", value={})
    with pytest.raises(BadRequestError, match="must not be empty"):
        await sdk("store.put_item", [], key="k", value={})
    with pytest.raises(UnprocessableEntityError, match="period"):
        await sdk("store.search_items", ["a.b"])
    with pytest.raises(UnprocessableEntityError, match="unknown operator"):
        await sdk("store.search_items", ["a"], filter={"n": {"$near": 1}})


async def test_a_graph_sees_what_a_client_put(sdk: Sdk, settings: Settings) -> None:
    await sdk("store.put_item", ["people", "ada"], key="profile", value={"born": 1815})
    async with working(settings):
        result = await sdk("runs.wait", None, "remember", input={"user": "ada"})
    assert result["seen"] == {"born": 1815}
    visit = await sdk("store.get_item", ["people", "ada"], key="visit")
    assert visit["value"] == {"text": "went to the market"}

"""Filters and lists of ids are small, and a body has a bounded number of objects: Postgres and Python take many times
the bytes of a request to hold an empty object."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pytest

from holdfast.api.bodies import MAX_FILTER_BYTES, MAX_IDS
from holdfast.auth.bounded_json import MAX_CONTAINERS
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.support.json_body import JSON
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, port=free_port())


@pytest.fixture
async def web(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(settings, GraphCatalog.load(load_config(EXAMPLES))) as client:
        yield client


def filter_fields(document: dict[str, Any]) -> list[tuple[str, str]]:
    """The filters of all operations that search, count or act on what fits: path and field."""
    found = []
    for path, methods in document["paths"].items():
        words = ("search", "count", "history", "versions", "discard", "retry")
        if "post" not in methods or path.rsplit("/", 1)[-1] not in words:
            continue
        body = str(methods["post"].get("requestBody", ""))
        for name, schema in document["components"]["schemas"].items():
            if f"/{name}'" in body:
                fields = schema.get("properties", {})
                found += [(path, field) for field in ("metadata", "values", "filter") if field in fields]
    return found


@pytest.mark.parametrize(
    "filter", ['{"a": "%s"}' % ("x" * MAX_FILTER_BYTES), '{"a":' * 300 + "1" + "}" * 300], ids=["large", "deep"]
)
@pytest.mark.parametrize("path", ["/dead-letters", "/interrupts"])
async def test_filter_in_a_query_is_refused(web: httpx.AsyncClient, path: str, filter: str) -> None:
    answer = await web.get(path, params={"metadata": filter})
    assert (answer.status_code, answer.json()["detail"].partition(":")[0]) == (422, "metadata"), answer.text


async def test_large_filters_are_refused(web: httpx.AsyncClient) -> None:
    filters = filter_fields((await web.get("/openapi.json")).json())
    assert len(filters) >= 10
    large: dict[str, Any] = {"a": [{}] * (MAX_FILTER_BYTES // 3)}
    for path, field in filters:
        path = path.replace("{thread_id}", str(uuid4())).replace("{assistant_id}", "echo")
        answer = await web.post(path, json={field: large})
        assert answer.status_code == 422, (path, field, answer.text)
        assert f"{MAX_FILTER_BYTES:,} bytes" in answer.json()["detail"], (path, field, answer.text)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/threads/search", "ids"),
        ("/threads/count", "ids"),
        ("/threads/prune", "thread_ids"),
        ("/runs/cancel", "run_ids"),
    ],
)
async def test_many_ids_are_refused(web: httpx.AsyncClient, path: str, field: str) -> None:
    answer = await web.post(path, json={field: [str(uuid4()) for _ in range(MAX_IDS + 1)]})
    assert answer.status_code == 422
    assert str(MAX_IDS) in answer.json()["detail"]


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "many"}], ids=["plain", "with a key"])
@pytest.mark.parametrize("path", ["/threads", "/threads/search", "/runs", "/assistants"])
async def test_body_with_too_many_objects_is_refused(
    web: httpx.AsyncClient, path: str, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"metadata": {"a": [' + b"{}," * MAX_CONTAINERS + b"{}]}}"
    monkeypatch.setattr("orjson.loads", _refuse_large)
    answer = await web.post(path, content=body, headers={**JSON, **headers})
    monkeypatch.undo()
    assert answer.status_code == 422
    assert f"{MAX_CONTAINERS:,} objects and arrays" in answer.json()["detail"]


def _refuse_large(text: bytes | str, parse: Callable[[bytes | str], Any] = orjson.loads) -> Any:
    """`orjson.loads` of a process that fails when it parses a large text."""
    assert len(text) < MAX_CONTAINERS
    return parse(text)

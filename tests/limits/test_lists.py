"""Lists in a request: what is wrong with one of them, and what is done with each item, takes little memory and time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import httpx
import pytest

from holdfast.api.bodies import MAX_SELECTED, Body
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES

MANY = 1000


@pytest.fixture
def settings(database_url: str) -> Settings:
    return load_settings({}, database_url=database_url, port=free_port())


@pytest.fixture
async def web(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with answering(settings, GraphCatalog.load(load_config(EXAMPLES))) as client:
        yield client


def bodies(model: type[Body] = Body) -> Iterator[type[Body]]:
    for one in model.__subclasses__():
        yield one
        yield from bodies(one)


def collections(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists and mappings in the schema of a model."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            yield schema
        for key, part in schema.items():
            if key != "metadata":
                yield from collections(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from collections(part)


def test_validation_of_every_list_stops_at_the_first_wrong_item() -> None:
    found = {model: list(collections(model.__pydantic_core_schema__)) for model in bodies()}
    assert sum(map(len, found.values())) > 50
    for model, schemas in found.items():
        assert all(schema.get("fail_fast") for schema in schemas), model


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/runs", {"assistant_id": "echo", "interrupt_before": [1] * MANY}),
        ("/runs", {"assistant_id": "echo", "config": {"tags": [1] * MANY}}),
        ("/runs", {"assistant_id": "echo", "stream_mode": ["x"] * MANY}),
        ("/runs", {"assistant_id": "echo", "command": {"goto": [1] * MANY}}),
        ("/runs/batch", [1] * MANY),
        ("/threads", {"supersteps": [1] * MANY}),
        ("/threads/search", {"ids": ["x"] * MANY}),
        ("/threads/search", {"extract": {f"a{number}": 1 for number in range(MANY)}}),
        ("/store/namespaces", {"prefix": [1] * MANY}),
    ],
)
async def test_wrong_items_are_described_once(web: httpx.AsyncClient, path: str, body: Any) -> None:
    """Each description takes a kilobyte: those of all that 20 MB can hold would take all memory."""
    answer = await web.post(path, json=body)
    assert answer.status_code == 422
    detail = answer.json()["detail"]
    assert "0" in detail
    assert ".1" not in detail, detail
    assert "1:" not in detail, detail


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/threads/search", "status"),
        ("/assistants/search", "name"),
        ("/runs/crons/search", "schedule"),
        (f"/threads/{UUID(int=1)}/history", "values"),
    ],
)
async def test_many_selected_fields_are_refused(web: httpx.AsyncClient, path: str, field: str) -> None:
    """They are looked up in each row of a page."""
    answer = await web.post(path, json={"select": [field] * (MAX_SELECTED + 1)})
    assert answer.status_code == 422
    assert str(MAX_SELECTED) in answer.json()["detail"]


@pytest.mark.parametrize("query", [{"select": ["values"] * (MAX_SELECTED + 1)}, {"select": "next," * 2 * MAX_SELECTED}])
@pytest.mark.parametrize("what", ["state", "history"])
async def test_many_selected_fields_in_a_query_are_refused(
    web: httpx.AsyncClient, what: str, query: dict[str, Any]
) -> None:
    thread_id = (await web.post("/threads", json={})).json()["thread_id"]
    answer = await web.get(f"/threads/{thread_id}/{what}", params=query)
    assert answer.status_code == 422
    assert f"{MAX_SELECTED:,} fields" in answer.json()["detail"]

"""/store: items that outlive threads, shared with graph code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Response
from langgraph.store.base import NOT_PROVIDED, InvalidNamespaceError, Item, SearchItem
from pydantic import AfterValidator, Field

from holdfast.api.context import Web
from holdfast.api.edge import JsonRoute
from holdfast.api.errors import Json
from holdfast.api.listing import NullsAreAbsent
from holdfast.errors import BadRequest, InvalidRequest
from holdfast.graphs.store import LONGEST_TTL
from holdfast.resources.store import InvalidFilter, TooManyTexts

router = APIRouter(tags=["store"], route_class=JsonRoute)

# Bytes of a namespace and a key together, and of a path of `index`: Postgres indexes no more than 2700 in a row.
LONGEST_NAME = 2000
LONGEST_PATH = 500
LAST_OFFSET = 2**31 - 1


def _label(label: str) -> str:
    if not label:
        raise ValueError("a label of a namespace must not be empty")
    if "." in label or "\0" in label:
        raise ValueError("a label of a namespace must not contain a period or a NUL character")
    return label


def _short(labels: list[str]) -> list[str]:
    if len(".".join(labels).encode()) > LONGEST_NAME:
        raise ValueError(f"a namespace has at most {LONGEST_NAME} bytes")
    return labels


def _path(path: str) -> str:
    if not path or "\0" in path or len(path.encode()) > LONGEST_PATH:
        raise ValueError(f"a path must have 1 to {LONGEST_PATH} bytes, none of them NUL")
    return path


Label = Annotated[str, AfterValidator(_label)]
Paths = Annotated[list[Annotated[str, AfterValidator(_path)]], Field(max_length=100)]
Namespace = Annotated[list[Label], AfterValidator(_short)]


class ItemPut(NullsAreAbsent):
    namespace: Namespace
    key: str
    value: dict[str, Any]
    index: Literal[False] | Paths | None = Field(
        default=None, description="The paths of the texts to embed; false for none. The project's fields if absent."
    )
    ttl: float | None = Field(default=None, gt=0, le=LONGEST_TTL, allow_inf_nan=False, description="Minutes.")


class ItemDelete(NullsAreAbsent):
    namespace: Namespace
    key: str


class ItemSearch(NullsAreAbsent):
    namespace_prefix: Namespace = Field(default_factory=list)
    filter: dict[str, Any] | None = Field(default=None, max_length=100)
    limit: int = Field(default=10, ge=1, le=1000)
    offset: int = Field(default=0, ge=0, le=LAST_OFFSET)
    query: str | None = None
    refresh_ttl: bool | None = None


class NamespaceList(NullsAreAbsent):
    prefix: Namespace | None = None
    suffix: Namespace | None = None
    max_depth: int | None = Field(default=None, ge=1, le=LONGEST_NAME)
    limit: int = Field(default=100, ge=1, le=1000)
    offset: int = Field(default=0, ge=0, le=LAST_OFFSET)


@router.put("/store/items", status_code=204)
async def put(web: Web, body: ItemPut) -> Response:
    namespace = tuple(body.namespace)
    if not namespace:
        raise BadRequest("namespace: must not be empty.")
    if namespace[0] == "langgraph":
        raise BadRequest("namespace: the root label 'langgraph' is reserved.")
    size = len(".".join(namespace).encode()) + len(body.key.encode())
    if size > LONGEST_NAME:
        raise InvalidRequest(f"namespace and key are {size} bytes long together; {LONGEST_NAME} are possible.")
    ttl = NOT_PROVIDED if body.ttl is None else body.ttl
    with _refusals():
        await web.store.aput(namespace, body.key, body.value, index=body.index, ttl=ttl)
    return Response(status_code=204)


@router.get("/store/items")
async def get(web: Web, namespace: str = "", key: str | None = None, refresh_ttl: bool | None = None) -> Response:
    """The item, or null when there is none."""
    if key is None:
        raise BadRequest("key: missing.")
    labels = tuple(namespace.split(".")) if namespace else ()
    with _refusals():
        item = await web.store.aget(labels, key, refresh_ttl=refresh_ttl)
    return Json(None if item is None else _present(item))


@router.delete("/store/items", status_code=204)
async def delete(web: Web, body: ItemDelete) -> Response:
    with _refusals():
        await web.store.adelete(tuple(body.namespace), body.key)
    return Response(status_code=204)


@router.post("/store/items/search")
async def search(web: Web, body: Annotated[ItemSearch | None, Body()] = None) -> Response:
    body = body or ItemSearch()
    with _refusals():
        found = await web.store.asearch(
            tuple(body.namespace_prefix),
            query=body.query,
            filter=body.filter,
            limit=body.limit,
            offset=body.offset,
            refresh_ttl=body.refresh_ttl,
        )
    return Json({"items": [{**_present(item), "score": item.score} for item in found]})


@router.post("/store/namespaces")
async def namespaces(web: Web, body: Annotated[NamespaceList | None, Body()] = None) -> Response:
    body = body or NamespaceList()
    with _refusals():
        found = await web.store.alist_namespaces(
            prefix=tuple(body.prefix or ()),
            suffix=tuple(body.suffix or ()),
            max_depth=body.max_depth,
            limit=body.limit,
            offset=body.offset,
        )
    return Json({"namespaces": found})


def _present(item: Item | SearchItem) -> dict[str, Any]:
    return {
        "namespace": list(item.namespace),
        "key": item.key,
        "value": item.value,
        "created_at": item.created_at.astimezone(UTC),
        "updated_at": item.updated_at.astimezone(UTC),
    }


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (InvalidNamespaceError, InvalidFilter, TooManyTexts) as error:
        raise InvalidRequest(str(error)) from None

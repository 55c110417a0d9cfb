"""/store: items that outlive threads, shared with graph code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC
from typing import Annotated, Any, Literal

from fastapi import Body
from langgraph.store.base import NOT_PROVIDED, InvalidNamespaceError, Item, SearchItem
from pydantic import AfterValidator, Field
from starlette.responses import Response

from holdfast.api.bodies import Contained, Flag, NullsAreAbsent, Number, Whole
from holdfast.api.context import Web, WebContext
from holdfast.api.destructive import Destructive
from holdfast.api.errors import Json
from holdfast.api.response_models import NEXT, FoundItems, FoundNamespaces, StoredItem, answers, refusals
from holdfast.api.routes import Routes
from holdfast.errors import BadRequest, Denied, InvalidRequest
from holdfast.graphs.store import MAX_TTL_MINUTES
from holdfast.resources.store import FoundItems as Found
from holdfast.resources.store import InvalidFilter, TooManyTexts

routes = Routes(tags=["store"])

# Bytes of a namespace and a key together, and of a path of `index`: Postgres indexes no more than 2700 in a row.
MAX_NAME_BYTES = 2000
MAX_PATH_BYTES = 500
LAST_OFFSET = 2**31 - 1


def _label(label: str) -> str:
    if not label:
        raise ValueError("a label of a namespace must not be empty")
    if "." in label or "\0" in label:
        raise ValueError("a label of a namespace must not contain a period or a NUL character")
    return label


def _short(labels: list[str]) -> list[str]:
    if len(".".join(labels).encode()) > MAX_NAME_BYTES:
        raise ValueError(f"a namespace has at most {MAX_NAME_BYTES} bytes")
    return labels


def _path(path: str) -> str:
    if not path or "\0" in path or len(path.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"a path must have 1 to {MAX_PATH_BYTES} bytes, none of them NUL")
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
    ttl: Number | None = Field(default=None, gt=0, le=MAX_TTL_MINUTES, allow_inf_nan=False, description="Minutes.")


class ItemDelete(Destructive):
    namespace: Namespace
    key: str


class ItemSearch(NullsAreAbsent):
    namespace_prefix: Namespace = Field(default_factory=list)
    filter: Contained | None = Field(default=None, max_length=100)
    limit: Whole = Field(default=10, ge=1, le=1000)
    offset: Whole = Field(default=0, ge=0, le=LAST_OFFSET)
    query: str | None = None
    refresh_ttl: Flag | None = None


class NamespaceList(NullsAreAbsent):
    prefix: Namespace | None = None
    suffix: Namespace | None = None
    max_depth: Whole | None = Field(default=None, ge=1, le=MAX_NAME_BYTES)
    limit: Whole = Field(default=100, ge=1, le=1000)
    offset: Whole = Field(default=0, ge=0, le=LAST_OFFSET)


@routes.put("/store/items", status_code=204, summary="Put an item", responses=refusals(400))
async def put(web: Web, body: ItemPut) -> Response:
    namespace = tuple(body.namespace)
    if not namespace:
        raise BadRequest("namespace: must not be empty.")
    if namespace[0] == "langgraph":
        raise BadRequest("namespace: the root label 'langgraph' is reserved.")
    size = len(".".join(namespace).encode()) + len(body.key.encode())
    if size > MAX_NAME_BYTES:
        raise InvalidRequest(f"namespace and key are {size} bytes long together; {MAX_NAME_BYTES} are possible.")
    given = {"namespace": namespace, "key": body.key, "value": body.value, "index": body.index}
    asked = await _may(web, "put", given)
    ttl = NOT_PROVIDED if body.ttl is None else body.ttl
    with _refusals():
        await web.store.aput(asked["namespace"], asked["key"], asked["value"], index=asked["index"], ttl=ttl)
    return Response(status_code=204)


@routes.get("/store/items", summary="Get an item", responses=answers(StoredItem | None, 400))
async def get(web: Web, namespace: str = "", key: str | None = None, refresh_ttl: bool | None = None) -> Response:
    """The item, or null when there is none."""
    if key is None:
        raise BadRequest("key: missing.")
    labels = tuple(namespace.split(".")) if namespace else ()
    asked = await _may(web, "get", {"namespace": labels, "key": key})
    if refresh_ttl:
        await _may_refresh(web, labels, key)
    with _refusals():
        item = await web.store.aget(asked["namespace"], asked["key"], refresh_ttl=refresh_ttl)
    return Json(None if item is None else _present(item))


@routes.delete("/store/items", status_code=204, summary="Delete an item")
async def delete(web: Web, body: ItemDelete) -> Response:
    asked = await _may(web, "delete", {"namespace": tuple(body.namespace), "key": body.key})
    with _refusals():
        await web.store.adelete(asked["namespace"], asked["key"])
    return Response(status_code=204)


@routes.post("/store/items/search", summary="Search items", responses=answers(FoundItems, headers=NEXT))
async def search(web: Web, body: Annotated[ItemSearch | None, Body()] = None) -> Response:
    body = body or ItemSearch()
    asked = body.model_dump(include={"filter", "limit", "offset", "query"})
    asked = await _may(web, "search", {"namespace": tuple(body.namespace_prefix), **asked})
    if body.refresh_ttl:
        await _may_refresh(web, tuple(body.namespace_prefix), None)
    with _refusals():
        found = await web.store.asearch(
            asked["namespace"],
            query=asked["query"],
            filter=asked["filter"],
            limit=asked["limit"],
            offset=asked["offset"],
            refresh_ttl=body.refresh_ttl,
        )
    # A search of the database itself knows whether it was cut short; a project's own store does not report it.
    more = isinstance(found, Found) and found.more
    headers = {"x-pagination-next": str(asked["offset"] + len(found))} if more else None
    return Json({"items": [{**_present(item), "score": item.score} for item in found]}, headers=headers)


@routes.post("/store/namespaces", summary="List namespaces", responses=answers(FoundNamespaces))
async def namespaces(web: Web, body: Annotated[NamespaceList | None, Body()] = None) -> Response:
    body = body or NamespaceList()
    asked = body.model_dump(include={"max_depth", "limit", "offset"})
    given = {"namespace": tuple(body.prefix or ()), "suffix": tuple(body.suffix or ()), **asked}
    asked = await _may(web, "list_namespaces", given)
    with _refusals():
        found = await web.store.alist_namespaces(
            prefix=asked["namespace"],
            suffix=tuple(asked["suffix"] or ()),
            max_depth=asked["max_depth"],
            limit=asked["limit"],
            offset=asked["offset"],
        )
    return Json({"namespaces": found})


async def _may(web: WebContext, action: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Authorize an operation. Returns the operation as the project's handler changed it: the handler may move the
    caller to a separate namespace. Raises Denied, also when the handler returns a filter, because items have no
    metadata."""
    await web.caller.may_unfiltered("store", action, asked)
    asked["namespace"] = tuple(asked["namespace"] or ())
    return asked


async def _may_refresh(web: WebContext, namespace: tuple[str, ...], key: str | None) -> None:
    """Whether the caller, who may read items, may also have them live longer. A read without `refresh_ttl` does what
    the project's store.ttl says. Raises Denied."""
    try:
        await _may(web, "put", {"namespace": namespace, "key": key, "value": None, "index": None})
    except Denied as refusal:
        reason = f"refresh_ttl: {refusal} Leave it out to read without changing when items expire."
        raise Denied(refusal.status, reason, refusal.headers) from None


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

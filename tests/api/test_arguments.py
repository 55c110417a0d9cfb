"""What an endpoint is given, by the signature of the function."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Literal
from urllib.parse import urlencode
from uuid import UUID

import orjson
import pytest
from fastapi import Body, Header, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from holdfast.api.arguments import Arguments
from holdfast.api.context import Web
from holdfast.api.request_body import JsonRequest
from holdfast.errors import InvalidRequest

WEB: Any = SimpleNamespace(settings=SimpleNamespace(max_body_bytes=10_000), auth=None)
ID = "5f1a7c1e-0d0b-4d39-8c54-7d4f4a5f8a11"


class Thing(BaseModel):
    name: str
    sizes: list[int] = []


async def get(
    web: Web,
    thing_id: UUID,
    limit: Annotated[int, Query(ge=1, le=10)] = 5,
    state: Literal["on", "off"] | None = None,
    names: Annotated[Sequence[str], Query()] = (),
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    raise NotImplementedError


async def put(web: Web, request: Request, body: Thing, deep: bool = False) -> Response:
    raise NotImplementedError


async def search(body: Annotated[Thing | None, Body()] = None) -> Response:
    raise NotImplementedError


async def read(
    endpoint: Callable[..., Awaitable[Response]],
    path: dict[str, str] | None = None,
    query: Sequence[tuple[str, str]] = (),
    body: bytes = b"",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> dict[str, Any]:
    path = path or {}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "headers": headers, "query_string": urlencode(query).encode(), "path_params": path}
    return await Arguments(endpoint, path.keys()).read(WEB, JsonRequest(scope, receive, WEB))


async def test_values_come_from_path_query_and_headers() -> None:
    assert await read(get, {"thing_id": ID}) == {
        "web": WEB,
        "thing_id": UUID(ID),
        "limit": 5,
        "state": None,
        "names": (),
        "last_event_id": None,
    }
    query = [("limit", "7"), ("state", "on"), ("names", "a"), ("names", "b"), ("unknown", "x")]
    given = await read(get, {"thing_id": ID.upper()}, query, headers=[(b"last-event-id", b"3")])
    assert (given["limit"], given["state"], given["names"]) == (7, "on", ["a", "b"])
    assert (given["thing_id"], given["last_event_id"]) == (UUID(ID), "3")


async def test_body_is_read_by_its_model() -> None:
    given = await read(put, body=orjson.dumps({"name": "x", "sizes": [1], "unknown": 1}), query=[("deep", "true")])
    assert given["body"] == Thing(name="x", sizes=[1])
    assert given["deep"] is True
    assert isinstance(given["request"], Request)


async def test_absent_body_is_the_default_or_a_problem() -> None:
    assert await read(search) == {"body": None}
    with pytest.raises(InvalidRequest, match=r"^Field required$"):
        await read(put)


async def test_null_is_a_body() -> None:
    assert await read(search, body=b"null") == {"body": None}
    with pytest.raises(InvalidRequest, match=r"^Input should be a valid dictionary"):
        await read(put, body=b"null")


async def test_empty_text_in_the_query_is_a_value() -> None:
    with pytest.raises(InvalidRequest, match=r"^limit: Input should be a valid integer"):
        await read(get, {"thing_id": ID}, [("limit", "")])


async def test_all_problems_are_in_one_sentence() -> None:
    with pytest.raises(InvalidRequest) as found:
        await read(get, {"thing_id": "x"}, [("limit", "11"), ("state", "up")])
    assert str(found.value).split("; ") == [
        "thing_id: Input should be a valid UUID, invalid character: found `x` at 0",
        "limit: Input should be less than or equal to 10",
        "state: Input should be 'on' or 'off'",
    ]
    with pytest.raises(InvalidRequest) as found:
        await read(put, body=orjson.dumps({"sizes": ["x"] * 9}))
    assert str(found.value).startswith("name: Field required; sizes.0: Input should be a valid integer")
    assert str(found.value).count(";") == 4, "the first five"


async def test_body_that_is_not_json() -> None:
    with pytest.raises(InvalidRequest, match=r"^\d+: JSON decode error$"):
        await read(put, body=b'{"name": ')


def test_signature_must_take_what_is_in_the_path() -> None:
    with pytest.raises(TypeError, match="no parameter for other_id"):
        Arguments(get, {"thing_id", "other_id"})


def test_signature_has_one_body() -> None:
    async def two(one: Thing, other: Thing) -> Response:
        raise NotImplementedError

    with pytest.raises(TypeError, match="cannot both be the body"):
        Arguments(two, set())

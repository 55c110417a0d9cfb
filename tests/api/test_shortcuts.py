"""Requests find their route by a shortcut, and it is the route that FastAPI would have found."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.routing import Match
from starlette.types import Message, Scope

from holdfast.api.app import build_app
from holdfast.api.shortcuts import Shortcuts
from holdfast.settings import load_settings
from tests.support.http_project import context, project

ID = "5f1a7c1e-0d0b-4d39-8c54-7d4f4a5f8a11"


def requests(app: Any) -> list[tuple[str, str]]:
    """One for each operation of the API."""
    return [
        (method.upper(), "/".join(ID if part.startswith("{") else part for part in path.split("/")))
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    ]


async def routed(app: Any, method: str, path: str) -> tuple[Any, Any]:
    """The endpoint that a request comes to, and the parameters it is given."""
    seen: Scope = {}

    class Found(Exception):
        pass

    class Watched(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, value)
            if key == "route":
                seen.update(self)
                raise Found

    async def never() -> Message:
        raise AssertionError("nothing is read")

    async def unsent(_: Message) -> None:
        raise AssertionError("nothing is sent")

    scope = Watched(type="http", method=method, path=path, headers=[], query_string=b"", app=app)
    with pytest.raises(Found):
        await app.router.middleware_stack(scope, never, unsent)
    return seen["endpoint"], seen["path_params"]


async def test_every_operation_is_found_where_fastapi_finds_it() -> None:
    settings = load_settings({}, database_url="postgresql://nowhere.invalid/none")
    app = build_app(context(project(), settings))
    asked = requests(app)
    assert len(asked) > 80
    for method, path in asked:
        by_shortcut = await routed(app, method, path)
        for included in app.router.routes:
            scope: Scope = {"type": "http", "method": method, "path": path, "headers": []}
            match, _ = included.matches(scope)
            if match is Match.FULL:
                match, found, _, _ = included._match(scope)  # type: ignore[attr-defined]
                assert (found["endpoint"], found["path_params"]) == by_shortcut, (method, path)
                break
        else:
            raise AssertionError(f"{method} {path} is nowhere")


async def test_the_shortcut_is_taken(web: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def long_way(*_: Any) -> None:
        raise AssertionError("asked of every router")

    original = Shortcuts.__call__

    async def short(self: Shortcuts, *arguments: Any) -> None:
        self._otherwise = long_way
        await original(self, *arguments)

    monkeypatch.setattr(Shortcuts, "__call__", short)
    assert (await web.post("/threads", json={})).status_code == 200


async def test_what_is_not_found_goes_the_long_way(web: httpx.AsyncClient) -> None:
    assert (await web.get("/nowhere/at/all")).status_code == 404
    refused = await web.put("/threads", json={})
    assert refused.status_code == 405
    assert (await web.get("/openapi.json")).status_code == 200

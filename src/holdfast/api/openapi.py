"""`/openapi.json`: FastAPI describes the routes, from the same functions that answer. It serves none of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html, get_swagger_ui_oauth2_redirect_html
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response

import holdfast
from holdfast.api.errors import Json
from holdfast.api.idempotency import KEY_PARAMETER
from holdfast.api.response_models import Responses, everywhere, refusals
from holdfast.api.routes import Route, Routes

TITLE = "Holdfast"


class Description:
    """The OpenAPI document. `denials`: what routes that are not of `meta` may answer besides what they declare.

    `custom`: the project's own app, whose routes are described too if it is one of FastAPI; `security`: what
    `auth.openapi` of langgraph.json.
    """

    def __init__(
        self,
        meta: Iterable[Route],
        others: Iterable[Route],
        denials: Responses,
        custom: object = None,
        security: Mapping[str, Any] | None = None,
    ) -> None:
        self._declared = [(route, Responses()) for route in meta] + [(route, denials) for route in others]
        self._custom = custom
        self._security = security or {}
        self._own = cache(self._describe)

    def document(self) -> dict[str, Any]:
        document = self._own()
        if isinstance(self._custom, FastAPI):
            document = with_routes_of(document, self._custom.openapi())
        return with_security(document, self._security)

    def _describe(self) -> dict[str, Any]:
        described = APIRouter()
        for route, denials in self._declared:
            if route.described is not None:
                options = _described(route, denials)
                described.add_api_route(route.path, route.endpoint, methods=list(route.methods), **options)
        return get_openapi(title=TITLE, version=holdfast.__version__, routes=described.routes)


def _described(route: Route, denials: Responses) -> dict[str, Any]:
    """What a route declares, and what it may answer and take because of how it is served."""
    options = dict(route.described or {})
    responses = Responses(denials)
    if not route.public:
        responses |= everywhere(route.methods)
    if route.creates:
        responses |= refusals(410)
        extra = options.get("openapi_extra") or {}
        options["openapi_extra"] = {**extra, "parameters": [*extra.get("parameters", ()), KEY_PARAMETER]}
    options["responses"] = responses | (options.get("responses") or {})
    return options


def pages(description: Description) -> Routes:
    """The document, and the pages that show it."""
    routes = Routes(public=True)

    async def document(request: Request) -> Response:
        document, prefix = description.document(), _prefix(request)
        return Json({**document, "servers": [{"url": prefix}]} if prefix else document)

    async def swagger(request: Request) -> Response:
        prefix = _prefix(request)
        return get_swagger_ui_html(
            openapi_url=f"{prefix}/openapi.json",
            title=f"{TITLE} - Swagger UI",
            oauth2_redirect_url=f"{prefix}/docs/oauth2-redirect",
        )

    async def oauth2_redirect() -> Response:
        return get_swagger_ui_oauth2_redirect_html()

    async def redoc(request: Request) -> Response:
        return get_redoc_html(openapi_url=f"{_prefix(request)}/openapi.json", title=f"{TITLE} - ReDoc")

    routes.add_page("/openapi.json", document)
    routes.add_page("/docs", swagger)
    routes.add_page("/docs/oauth2-redirect", oauth2_redirect)
    routes.add_page("/redoc", redoc)
    return routes


def _prefix(request: Request) -> str:
    prefix: str = request.scope.get("root_path", "")
    return prefix.rstrip("/")


def with_routes_of(document: Mapping[str, Any], custom: Mapping[str, Any]) -> dict[str, Any]:
    """A description of the API with that of the custom app laid over it, as its routes are."""
    merged: dict[str, Any] = copy.deepcopy(dict(document))
    known: dict[str, Any] = merged.setdefault("components", {}).setdefault("schemas", {})
    theirs: dict[str, Any] = (custom.get("components") or {}).get("schemas") or {}
    renamed = {name: f"Custom{name}" for name, schema in theirs.items() if known.get(name, schema) != schema}
    added = _renamed(custom, renamed)
    for name, schema in ((added.get("components") or {}).get("schemas") or {}).items():
        known.setdefault(renamed.get(name, name), schema)
    for kind, entries in (added.get("components") or {}).items():
        if kind != "schemas":
            merged["components"].setdefault(kind, {}).update(entries)
    for path, operations in (added.get("paths") or {}).items():
        merged["paths"][path] = {**merged["paths"].get(path, {}), **operations}
    return merged


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The same with references to schemas under their new names."""
    if isinstance(value, dict):
        return {key: _reference(item, names) if key == "$ref" else _renamed(item, names) for key, item in value.items()}
    return [_renamed(item, names) for item in value] if isinstance(value, list) else value


def _reference(target: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(target, str):
        return _renamed(target, names)
    start, slash, name = target.rpartition("/")
    return f"{start}{slash}{names.get(name, name)}"


def with_security(document: dict[str, Any], security: Mapping[str, Any]) -> dict[str, Any]:
    """A description with the `openapi` of langgraph.json's `auth`: security schemes, what is required by default, and
    what by single routes."""
    if not security:
        return document
    secured: dict[str, Any] = copy.deepcopy(document)
    secured.setdefault("components", {}).setdefault("securitySchemes", {}).update(security.get("securitySchemes") or {})
    if "security" in security:
        secured["security"] = security["security"]
    for path, methods in (security.get("paths") or {}).items():
        for method, required in methods.items():
            if method.lower() in secured["paths"].get(path, {}):
                secured["paths"][path][method.lower()]["security"] = required
    return secured

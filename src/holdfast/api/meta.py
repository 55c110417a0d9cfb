"""/, /ok, /info and /openapi.json: what the server is, for everybody."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import psycopg
from fastapi import APIRouter, FastAPI, Request, Response
from psycopg_pool import PoolTimeout

import holdfast
from holdfast.api.context import WebContext
from holdfast.api.errors import Json
from holdfast.api.shapes import Health, Information, answers
from holdfast.graphs.http import HttpSection


def meta_router(section: HttpSection) -> APIRouter:
    """The routes for a server with these switches. Not JsonRoutes: they ask nobody who they are."""
    router = APIRouter(tags=["meta"])
    whole = "meta" not in section.disabled
    health = answers(Health, 422) | {503: {"model": Health, "description": "The database cannot be reached."}}

    async def ok(request: Request, check_db: bool = False) -> Response:
        if not check_db or not whole:
            return Json({"ok": True, "services": {"postgres": "skipped"}})
        web: WebContext = request.app.state.holdfast
        try:
            async with web.database.connection() as connection:
                await connection.execute("SELECT 1")
        except (psycopg.Error, PoolTimeout, OSError):
            return Json({"ok": False, "services": {"postgres": "unhealthy"}}, status_code=503)
        return Json({"ok": True, "services": {"postgres": "healthy"}})

    async def info() -> Response:
        return Json(information(section))

    router.add_api_route("/ok", ok, summary="Is the server up?", responses=health)
    if whole:
        router.add_api_route("/", ok, include_in_schema=False)
        router.add_api_route("/info", info, summary="What the server is", responses=answers(Information))
    return router


def information(section: HttpSection) -> dict[str, Any]:
    """What clients ask before they rely on something."""
    return {
        "version": holdfast.__version__,
        "langgraph_py_version": version("langgraph"),
        "flags": {
            "assistants": "assistants" not in section.disabled,
            "crons": section.disabled.isdisjoint({"runs", "crons"}),
            "event_streaming": "event_streaming" not in section.disabled,
            "langsmith": False,
            "langsmith_tracing_replicas": False,
            "langsmith_tracing_session_on_runs": False,
            "strict_resume": True,
        },
        "host": {
            "kind": "self-hosted",
            "project_id": None,
            "host_revision_id": None,
            "revision_id": None,
            "tenant_id": None,
        },
    }


def describe(api: FastAPI, custom: object, security: Mapping[str, Any]) -> None:
    """Have `/openapi.json` describe the custom app's routes too, if it is one of FastAPI, and what `auth.openapi` of
    langgraph.json says of security."""
    own = api.openapi

    def whole() -> dict[str, Any]:
        document = own()
        if isinstance(custom, FastAPI):
            document = with_routes_of(document, custom.openapi())
        return with_security(document, security)

    api.openapi = whole  # type: ignore[method-assign]


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

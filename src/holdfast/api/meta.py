"""/, /ok and /info: the server's description, without authentication."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import psycopg
from psycopg_pool import PoolTimeout
from starlette.responses import Response

import holdfast
from holdfast.api.context import Web
from holdfast.api.errors import Json
from holdfast.api.response_models import Health, Information, answers
from holdfast.api.routes import Routes
from holdfast.graphs.http import HttpSection


def meta_routes(section: HttpSection) -> Routes:
    """The routes for a server with these switches."""
    routes = Routes(tags=["meta"], public=True)
    whole = "meta" not in section.disabled
    health = answers(Health, 422) | {503: {"model": Health, "description": "The database cannot be reached."}}

    async def ok(web: Web, check_db: bool = False) -> Response:
        if not check_db or not whole:
            return Json({"ok": True, "services": {"postgres": "skipped"}})
        try:
            async with web.database.connection() as connection:
                await connection.execute("SELECT 1")
        except (psycopg.Error, PoolTimeout, OSError):
            return Json({"ok": False, "services": {"postgres": "unhealthy"}}, status_code=503)
        return Json({"ok": True, "services": {"postgres": "healthy"}})

    async def info() -> Response:
        return Json(information(section))

    routes.get("/ok", summary="Is the server up?", responses=health)(ok)
    if whole:
        routes.get("/", include_in_schema=False)(ok)
        routes.get("/info", summary="What the server is", responses=answers(Information))(info)
    return routes


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

"""The web application: routers, error answers and the edge, put together."""

from __future__ import annotations

from importlib.metadata import version

import psycopg
from fastapi import FastAPI, Response
from psycopg_pool import PoolTimeout
from starlette.middleware.cors import CORSMiddleware

import holdfast
from holdfast.api import assistants, commands, crons, events, run_sets, runs, state, store, threads
from holdfast.api.context import Web, WebContext
from holdfast.api.edge import BodyLimit
from holdfast.api.errors import Json, install_error_handlers


def build_app(web: WebContext) -> FastAPI:
    """The application of one web process. `web` is opened and closed by whoever runs it."""

    app = FastAPI(title="Holdfast", version=holdfast.__version__)
    app.state.holdfast = web
    install_error_handlers(app)
    app.add_middleware(BodyLimit, limit=web.settings.max_body_bytes)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-pagination-total", "x-pagination-next", "content-location", "location"],
    )

    @app.get("/ok", tags=["meta"])
    @app.get("/", include_in_schema=False)
    async def ok(web: Web, check_db: bool = False) -> Response:
        if not check_db:
            return Json({"ok": True, "services": {"postgres": "skipped"}})
        try:
            async with web.database.connection() as connection:
                await connection.execute("SELECT 1")
        except (psycopg.Error, PoolTimeout, OSError):
            return Json({"ok": False, "services": {"postgres": "unhealthy"}}, status_code=503)
        return Json({"ok": True, "services": {"postgres": "healthy"}})

    @app.get("/info", tags=["meta"])
    async def info() -> Response:
        return Json({"version": holdfast.__version__, "langgraph_py_version": version("langgraph"), "flags": {}})

    app.include_router(assistants.router)
    app.include_router(threads.router)
    app.include_router(state.router)
    app.include_router(crons.router)
    app.include_router(runs.router)
    app.include_router(run_sets.router)
    app.include_router(commands.router)
    app.include_router(events.router)
    app.include_router(store.router)
    return app

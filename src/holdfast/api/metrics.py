"""/metrics: what this process and the fleet are doing, for machines."""

from __future__ import annotations

from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

import holdfast
from holdfast.api.context import Web, WebContext, admitted
from holdfast.api.errors import Json
from holdfast.api.response_models import refusals
from holdfast.api.routes import Routes
from holdfast.auth.keys import KeyAuth
from holdfast.db.pool_readings import pool_readings
from holdfast.signals.choose import signals_mode
from holdfast.telemetry import metrics as declared
from holdfast.telemetry.exposition import CONTENT_TYPE, as_json, as_text, wanted_format

# Scraped by machines, like the other meta routes: not authenticated, unless there are API keys.
routes = Routes(tags=["meta"], public=True)


@routes.get(
    "/metrics",
    summary="Metrics",
    description="Of this process, and of the fleet. While the database is away the "
    "figures of the fleet are missing, `queue` and `workers` are null, and `holdfast_database_up` is 0.",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}, "application/json": {}}},
        **refusals(422, 503),
    },
)
async def metrics(web: Web, request: Request, format: Literal["prometheus", "json"] | None = None) -> Response:
    if isinstance(web.auth, KeyAuth) and web.auth.guarded:
        caller = await admitted(web, request)
        await caller.may("queue", "read", {})
    readings = {**await web.figures.readings(web.database, web.metrics), **_own(web)}
    counted = web.metrics
    if wanted_format(format, request.headers.get("accept")) == "prometheus":
        return Response(as_text(counted, "web", readings), media_type=CONTENT_TYPE)
    queue = web.figures.queue
    streams = {"watchers": web.hub.watchers, "threads": web.hub.threads}
    workers = None if queue is None else _workers(queue)
    return Json({"queue": queue, "workers": workers, "api": streams, "metrics": as_json(counted, "web", readings)})


def _own(web: WebContext) -> declared.Readings:
    """The metrics that this process can report without reading the database."""
    mode = signals_mode(web.signals, web.settings)
    return {
        declared.STREAM_WATCHERS: web.hub.watchers,
        declared.STREAM_THREADS: web.hub.threads,
        declared.INFO: {("web", holdfast.__version__): 1},
        declared.UPKEEP_LEADING: int(web.leads()),
        declared.SIGNALS_MODE: {(one,): int(one == mode) for one in declared.MODES},
        **pool_readings(web.database),
    }


def _workers(queue: dict[str, Any]) -> dict[str, Any]:
    return {
        "online": queue["workers_online"],
        "draining": queue["workers_draining"],
        "capacity": queue["capacity"],
        "active": queue["running"],
    }

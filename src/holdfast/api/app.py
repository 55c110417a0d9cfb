"""The web application: the routes of the API, and the layers around them.

Every request passes through these layers, from the outermost to the innermost:

1. `Application` answers 503 when the process stops before the request is answered.
2. `RequestSpans` (`api/traces.py`), when traces are on: a span.
3. `RequestContextLayer` (`api/request_context.py`): the request's id, and the answer to an error that nothing else
   answers.
4. `CrossOriginLayer` (`api/cors.py`): which web pages may call.
5. `MountPrefix` (`api/mount_prefix.py`): the path that everything is under.
6. With a project's own app (`api/custom_app.py`): its middleware, then its routes.
7. `Router` (`api/router.py`): the routes of the API.

Below the first, in uvicorn, `api/http_limits.py` and `api/websocket_limits.py` limit what a client may send.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api import (
    assistants,
    children,
    commands,
    crons,
    dead_letters,
    events,
    fleet,
    interrupts,
    metrics,
    run_sets,
    runs,
    state,
    store,
    tenants,
    thread_stream,
    threads,
    timeline,
    usage,
    webhooks,
)
from holdfast.api.context import WebContext
from holdfast.api.cors import CrossOriginLayer
from holdfast.api.custom_app import own_routes, surround
from holdfast.api.errors import Json
from holdfast.api.meta import meta_routes
from holdfast.api.mount_prefix import MountPrefix
from holdfast.api.openapi import Description, pages
from holdfast.api.request_context import RequestContextLayer
from holdfast.api.response_models import refusals
from holdfast.api.router import Router
from holdfast.api.routes import Route
from holdfast.api.traces import traced
from holdfast.errors import ConfigError
from holdfast.graphs.http import HttpSection, http_section, load_app
from holdfast.graphs.loading import summary_of
from holdfast.lifecycle.service import Service

log = structlog.get_logger(__name__)

STOPPING = "The server is stopping. Send the request again, to the server that takes its place."
CLOSING = {"retry-after": "1", "connection": "close"}

# Routes with the switches that disable them. The order matters: otherwise `/runs/crons` would match as the run with the
# id `crons`.
ROUTES = (
    ("assistants", assistants.routes),
    ("threads", threads.routes),
    ("threads", state.routes),
    ("runs crons", crons.routes),
    ("runs", runs.routes),
    ("runs", run_sets.routes),
    ("threads", usage.routes),
    ("runs", children.routes),
    ("runs", interrupts.routes),
    ("runs", timeline.routes),
    ("event_streaming", commands.routes),
    ("event_streaming", events.routes),
    ("threads", thread_stream.routes),
    ("store", store.routes),
    ("webhooks", webhooks.routes),
    ("runs", dead_letters.routes),
    ("tenants", tenants.routes),
    ("fleet", fleet.routes),
    ("fleet", timeline.activity_routes),
    ("meta", metrics.routes),
)


def build_app(web: WebContext, section: HttpSection | None = None, custom: object = None) -> Router:
    """The API of one web process, without the layers that `http` of langgraph.json adds. The caller opens and closes
    `web`. `custom`: the project's own app, which `/openapi.json` describes too."""
    section = http_section(web.catalog.project).under(web.settings) if section is None else section
    routes = [*meta_routes(section).declared, *_switched_on(section)]
    if "meta" not in section.disabled:
        routes += pages(describe(web, section, custom)).declared
    return Router(web, routes)


def describe(web: WebContext, section: HttpSection | None = None, custom: object = None) -> Description:
    """The OpenAPI document of the API that `build_app` builds."""
    section = http_section(web.catalog.project).under(web.settings) if section is None else section
    denials = {} if web.auth is None else refusals(401, 403, 429)
    security = {} if web.auth is None else web.auth.openapi
    return Description(meta_routes(section).declared, _switched_on(section), denials, custom, security)


def _switched_on(section: HttpSection) -> list[Route]:
    found = [routes for switches, routes in ROUTES if section.disabled.isdisjoint(switches.split())]
    return [route for routes in found for route in routes.declared]


class Application:
    """The application of a web process: the layers that the module's docstring lists, and the lifespan of the project's
    own app.

    Raises ConfigError when langgraph.json has an unsupported option or names an invalid app.
    """

    def __init__(self, web: WebContext) -> None:
        project = web.catalog.project
        section = http_section(project).under(web.settings)
        custom = load_app(project)
        web.own_layers_only = custom is None
        inner = surround(custom, build_app(web, section, custom), web, section)
        if section.enable_custom_route_auth is None and (routes := own_routes(custom)):
            log.warning("app.routes_open", app=section.app, routes=routes)
        mounted = MountPrefix(inner, section.mount_prefix)
        layers: ASGIApp = CrossOriginLayer(mounted, section.cors, web.settings, web.guarded)
        self._app = traced(RequestContextLayer(layers, section))
        self._project = project
        self._spec = section.app
        self._customised = custom is not None
        # For apps not based on Starlette, this is known only after an attempt to start their lifespan.
        self._has_lifespan = isinstance(custom, Starlette)
        self.failure: ConfigError | None = None
        """Why the custom app failed to start; None until it fails."""
        self.mount_prefix = section.mount_prefix
        self.state: dict[str, Any] = {}
        """The lifespan state that requests see as `request.state`."""
        self.background: Service | None = None
        """What is started while the custom app is up: from the end of its startup to the beginning of its shutdown."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await (self._lifespan if scope["type"] == "lifespan" else self._app)(scope, receive, send)
        except asyncio.CancelledError:
            # The grace of the shutdown is over. uvicorn would answer 500, as for a defect.
            if scope["type"] == "http":
                with suppress(RuntimeError):  # The response has started.
                    await Json({"detail": STOPPING}, 503, CLOSING)(scope, receive, send)
            raise

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen: list[str] = []
        self.state = scope.get("state", {})

        async def receive_message() -> Message:
            message = await receive()
            seen.append(message["type"])
            if message["type"] == "lifespan.shutdown" and self.background is not None:
                await self.background.stop()
            return message

        async def send_message(message: Message) -> None:
            seen.append(message["type"])
            await send(message)
            if message["type"] == "lifespan.startup.complete" and self.background is not None:
                await self.background.start()

        if not self._customised:
            await _without_lifespan(receive_message, send_message, begun=False)
            return
        try:
            await self._app(scope, receive_message, send_message)
        except Exception as error:
            if "lifespan.startup.complete" in seen:
                log.error("app.shutdown_failed", app=self._spec, exc_info=error)
                raise
            if not self._has_lifespan and "lifespan.startup.failed" not in seen:
                log.debug("app.without_lifespan", app=self._spec)
                await _without_lifespan(receive_message, send_message, begun=bool(seen))
                return
            self.failure = self._project.error(
                "http.app", f"{self._spec}: its lifespan failed to start\n  {summary_of(error)}"
            )
            raise


async def _without_lifespan(receive: Receive, send: Send, *, begun: bool) -> None:
    if not begun:
        await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})

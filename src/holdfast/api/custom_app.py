"""The application that `http.app` of langgraph.json names, put around the API.

Its routes come first, its middleware wraps everything, its lifespan is the server's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, cast

from starlette.applications import Starlette
from starlette.authentication import AuthCredentials
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.routing import BaseRoute, Match, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.context import CALLER, WebContext, admitted
from holdfast.api.errors import refuse
from holdfast.api.request_body import JsonRequest
from holdfast.api.router import Router as Api
from holdfast.api.router import route_path
from holdfast.auth.custom import ANYONE
from holdfast.errors import RequestError
from holdfast.graphs.http import HttpSection, build_middleware

# Probes and the descriptions of the server, which the API always answers. A FastAPI app adds pages under the same
# names.
NOT_SHADOWED = frozenset({"/ok", "/metrics", "/docs", "/openapi.json"})
DESCRIBING = frozenset({"/docs", "/openapi.json", "/redoc", "/docs/oauth2-redirect"})
# Routes of a custom app that are named when the server starts.
MAX_LOGGED_PATHS = 10
UNAUTHENTICATED = NOT_SHADOWED | {"/", "/info", "/redoc", "/docs/oauth2-redirect"}


class Authenticated:
    """Authenticates a request before passing it on, and answers refused requests."""

    def __init__(self, app: ASGIApp, web: WebContext) -> None:
        self._app = app
        self._web = web

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._web.auth is not None:
            try:
                receive = await self._admit(scope, receive)
            except RequestError as denied:
                await refuse(denied, scope, receive, send)
                return
            except ClientDisconnect:
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """Authenticate a request. Returns the `receive` for its body. Raises RequestError."""
        if CALLER in scope:
            return receive
        body = _KeptBody(receive)
        request = JsonRequest(scope, body, self._web) if scope["type"] == "http" else HTTPConnection(scope)
        caller = await admitted(self._web, request)
        scope[CALLER] = caller
        if caller is not ANYONE:
            # Where Starlette has them: `request.user` and `request.auth`.
            scope["user"] = caller.user
            scope["auth"] = AuthCredentials([] if caller.user is None else list(caller.user.permissions))
        return body.again


class AuthenticatedRoutes(Authenticated):
    """The same before routes of the custom app, where the scopes of an API key count as well."""

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        receive = await super()._admit(scope, receive)
        scope[CALLER].may_call(scope.get("method", "WEBSOCKET"))
        return receive


class _KeptBody:
    """Replaces `receive` and keeps its messages, so that the application can receive them after an authenticator has
    read the body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._kept: deque[Message] = deque()

    async def __call__(self) -> Message:
        message = await self._receive()
        self._kept.append(message)
        return message

    async def again(self) -> Message:
        """The messages from the first on."""
        return self._kept.popleft() if self._kept else await self._receive()


class _ApiLast:
    """The default of a custom app's router: passes requests without a custom route to the API."""

    def __init__(self, api: ASGIApp) -> None:
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The API's own, not the custom app's: it sets them itself.
        for key in ("router", "route", "endpoint", "path_params"):
            scope.pop(key, None)
        await self._api(scope, receive, send)


class _Dispatch:
    """Replaces a custom app's router: passes a request to a route of the app or to the API.

    A route that is for the path and the method goes before one that is only for the path, so that an app that has its
    own `GET /threads/{id}` leaves the API's PATCH in place.
    """

    def __init__(self, routes: Iterable[BaseRoute], custom: ASGIApp, api: Api, *, api_first: bool = False) -> None:
        self._routes = routes
        self._custom = custom
        self._api = api
        self._api_first = api_first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._api if scope["type"] != "lifespan" and self._is_for_api(scope) else self._custom
        await app(scope, receive, send)

    def _is_for_api(self, scope: Scope) -> bool:
        if route_path(scope) in NOT_SHADOWED:
            return True
        own = best_match(self._routes, scope)
        if own is Match.FULL:
            return False
        built_in = self._api.match(scope)
        if self._api_first or built_in is Match.FULL:
            return built_in is not Match.NONE
        return own is Match.NONE and built_in is Match.PARTIAL


def best_match(routes: Iterable[BaseRoute], scope: Scope) -> Match:
    best = Match.NONE
    for route in routes:
        found, _ = route.matches(dict(scope))
        if found is Match.FULL:
            return found
        best = max(best, found, key=lambda match: match.value)
    return best


def surround(custom: ASGIApp | None, api: Api, web: WebContext, section: HttpSection) -> ASGIApp:
    """The custom app with the API behind its routes; the API alone when there is none. Raises ConfigError when the
    app's middleware cannot be built."""
    if custom is None:
        return api
    if isinstance(custom, Starlette):
        application: ASGIApp = _inside(custom, api, web, section)
    else:
        # Its routes are unknown, so it gets the requests for which the API has no route.
        own = AuthenticatedRoutes(custom, web) if section.enable_custom_route_auth else custom
        application = _Dispatch((), own, api, api_first=True)
    if section.middleware_order == "auth_first":
        return _AuthFirst(application, api, web, custom_routes=bool(section.enable_custom_route_auth))
    return application


def own_routes(custom: ASGIApp | None) -> str:
    """The paths of the custom app's own routes, for a log line; empty when there is no app or it has none."""
    if custom is None:
        return ""
    if not isinstance(custom, Starlette):
        return "all that the API does not have"
    paths = [path for route in custom.routes if (path := getattr(route, "path", "")) not in DESCRIBING]
    more = f" and {len(paths) - MAX_LOGGED_PATHS} more" if len(paths) > MAX_LOGGED_PATHS else ""
    return ", ".join(paths[:MAX_LOGGED_PATHS]) + more


def _inside(custom: Starlette, api: Api, web: WebContext, section: HttpSection) -> Starlette:
    """The app's own middleware and error handlers, around a choice between its routes and the API's."""
    router: Router = custom.router
    if router.default == router.not_found or isinstance(router.default, _ApiLast):
        router.default = _ApiLast(api)
    own = _Guarded(router, web) if section.enable_custom_route_auth else router
    custom.router = cast(Any, _Dispatch(router.routes, own, api))
    try:
        custom.middleware_stack = build_middleware(web.catalog.project, custom)
    finally:
        custom.router = router
    return custom


class _Guarded:
    """A router whose routes are for authenticated requests only."""

    def __init__(self, router: Router, web: WebContext) -> None:
        self._router = router
        self._authenticated = AuthenticatedRoutes(router, web)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The API answers requests for which there is no route.
        known = scope["type"] != "lifespan" and best_match(self._router.routes, scope) is not Match.NONE
        await (self._authenticated if known else self._router)(scope, receive, send)


class _AuthFirst:
    """Has requests authenticated before the custom app's middleware sees them."""

    def __init__(self, app: ASGIApp, api: Api, web: WebContext, *, custom_routes: bool) -> None:
        self._app = app
        self._authenticated = Authenticated(app, web)
        self._api = api
        self._custom_routes = custom_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["type"] != "lifespan" and scope.get("method") != "OPTIONS" and self._wants(scope)
        await (self._authenticated if wanted else self._app)(scope, receive, send)

    def _wants(self, scope: Scope) -> bool:
        if route_path(scope) in UNAUTHENTICATED:
            return False
        return self._custom_routes or self._api.match(scope) is not Match.NONE

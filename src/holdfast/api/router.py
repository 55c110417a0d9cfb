"""Routes every request from its path to the endpoint that answers it.

All requests pass through the same steps: find the route, authenticate, check the content type, read the arguments, call
the endpoint, answer what it raises. Starlette's Request and Response are used; FastAPI only describes the routes
(`api/openapi.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketClose, WebSocketState

from holdfast.api.context import WebContext, identified
from holdfast.api.destructive import refuse_unknown
from holdfast.api.errors import Json, answer_to, unexpected
from holdfast.api.idempotency import KEY_HEADER, answer_once
from holdfast.api.own_routes import OWN_ROUTES_ONLY
from holdfast.api.request_body import JsonRequest, require_json, require_within
from holdfast.api.routes import SOCKET, Route
from holdfast.api.traces import SERVED
from holdfast.auth.custom import CustomAuth
from holdfast.errors import InvalidRequest, NotFound

# How a WebSocket is closed whose handshake names an invalid id. Clients see status 403.
POLICY_VIOLATION = 1008


class Router:
    """The API as an ASGI application. It has no lifespan."""

    def __init__(self, web: WebContext, routes: Iterable[Route]) -> None:
        self._web = web
        self._any_query = isinstance(web.auth, CustomAuth) and web.auth.reads_query
        self._routes = list(routes)
        # Routes by method and number of slashes, which distinguish most of them.
        self._by_depth: dict[tuple[str, int], list[Route]] = defaultdict(list)
        self._of_any_depth: list[Route] = []
        for route in self._routes:
            if route.depth is None:
                self._of_any_depth.append(route)
                continue
            for method in route.methods:
                self._by_depth[method, route.depth].append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        try:
            response = await self._respond(scope, receive)
        except Exception as error:
            found = answer_to(error)
            if found is None:
                await unexpected()(scope, receive, send)
                raise  # RequestContextLayer logs it.
            response = found
        await response(scope, receive, send)

    # --- finding ------------------------------------------------------------------------------------

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]] | None:
        """The route for a request, and the parameters in its path."""
        for route in self._by_depth.get((method, path.count("/")), ()):
            if (match := route.pattern.fullmatch(path)) is not None:
                return route, match.groupdict()
        for route in self._of_any_depth:
            if method in route.methods and (match := route.pattern.fullmatch(path)) is not None:
                return route, match.groupdict()
        return None

    def allowed(self, path: str) -> list[str]:
        """The methods that a path has."""
        found = {method for route in self._routes if route.pattern.fullmatch(path) for method in route.methods}
        return sorted(found - {SOCKET})

    def match(self, scope: Scope) -> Match:
        """Whether there is a route for a request (FULL), or at least for its path (PARTIAL)."""
        path, socket = route_path(scope), scope["type"] == "websocket"
        if self.find(SOCKET if socket else scope["method"], path) is not None:
            return Match.FULL
        return Match.PARTIAL if not socket and self.allowed(path) else Match.NONE

    def _unrouted(self, scope: Scope, path: str) -> Response:
        """The answer to a request that no route is for. Raises NotFound, and HTTPException with status 405."""
        if allowed := self.allowed(path):
            raise HTTPException(405, headers={"Allow": ", ".join(allowed)})
        if path != "/":
            # A slash too many or too few.
            other: str = scope["path"]
            other = other.rstrip("/") if path.endswith("/") else f"{other}/"
            redirected = {**scope, "path": other}
            if self.allowed(route_path(redirected)):
                return RedirectResponse(str(URL(scope=redirected)))
        raise NotFound("Path", URL(scope=scope).path)

    # --- answering ----------------------------------------------------------------------------------

    async def _respond(self, scope: Scope, receive: Receive) -> Response:
        if OWN_ROUTES_ONLY in scope:
            detail = "Not Found: a webhook with a relative URL reaches only routes of the project's own app."
            return Json({"detail": detail}, status_code=404)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        require_within(self._web.settings.max_body_bytes, scope["method"], headers)
        path = route_path(scope)
        found = self.find(scope["method"], path)
        if found is None:
            return self._unrouted(scope, path)
        route, scope["path_params"] = found
        scope["route"], scope["endpoint"] = route, route.endpoint
        if SERVED in scope:
            scope[SERVED].routed(route.path)
        request = JsonRequest(scope, receive, self._web)
        try:
            if route.public:
                return await _call(route, self._web, request)
            # Authenticate before validating, so that an unauthenticated client gets no details about its request.
            web = await identified(self._web, request)
            require_json(scope["method"], headers)
            if route.destroys:
                await refuse_unknown(
                    request,
                    [argument.alias for argument in route.arguments.query],
                    takes_body=route.arguments.body is not None,
                    any_query=self._any_query,
                )
            if route.creates and KEY_HEADER in headers:
                return await answer_once(web, request, route.path, lambda held: _call(route, held, request))
            return await _call(route, web, request)
        except ClientDisconnect:
            # The client disconnected before the request was complete, so the response is never read.
            return Response(status_code=400)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self.find(SOCKET, route_path(scope))
        if found is None:
            await WebSocketClose()(scope, receive, send)
            return
        route, scope["path_params"] = found
        scope["route"], scope["endpoint"] = route, route.endpoint
        socket = WebSocket(scope, receive, send)
        try:
            await _call(route, self._web, socket)
        except InvalidRequest as error:
            if socket.application_state is not WebSocketState.CONNECTING:
                raise
            await socket.close(POLICY_VIOLATION, str(error)[:100])
        except Exception as error:
            response = answer_to(error)
            if response is None or socket.application_state is not WebSocketState.CONNECTING:
                raise
            await response(scope, receive, send)


async def _call(route: Route, web: WebContext, connection: JsonRequest | WebSocket) -> Response:
    response: Response = await route.endpoint(**await route.arguments.read(web, connection))
    return response


def route_path(scope: Scope) -> str:
    """A request's path without the prefix that everything is under."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if prefix and f"{path}/".startswith(f"{prefix}/") else path

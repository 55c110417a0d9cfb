"""The express way: what a busy server is asked all day long, answered past FastAPI's machinery.

To create a thread or a run is to call one function with one validated body. FastAPI gets there through its middleware,
three exit stacks and a resolver of dependencies, which cost more than all that the function does. Here the same
function is called with the same body, validated by the same field; and whatever is out of the ordinary goes FastAPI's
way, from the start: another form of a path, a query, a key that makes a request idempotent, a body that is not valid or
not declared as JSON, a project's own authentication. What the function raises is raised again there: every answer but
the good one has one maker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.api.context import CALLER, WebContext, admitted, seen_by
from holdfast.api.edge import RAISED, is_json, read_json
from holdfast.api.errors import Json
from holdfast.api.idempotency import HEADER
from holdfast.api.own_routes import OWN_ROUTES_ONLY
from holdfast.api.traces import SERVED
from holdfast.auth.custom import ANYONE
from holdfast.auth.keys import KeyAuth

# Functions that need the process's context, the body, and the thread's id where the path has one; nothing else, unless
# there is a query.
WHOLE = frozenset({"/threads", "/runs", "/runs/wait", "/runs/stream"})
OF_THREAD = "/threads/{thread_id}"
OF_A_THREAD = frozenset({"/runs", "/runs/wait", "/runs/stream"})
# As everybody writes an id. FastAPI knows other forms.
THREAD_ID = re.compile(r"/threads/([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})(/.*)")
KEY = HEADER.encode()


@dataclass(frozen=True, slots=True)
class Way:
    """Where a request goes."""

    route: APIRoute
    thread_id: str | None = None


class Express:
    """`routers`: what the API includes. A route that it does not have has no express way."""

    def __init__(self, web: WebContext, routers: Iterable[APIRouter]) -> None:
        self._web = web
        self._limit = web.settings.max_body_bytes
        self._whole: dict[str, Way] = {}
        self._of_thread: dict[str, APIRoute] = {}
        # A project's own authentication may want to know anything about a request.
        if web.auth is not None and not isinstance(web.auth, KeyAuth):
            return
        for router in routers:
            for route in router.routes:
                if isinstance(route, APIRoute) and route.methods == {"POST"}:
                    if route.path in WHOLE:
                        self._whole[route.path] = Way(route)
                    elif (rest := route.path.removeprefix(OF_THREAD)) in OF_A_THREAD and rest != route.path:
                        self._of_thread[rest] = route

    def find(self, scope: Scope) -> Way | None:
        """The express way for a request; None when it has to go FastAPI's."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["query_string"] or scope.get("root_path"):
            return None
        path: str = scope["path"]
        way = self._whole.get(path)
        if way is None:
            named = THREAD_ID.fullmatch(path)
            route = None if named is None else self._of_thread.get(named[2])
            if named is None or route is None:
                return None
            way = Way(route, named[1])
        headers = dict(scope["headers"])
        declared: bytes = headers.get(b"content-length", b"")
        if KEY in headers or not declared.isdigit() or int(declared) > self._limit:
            return None
        if not is_json(headers.get(b"content-type", b"")):
            return None
        return way

    async def answer(self, way: Way, scope: Scope, receive: Receive, send: Send) -> Receive | None:
        """Answer a request. Otherwise, what FastAPI is to receive in order to do so: nothing has been answered then,
        and what there is to raise is in the scope."""
        heard: list[Message | Exception] = []
        try:
            web = await self._admit(scope)
            body = await _read(way.route, heard, receive, self._limit)
            web.require_admitted()
            if body is None:
                return _again(heard, receive)
            if SERVED in scope:
                scope[SERVED].routed(way.route.path_format)
            scope["route"], scope["endpoint"] = way.route, way.route.endpoint
            if way.thread_id is None:
                response: Response = await way.route.endpoint(web=web, body=body)
            else:
                scope["path_params"] = {"thread_id": way.thread_id}
                response = await way.route.endpoint(web=web, thread_id=UUID(way.thread_id), body=body)
        except Exception as error:
            scope[RAISED] = error
            return _again(heard, receive)
        # The answer may take as long as a run. The body is not needed for it.
        del body
        heard.clear()
        await response(scope, receive, send)
        return None

    async def _admit(self, scope: Scope) -> WebContext:
        """The process's context, as whoever sends the request sees it. Raises Denied and OverLimit."""
        web, auth = self._web, self._web.auth
        if auth is None:
            return web
        # As the layer before custom routes, if there are any, has found.
        caller = scope.get(CALLER)
        if caller is None:
            assert isinstance(auth, KeyAuth)
            caller = await admitted(web, HTTPConnection(scope)) if auth.asks(scope["headers"]) else ANYONE
            scope[CALLER] = caller
        return seen_by(web, caller)


class Api(FastAPI):
    """FastAPI, with an express way past it."""

    express: Express | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if OWN_ROUTES_ONLY in scope:
            detail = "Not Found: a webhook with a relative URL reaches only routes of the project's own app."
            await Json({"detail": detail}, status_code=404)(scope, receive, send)
            return
        if self.express is not None and (way := self.express.find(scope)) is not None:
            rest = await self.express.answer(way, scope, receive, send)
            if rest is None:
                return
            receive = rest
        await super().__call__(scope, receive, send)


async def _read(route: APIRoute, heard: list[Message | Exception], receive: Receive, limit: int) -> Any:
    """The body, validated; None when it is for FastAPI to say what is wrong with it. `heard`: what was received."""
    parts: list[bytes] = []
    more = True
    while more:
        try:
            message = await receive()
        except Exception as error:
            heard.append(error)
            return None
        heard.append(message)
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    text = b"".join(parts)
    if len(text) > limit:
        return None
    try:
        given = read_json(text)
    except (orjson.JSONDecodeError, HTTPException):
        return None
    if not isinstance(given, dict) or route.body_field is None:
        return None
    body, problems = route.body_field.validate(given)
    return None if problems else body


def _again(heard: list[Message | Exception], receive: Receive) -> Receive:
    """`receive`, beginning with what was received already."""
    waiting = heard[::-1]

    async def replay() -> Message:
        if not waiting:
            return await receive()
        message = waiting.pop()
        if isinstance(message, Exception):
            raise message
        return message

    return replay

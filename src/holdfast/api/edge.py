"""What every request of the API passes: size limit, content type, JSON that is valid to the letter."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.context import CALLER, identify, process_context
from holdfast.api.destructive import destroys, refuse_unknown
from holdfast.api.errors import Json
from holdfast.api.idempotency import HEADER, answer_once, creates, declare
from holdfast.api.shapes import everywhere
from holdfast.api.traces import SERVED
from holdfast.auth.bounded_json import read_bounded
from holdfast.auth.custom import CustomAuth
from holdfast.auth.keys import KeyAuth
from holdfast.errors import Denied, InvalidRequest

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# `application/json`, and types that are JSON inside, such as `application/merge-patch+json`.
JSON_TYPE = re.compile(rb"\s*application/([\w!#$&^.+-]+\+)?json\s*(;.*)?", re.IGNORECASE | re.DOTALL)
# Where a request's scope has what was raised when it was answered the express way.
RAISED = "holdfast.raised"


class JsonRequest(Request):
    """Parses with orjson, which refuses what JSON does not allow (NaN, lone surrogates) and is quick."""

    async def body(self) -> bytes:
        """The body. Raises HTTPException when the caller's API key stopped working while the client was sending it."""
        if not hasattr(self, "_body"):
            await super().body()
            try:
                if CALLER in self.scope and isinstance(auth := process_context(self).auth, KeyAuth):
                    auth.require_accepted(self.scope[CALLER])
            except Denied as refusal:
                # FastAPI answers 400 to every other exception that is raised here.
                raise HTTPException(refusal.status, str(refusal), dict(refusal.headers)) from None
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = read_json(await self.body())
        return self._json


def read_json(body: bytes) -> Any:
    """The value that a body or a frame is. Raises JSONDecodeError, and HTTPException when it is beyond the bounds:
    FastAPI answers 400 to every other exception."""
    try:
        return read_bounded(body)
    except InvalidRequest as refusal:
        raise HTTPException(refusal.status, str(refusal)) from None


class JsonRoute(APIRoute):
    """A route of the API: reads JSON as JsonRequest does, and declares what every such route may answer."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        methods = options.get("methods") or ["GET"]
        options["responses"] = {**everywhere(methods), **(options.get("responses") or {})}
        self._creates = creates(path, methods)
        self._destroys = destroys(path, methods)
        if self._creates:
            declare(options)
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            parsed = JsonRequest(request.scope, request.receive)
            if SERVED in request.scope:
                request.scope[SERVED].routed(self.path_format)
            if RAISED in request.scope:
                raise request.scope.pop(RAISED)
            # Before anything of the request is looked at: a stranger is not told what is wrong with it.
            await identify(parsed)
            _require_json(request.scope)
            try:
                if self._destroys:
                    await self._refuse_unknown(parsed)
                if self._creates and HEADER in parsed.headers:
                    return await answer_once(parsed, handler, self.path)
                return await handler(parsed)
            except ClientDisconnect:
                return Response(status_code=400)  # The request was cut short, and nobody waits for this.

        return handle

    async def _refuse_unknown(self, request: Request) -> None:
        parameters = [field.alias for field in self.dependant.query_params]
        auth = process_context(request).auth
        any_query = isinstance(auth, CustomAuth) and auth.reads_query
        await refuse_unknown(request, parameters, takes_body=self.body_field is not None, any_query=any_query)


def is_json(content_type: bytes) -> bool:
    """Whether a content type is JSON, with any parameters."""
    return content_type == b"application/json" or JSON_TYPE.fullmatch(content_type) is not None


def _require_json(scope: Scope) -> None:
    """Raise 415 for a request that may change something and has a body that is not declared as JSON.

    Any web page can send forms and plain text to any server. For JSON a browser asks the server first, which is where
    other origins are refused.
    """
    if scope["method"] in SAFE_METHODS:
        return
    headers: dict[bytes, bytes] = dict(scope["headers"])
    declared = headers.get(b"content-type", b"")
    empty = b"transfer-encoding" not in headers and not headers.get(b"content-length", b"").strip(b"0")
    if empty or is_json(declared):
        return
    shown = repr(declared.decode("latin-1")[:100]) if declared else "missing"
    raise HTTPException(
        415, f"The request body must be JSON: send the header `content-type: application/json`. It is {shown}."
    )


class BodyLimit:
    """Answers 413 to a body over the limit, declared or found."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        detail = f"The request body is larger than MAX_BODY_BYTES={self._limit}."
        if declared.isdigit() and int(declared) > self._limit:
            await Json({"detail": detail}, status_code=413)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(413, detail)
            return message

        await self._app(scope, counted, send)

"""What surrounds every request: its id, the log lines it writes, and the headers that its runs are given.

Runs are created deep inside of routes, commands and sockets. What they take from the request is kept in a context
variable, which `RequestContextLayer` sets once for each request.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars, reset_contextvars
from uuid_utils.compat import uuid7

from holdfast.api.errors import FAILED, Json
from holdfast.api.listing import clean_metadata
from holdfast.graphs.client_config import is_server_key
from holdfast.graphs.http import HeaderPatterns, HttpSection

log = structlog.get_logger(__name__)

# The credentials for this server. They are never forwarded, because clients who may read a run could use them.
NEVER_FORWARDED = frozenset({"authorization", "x-api-key", "x-tenant-id", "x-service-key"})
NEVER_LOGGED = NEVER_FORWARDED | {"cookie", "proxy-authorization"}
TRACING = frozenset({"langsmith-trace", "baggage"})
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")


@dataclass(frozen=True)
class RequestContext:
    """One request, as far as its runs and log lines are concerned."""

    request_id: str
    headers: Mapping[str, str]
    """In lower case, those that were sent several times joined."""
    forwarded: HeaderPatterns

    def configurable(self) -> dict[str, Any]:
        """What graph code finds about the request in `config["configurable"]`."""
        found: dict[str, Any] = {}
        for name, value in self.headers.items():
            if not self.forwarded.admits(name) and (name not in TRACING or self.forwarded.excluded(name)):
                continue
            # A pattern as wide as `*` must not let a header name the run's thread or user.
            if name not in NEVER_FORWARDED and name != "user_id" and not is_server_key(name):
                found[name] = value
        return {**found, "langgraph_request_id": self.request_id}


_current: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)


def forward(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A run's kwargs with what the request at hand adds to them: nothing outside of a request.

    The headers are kept apart from the client's own config: they take precedence over it, and clients who read the run
    do not see them. Values of the request take precedence over those of the tracing baggage.
    """
    request = _current.get()
    if request is None:
        return kwargs
    forwarded = request.configurable()
    carried = baggage(forwarded)
    config = dict(kwargs["config"])
    if metadata := _metadata(carried.get("langsmith-metadata")):
        config["metadata"] = {**clean_metadata(metadata), **(config.get("metadata") or {})}
    if tags := [tag for tag in carried.get("langsmith-tags", "").split(",") if tag]:
        config["tags"] = list(dict.fromkeys([*(config.get("tags") or []), *tags]))
    if project := carried.get("langsmith-project"):
        config["configurable"] = {"__langsmith_project__": project, **(config.get("configurable") or {})}
    return {**kwargs, "config": config, "forwarded": forwarded}


def baggage(headers: Mapping[str, Any]) -> dict[str, str]:
    """The decoded members of a `baggage` header. Malformed members are ignored: another system wrote them, and they
    must not fail the request."""
    members = (member.partition("=") for member in headers.get("baggage", "").split(","))
    decoded = {key.strip(): unquote(value.partition(";")[0].strip()) for key, _, value in members if value}
    # Encoded, a header can hold what no header can; Postgres cannot store it.
    return {key: value for key, value in decoded.items() if "\0" not in value}


def _metadata(text: str | None) -> dict[str, Any]:
    """The plain values in the metadata of a trace. Other values are ignored, because the client did not write them and
    an error would not help it."""
    try:
        given = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    plain = {key: value for key, value in given.items() if _storable(value)} if isinstance(given, dict) else {}
    return {key: value for key, value in plain.items() if "\0" not in key}


def _storable(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and "\0" not in value)


def joined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers by their names in lower case, those that were sent several times joined by commas."""
    found: dict[str, str] = {}
    # Joined once, at the end: to extend the text by each of them would copy it each time.
    repeated: dict[str, list[str]] = {}
    for name, value in headers:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        if key in found:
            repeated.setdefault(key, [found[key]]).append(text)
        else:
            found[key] = text
    for key, texts in repeated.items():
        found[key] = ", ".join(texts)
    return found


class RequestContextLayer:
    """Gives each request its context, and each answer its `x-request-id`. Answers unexpected errors of the inner
    layers."""

    def __init__(self, app: ASGIApp, section: HttpSection) -> None:
        self._app = app
        self._forwarded = section.configurable_headers
        self._logged = section.logging_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = joined(scope["headers"])
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else str(uuid7())
        answer = _Answer(send, request_id)
        token = _current.set(RequestContext(request_id, headers, self._forwarded))
        bound = bind_contextvars(request_id=request_id, method=scope.get("method", "SOCKET"), path=scope["path"])
        began = time.monotonic()
        try:
            await self._answered(scope, receive, answer)
            if self._logged is not None and scope["type"] == "http":
                shown = {name: text for name, text in headers.items() if self._shows(name)}
                milliseconds = round((time.monotonic() - began) * 1000)
                about = {"method": scope["method"], "path": scope["path"], "status": answer.status}
                log.info("http.request", **about, milliseconds=milliseconds, headers=shown)
        finally:
            reset_contextvars(**bound)
            _current.reset(token)

    def _shows(self, name: str) -> bool:
        return self._logged is not None and name not in NEVER_LOGGED and self._logged.admits(name)

    async def _answered(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            await self._app(scope, receive, answer)
        except Exception as error:
            # A partial response must not look complete, so the server breaks the connection. It does the same with
            # WebSockets.
            if scope["type"] != "http" or (answer.status and not answer.complete):
                raise
            log.error("http.failed", method=scope["method"], path=scope["path"], exc_info=error)
            if not answer.status:
                await Json({"detail": FAILED}, status_code=500)(scope, receive, answer)


class _Answer:
    """The way back to the client."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (b"x-request-id", request_id.encode())
        self.status = 0
        self.complete = False

    # Returns an awaitable instead of being a coroutine, which saves a coroutine per message.
    def __call__(self, message: Message) -> Awaitable[None]:
        kind = message["type"]
        if kind == "http.response.start" or kind == "websocket.accept":
            self.status = message.get("status", 101)
            others = [header for header in message.get("headers", ()) if header[0].lower() != b"x-request-id"]
            message = {**message, "headers": [*others, self._header]}
        elif kind == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        return self._send(message)

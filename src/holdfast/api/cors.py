"""Decides which web pages may call the server: CORS, and additional checks for a server without authentication."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.errors import Json, refuse
from holdfast.errors import BadRequest, Denied
from holdfast.graphs.http import CorsSection
from holdfast.settings import Settings
from holdfast.settings.hosts import address_of, host_name, is_loopback

log = structlog.get_logger(__name__)

# Pages of this machine, on any port.
LOOPBACK_ORIGIN = re.compile(
    r"https?://(localhost|[a-z0-9._-]+\.localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\])(:\d{1,5})?"
)
# Characters of an origin or a host that are shown in answers and log lines.
MAX_SHOWN_CHARACTERS = 200
# The refusals of this many different origins and hosts are logged.
MAX_LOGGED_SOURCES = 100
# Repeat the page's origin in the answer, so that only pages of that origin may read it.
ONE_ORIGIN = ".*"
EMBEDDED = (
    "A page of another site may not embed answers of this server, because it asks for no login. Let the page fetch "
    "them, from an origin that http.cors.allow_origins names, or create an API key."
)
TWO_ORIGINS = "The request has more than one Origin header. Send one."


class CrossOriginLayer:
    """Decides which web pages may call the server, for every route and every WebSocket.

    A browser lets any page send requests to any address that it reaches, this machine included. On a server with
    authentication a page needs a key, so every origin may call unless the configuration names origins. On a server
    without authentication, only these headers of the browser show whether a page may call:

    * `Origin`: the page must be one of this machine, of the server itself, or of a named origin.
    * `Host`: must name this machine. For the browser, a page that points its own DNS name at this machine (DNS
      rebinding) has the same origin as the server. But it cannot change the host name that it calls.
    * `Sec-Fetch-Site`: browsers send no `Origin` with requests for images, scripts and frames, but they send this
      header.

    A page may send cookies if its origin is named or is the server's own. Cookies of other pages are removed.

    Requests without these headers come from programs. The layer wraps everything that sends responses, so that an
    allowed page can also read errors.
    """

    def __init__(self, app: ASGIApp, cors: CorsSection, settings: Settings, guarded: Callable[[], bool]) -> None:
        """`guarded`: whether every request must be authenticated now. Keys are created and revoked while the server
        runs."""
        self._app = app
        self._guarded = guarded
        self._named = frozenset(cors.allow_origins or ())
        self._regex = None if cors.allow_origin_regex is None else re.compile(cors.allow_origin_regex)
        self._names_none = cors.allow_origins is None and self._regex is None
        self._hosts = AllowedHosts(settings)
        self._every = _CorsHeaders(app, cors, allow_origins=("*",))
        self._one = _CorsHeaders(app, cors, allow_origin_regex=ONE_ORIGIN)
        self._with_credentials = _CorsHeaders(
            app, cors, allow_origin_regex=ONE_ORIGIN, allow_credentials=cors.credentials
        )
        self._reported: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if len(headers) != len(scope["headers"]) and [name for name, _ in scope["headers"]].count(b"origin") > 1:
            # With two Origin headers, each program on the way could use another one.
            await refuse(BadRequest(TWO_ORIGINS), scope, receive, send)
            return
        host = headers.get(b"host", b"")
        origin = headers.get(b"origin")
        guarded = self._guarded()
        if not guarded and host and not self._hosts.admits(host):
            await self._refuse_host(host, scope, receive, send)
        elif origin is not None:
            await self._answer_page(origin, headers, guarded, scope, receive, send)
        elif not guarded and headers.get(b"sec-fetch-site") == b"cross-site" and not _is_link(headers):
            await refuse(Denied(403, EMBEDDED), scope, receive, send)
        else:
            await self._app(scope, receive, _VaryByOrigin(send) if scope["type"] == "http" else send)

    async def _answer_page(
        self, origin: bytes, headers: dict[bytes, bytes], guarded: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        text = origin.decode("latin-1").lower()
        same = _is_same(text, headers.get(b"host", b""))
        if text in self._named or (self._regex is not None and self._regex.fullmatch(text)):
            answering = self._with_credentials
        elif "*" in self._named or (guarded and self._names_none):
            answering = self._every
        elif same or (not guarded and LOOPBACK_ORIGIN.fullmatch(text)):
            answering = self._one
        else:
            await self._refuse_page(text[:MAX_SHOWN_CHARACTERS], scope, receive, send)
            return
        if b"cookie" in headers and not (
            answering.sends_credentials or same or headers.get(b"sec-fetch-site") == b"same-origin"
        ):
            # CORS prevents a page from reading a response. It does not prevent the request, and does not apply to
            # WebSockets. With the cookie of a user who is logged in, the page would act as that user.
            scope["headers"] = [header for header in scope["headers"] if header[0] != b"cookie"]
        await (answering if scope["type"] == "http" else self._app)(scope, receive, send)

    async def _refuse_page(self, origin: str, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_new(origin):
            log.warning("http.origin_refused", origin=origin)
        detail = (
            f"Pages of the origin '{origin}' may not call this server. Name the origin in http.cors.allow_origins of "
            "langgraph.json, or in CORS_ALLOW_ORIGINS."
        )
        await refuse(Denied(403, detail, {"vary": "Origin"}), scope, receive, send)

    async def _refuse_host(self, host: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        shown = host.decode("latin-1")[:MAX_SHOWN_CHARACTERS]
        if self._is_new(shown):
            log.warning("http.host_refused", host=shown)
        detail = (
            f"This server asks for no login, and does not answer to the host '{shown}'. Add the name to "
            "HOLDFAST_ALLOWED_HOSTS, or create an API key."
        )
        await refuse(Denied(403, detail), scope, receive, send)

    def _is_new(self, refused: str) -> bool:
        """Whether to log a refusal. It is logged once for each origin or host, because a page can repeat its request
        without limit."""
        if refused in self._reported or len(self._reported) >= MAX_LOGGED_SOURCES:
            return False
        self._reported.add(refused)
        return True


class AllowedHosts:
    """The host names that a server without authentication accepts.

    DNS rebinding is impossible with an IP address, so all addresses are allowed.
    """

    def __init__(self, settings: Settings) -> None:
        given = [name.strip().lower().rstrip(".") for name in (settings.allowed_hosts or "").split(",")]
        self._names = {settings.host.lower(), *filter(None, given)}
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith("*."))
        # Cached, because the same few hosts are checked for all requests.
        self.admits = lru_cache(maxsize=64)(self._admits)

    def _admits(self, header: bytes) -> bool:
        name = host_name(header.decode("latin-1"))
        if name in self._names or "*" in self._names or is_loopback(name) or address_of(name) is not None:
            return True
        return bool(self._suffixes) and name.endswith(self._suffixes)


def _is_link(headers: dict[bytes, bytes]) -> bool:
    """Whether a user has followed a link. The browser shows the response, and the page with the link cannot read it."""
    return headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"


def _is_same(origin: str, host: bytes) -> bool:
    """Whether a page comes from this server, such as its documentation. The scheme is not compared, because a proxy may
    have terminated TLS."""
    return bool(host) and origin.partition("://")[2] == host.decode("latin-1").lower()


class _CorsHeaders(CORSMiddleware):
    """Starlette's CORS headers, for an origin that may call."""

    def __init__(self, app: ASGIApp, cors: CorsSection, **options: Any) -> None:
        super().__init__(
            app,
            allow_methods=cors.allow_methods,
            allow_headers=cors.allow_headers,
            expose_headers=cors.expose_headers,
            max_age=cors.max_age,
            # A page on the internet with a named origin may call a server on this machine or in a private network.
            allow_private_network=True,
            **options,
        )
        self.sends_credentials = bool(options.get("allow_credentials", False))
        """Whether pages may send cookies."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        rule = "http.cors of langgraph.json says what is allowed."
        detail = f"{bytes(answer.body).decode()}. {rule}"
        return Json({"detail": detail}, status_code=answer.status_code, headers=headers)


class _VaryByOrigin:
    """Without an Origin header the request does not come from a page. Only adds `Vary: Origin` to the response."""

    __slots__ = ("_send",)

    def __init__(self, send: Send) -> None:
        self._send = send

    # Returns an awaitable instead of being a coroutine, which saves a coroutine per message.
    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            headers: list[tuple[bytes, bytes]] = list(message.get("headers", ()))
            if any(name.lower() == b"vary" for name, _ in headers):
                varied = MutableHeaders(raw=headers)
                varied["Vary"] = ", ".join([*varied.getlist("Vary"), "Origin"])
            else:
                headers.append((b"vary", b"Origin"))
            message["headers"] = headers
        return self._send(message)

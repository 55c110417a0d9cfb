"""The layers between the server and the application: who may call from another origin, and under which path."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from holdfast.api.errors import Json
from holdfast.graphs.http import Cors


class CorsLayer(CORSMiddleware):
    """Outside of everything that answers, so that a page can read errors too."""

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        options: dict[str, Any] = {name: getattr(cors, name) for name in Cors.__dataclass_fields__}
        # A page on the internet that talks to a server on this machine or network, such as a studio in development.
        super().__init__(app, **options, allow_private_network=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not any(name == b"origin" for name, _ in scope["headers"]):
            # From no page: all there is to say is that the answer would be another for one.
            await self.app(scope, receive, _Varying(send))
        else:
            await super().__call__(scope, receive, send)

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        rule = "http.cors of langgraph.json, and CORS_ALLOW_ORIGINS, say what is allowed."
        detail = f"{bytes(answer.body).decode()}. {rule}"
        return Json({"detail": detail}, status_code=answer.status_code, headers=headers)


class _Varying:
    """Adds to an answer that it depends on the origin, as the layer itself would."""

    __slots__ = ("_send",)

    def __init__(self, send: Send) -> None:
        self._send = send

    # Not a coroutine of its own: there is nothing to wait for.
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


class MountPrefix:
    """Serves the application under a path. `/ok` is there without it too, for probes that know of no prefix."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._prefix or scope["path"] == "/ok":
            await self._app(scope, receive, send)
        elif f"{scope['path']}/".startswith(f"{self._prefix}/"):
            path = f"{self._prefix}/" if scope["path"] == self._prefix else scope["path"]
            await self._app({**scope, "path": path, "root_path": self._prefix}, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
        else:
            detail = f"Not Found: everything on this server is under {self._prefix}."
            await Json({"detail": detail}, status_code=404)(scope, receive, send)

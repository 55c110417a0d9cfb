"""The path that everything is served under: `http.mount_prefix` of langgraph.json."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from holdfast.api.errors import Json
from holdfast.errors import NotFound


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
            missing = NotFound("Path", scope["path"], hint=f"Everything on this server is under {self._prefix}.")
            await Json({"detail": str(missing)}, status_code=missing.status)(scope, receive, send)

"""Webhooks with a relative URL: they call routes of the project's own app (`http.app`), within this process.

Web processes send them, because only they have the app. The request goes through the same layers as one from outside
and has no more rights: it carries no credentials but those that `webhooks.headers` names, and the API never answers it.
Otherwise a caller could have the server call its own API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import structlog
from starlette.types import ASGIApp, Message, Scope

from holdfast.db.connect import Database
from holdfast.graphs.webhooks import WebhooksSection
from holdfast.lifecycle.service import TaskService
from holdfast.signals import Signals
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS
from holdfast.telemetry.metrics import Metrics
from holdfast.upkeep.webhooks import Webhooks

log = structlog.get_logger(__name__)

# Marks the scope of a request that is only for the project's own routes.
OWN_ROUTES_ONLY = "holdfast.own_routes_only"
# For what the app does when it is cancelled.
CLOSE_TIMEOUT_SECONDS = 3.0
# The delay before sending is restarted after an unexpected error.
RESTART_DELAY_SECONDS = 1.0


class OwnRoutes:
    """Calls the application. `state`: what the app's lifespan has lent to its requests."""

    def __init__(self, app: ASGIApp, mount_prefix: str, port: int, state: Callable[[], dict[str, Any]]) -> None:
        self._app = app
        self._mount_prefix = mount_prefix
        self._port = port
        self._state = state
        self._unfinished: set[asyncio.Task[None]] = set()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """POST to a route, and return the status when the answer is complete.

        What the app does after its answer, such as background tasks, goes on; cancelling the call cancels the app.
        """
        status, complete = 500, False
        answered = asyncio.Event()
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await answered.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                complete = True
                answered.set()

        task = asyncio.create_task(self._call(self._scope(url, headers, body), receive, send), name=f"webhook {url}")
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)
        task.add_done_callback(lambda _: answered.set())
        try:
            await answered.wait()
        except asyncio.CancelledError:
            # Not awaited: a route that is a plain function runs to its end in a thread.
            task.cancel()
            raise
        # Half an answer is none.
        return status if complete else 500

    async def close(self) -> None:
        """End what the app still does for webhooks."""
        if unfinished := set(self._unfinished):
            for task in unfinished:
                task.cancel()
            await asyncio.wait(unfinished, timeout=CLOSE_TIMEOUT_SECONDS)

    async def _call(self, scope: Scope, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except GRAPH_CODE_EXCEPTIONS:
            # Includes SystemExit: this task is not awaited, so `sys.exit()` in the app would end the event loop and the
            # process.
            log.exception("webhook.route_failed", path=scope["path"])

    def _scope(self, url: str, headers: Mapping[str, str], body: bytes) -> Scope:
        parts = urlsplit(url)
        path = self._mount_prefix + parts.path
        given = {"host": f"localhost:{self._port}", **headers, "content-length": str(len(body))}
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 0),
            "server": ("localhost", self._port),
            "state": self._state().copy(),
            OWN_ROUTES_ONLY: True,
        }


class OwnWebhooks(TaskService):
    """Sends the deliveries to the project's own routes. While the project's app is up: see `Application.background`."""

    name = "own_webhooks"

    def __init__(
        self, database: Database, signals: Signals, metrics: Metrics, section: WebhooksSection, routes: OwnRoutes
    ) -> None:
        super().__init__()
        self._routes = routes
        self._webhooks = Webhooks(database, signals, metrics, section, routes.post)

    async def _run(self) -> None:
        while True:
            try:
                await self._webhooks.run()
            except Exception:
                log.exception("webhooks.crashed")
                await asyncio.sleep(RESTART_DELAY_SECONDS)

    async def _stop(self) -> None:
        await super()._stop()
        await self._routes.close()

"""A span for each request, when traces are on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.request_context import joined
from holdfast.telemetry import tracing

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import Recorder

# Where a request's scope has its span. Layers below copy the scope, and what is in it stays the same.
SERVED = "holdfast.served"
# Asked every few seconds by those who watch over the process, and nothing to see.
PROBES = ("/ok", "/metrics")


def traced(app: ASGIApp) -> ASGIApp:
    """The application with a span around each request; as it is when traces are off."""
    return app if tracing.recorder is None else RequestSpans(app, tracing.recorder)


class RequestSpans:
    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"].endswith(PROBES):
            await self._app(scope, receive, send)
            return
        headers = joined(scope["headers"])
        if scope["type"] != "http":
            with self._recorder.continue_trace(headers):
                await self._app(scope, receive, send)
            return
        with self._recorder.request_span(scope["method"], scope["path"], headers) as served:

            async def answer(message: Message) -> None:
                if message["type"] == "http.response.start":
                    names = {name.lower(): value for name, value in message.get("headers", ())}
                    request_id = names.get(b"x-request-id")
                    served.answered(message["status"], None if request_id is None else request_id.decode("latin-1"))
                await send(message)

            await self._app({**scope, SERVED: served}, receive, answer)

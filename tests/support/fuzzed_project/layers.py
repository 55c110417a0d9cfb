"""An app of the project's own around the API, with a layer that all answers pass."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

app = FastAPI()


@app.get("/layered")
async def layered() -> PlainTextResponse:
    return PlainTextResponse("yes")


class Layer:
    def __init__(self, app: ASGIApp) -> None:
        self._inner = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._inner(scope, receive, send)


app.add_middleware(Layer)

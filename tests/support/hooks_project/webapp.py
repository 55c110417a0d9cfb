"""An app whose routes receive webhooks. Each appends what it gets to the file HOOKS_FILE, as a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import BackgroundTasks, FastAPI, Request, Response
from starlette.responses import PlainTextResponse, RedirectResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def record(**received: Any) -> None:
    with Path(os.environ["HOOKS_FILE"]).open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **received}) + "\n")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, str]]:
    yield {"lent": "for the lifespan"}


class Rewriting:
    """Sends requests for one path to a route of the API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "path": "/threads"} if scope.get("path") == "/rewritten" else scope, receive, send)


app = FastAPI(lifespan=lifespan)
app.add_middleware(Rewriting)


async def described(request: Request) -> dict[str, Any]:
    return {
        "path": request.url.path,
        "query": request.url.query,
        "headers": dict(request.headers),
        "body": (await request.body()).decode(),
        "lent": getattr(request.state, "lent", None),
    }


@app.post("/my-hook")
@app.post("/hooks/{name}")
async def hook(request: Request) -> Response:
    record(**await described(request))
    return Response(status_code=204)


@app.post("/later")
async def later(request: Request, tasks: BackgroundTasks) -> Response:
    """Does its work after the answer."""
    tasks.add_task(record, **await described(request))
    return Response(status_code=202, background=tasks)


@app.post("/fails")
async def fails() -> None:
    raise ValueError("at 10.0.0.5")


@app.post("/exits")
async def exits() -> None:
    sys.exit(3)


@app.post("/half")
async def half() -> StreamingResponse:
    async def parts() -> AsyncIterator[bytes]:
        yield b"half"
        raise ValueError("at 10.0.0.5")

    return StreamingResponse(parts())


@app.post("/moved")
async def moved() -> RedirectResponse:
    return RedirectResponse("/my-hook")


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """An application that knows nothing of lifespans, nor of Starlette."""
    assert scope["type"] == "http", "only requests"
    record(path=scope["path"])
    await PlainTextResponse("plain")(scope, receive, send)

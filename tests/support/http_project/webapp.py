"""Apps that a project may have, usable and not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

happened: list[str] = []


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, str]]:
    happened.append("startup")
    app.state.greeting = "hello"
    yield {"lent": "for the lifespan"}
    happened.append("shutdown")


app = FastAPI(lifespan=lifespan)


class Thread(BaseModel):
    """Of the same name as a shape of the API, and different."""

    shadowed: str


class Brewing(Exception):
    pass


class Wrapping(BaseHTTPMiddleware):
    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        if request.headers.get("x-stop") == "here":
            return PlainTextResponse("stopped", status_code=403)
        user = request.scope.get("user")
        response = await call_next(request)
        response.headers["x-wrapped"] = "nobody" if user is None else user.identity
        return response


app.add_middleware(Wrapping)


class Shouting:
    """Changes every body on its way out, as a compression does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def shout(message: Message) -> None:
            await send({**message, "body": message["body"].upper()} if message.get("body") else message)

        await self._app(scope, receive, shout if scope["type"] == "http" else send)


shouting = Starlette(middleware=[Middleware(Shouting)])


@app.exception_handler(Brewing)
async def brewing(request: Request, error: Brewing) -> JSONResponse:
    return JSONResponse({"brewing": True}, status_code=418)


@app.get("/hello")
async def hello(request: Request) -> dict[str, Any]:
    return {"greeting": request.app.state.greeting, "lent": request.state.lent}


@app.get("/who")
async def who(request: Request) -> dict[str, Any]:
    user = request.scope.get("user")
    return {"user": None if user is None else user.identity}


@app.get("/info")
async def info() -> dict[str, str]:
    return {"custom": "info"}


@app.get("/ok")
async def ok() -> dict[str, str]:
    return {"custom": "ok"}


@app.get("/threads/{thread_id}")
async def thread(thread_id: str) -> Thread:
    return Thread(shadowed=thread_id)


@app.get("/fails")
async def fails() -> None:
    raise ValueError("a custom route failed")


@app.get("/teapot")
async def teapot() -> None:
    raise Brewing


@app.post("/form")
async def form(request: Request) -> dict[str, Any]:
    body = (await request.body()).decode()
    user = request.scope.get("user")
    kind = request.headers.get("content-type")
    return {"type": kind, "body": body, "user": None if user is None else user.identity}


@app.get("/slash/")
async def slash() -> dict[str, bool]:
    return {"slash": True}


@app.websocket("/echo")
async def echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text(f"you said {await socket.receive_text()}")
    await socket.close()


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """An application that knows nothing of lifespans, nor of Starlette."""
    assert scope["type"] == "http", "only requests"
    await PlainTextResponse(f"plain {scope['path']}")(scope, receive, send)


def factory() -> FastAPI:
    return app


@asynccontextmanager
async def failing(app: Starlette) -> AsyncIterator[None]:
    if app is late:
        raise RuntimeError("no cache to connect to")
    yield


late = Starlette(lifespan=failing)
unbuilt = Starlette(middleware=[Middleware(CORSMiddleware, allow_origin_regex="[")])

number = 3

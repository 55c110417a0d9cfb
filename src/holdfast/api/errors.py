"""How errors become answers: `{"detail": string}` and the right status, in one place."""

from __future__ import annotations

from typing import Any

import psycopg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from psycopg_pool import PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response

from holdfast.errors import RequestError
from holdfast.streams.serialize import to_json

log = structlog.get_logger(__name__)


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def _answer(status: int, detail: str, headers: dict[str, str] | None = None) -> Json:
    return Json({"detail": detail}, status_code=status, headers=headers)


def _sentence(error: RequestValidationError) -> str:
    problems = []
    for problem in error.errors()[:5]:
        where = ".".join(str(part) for part in problem["loc"] if part not in ("body", "query", "path"))
        problems.append(f"{where}: {problem['msg']}" if where else str(problem["msg"]))
    return "; ".join(problems)


def install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Json:
        return _answer(error.status, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Json:
        return _answer(422, _sentence(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Json:
        return _answer(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(psycopg.DataError)
    async def data(request: Request, error: psycopg.DataError) -> Json:
        # NUL characters, above all: JSON has them, Postgres does not.
        message = str(error).strip().splitlines()[0]
        return _answer(422, f"The request holds a value that cannot be stored: {message}")

    @app.exception_handler(psycopg.OperationalError)
    @app.exception_handler(PoolTimeout)
    async def unavailable(request: Request, error: Exception) -> Json:
        detail = "The database cannot be reached. What was not confirmed may or may not have happened."
        return _answer(503, detail, {"retry-after": "1"})

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Json:
        log.error("http.failed", method=request.method, path=request.url.path, exc_info=error)
        return _answer(500, "Something went wrong on the server; its log says what.")

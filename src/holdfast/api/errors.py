"""How errors become answers: `{"detail": string}` and the right status, in one place."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import psycopg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from psycopg_pool import PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from holdfast.errors import AlreadyAnswered, NotFound, OverLimit, RequestError
from holdfast.streams.serialize import DEEPEST_ANSWER, to_json

log = structlog.get_logger(__name__)

FAILED = "Something went wrong on the server; its log says what."


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content, DEEPEST_ANSWER)


def _answer(status: int, detail: str, headers: dict[str, str] | None = None) -> Json:
    return Json({"detail": detail}, status_code=status, headers=headers)


def _sentence(error: RequestValidationError) -> str:
    problems = []
    for problem in error.errors()[:5]:
        where = ".".join(str(part) for part in problem["loc"] if part not in ("body", "query", "path"))
        problems.append(f"{where}: {problem['msg']}" if where else str(problem["msg"]))
    return "; ".join(problems)


# What Postgres raises for a value, and not for how it is.
ABOUT_A_VALUE = (
    psycopg.DataError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.ConfigurationLimitExceeded,
)


def not_storable(error: psycopg.Error) -> str:
    """The sentence for what Postgres has no room for: NUL characters, above all, which JSON has and it does not."""
    return f"The request holds a value that cannot be stored: {str(error).strip().splitlines()[0]}"


def sentence_about(error: Exception) -> str:
    """Why one of many rows could not be processed, as an answer says it."""
    if isinstance(error, RequestError):
        return str(error)
    if isinstance(error, ABOUT_A_VALUE):
        return f"The database refuses it: {str(error).strip().splitlines()[0]}"
    return FAILED


def _allowed(request: Request) -> set[str]:
    """The methods that a path has."""
    found: set[str] = set()
    routes: list[Any] = list(request.app.routes)
    while routes:
        route = routes.pop()
        if hasattr(route, "original_router"):  # How FastAPI keeps what was included.
            routes += route.original_router.routes
        elif isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return found


def install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Json:
        if isinstance(error, AlreadyAnswered):
            return Json({"detail": str(error), **error.details}, status_code=error.status)
        if isinstance(error, OverLimit):
            log.info("quota.refused", reason=str(error))
        return _answer(error.status, str(error), dict(error.headers))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Json:
        return _answer(422, _sentence(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Json:
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # The router knows only the first route of the path.
            headers["Allow"] = ", ".join(sorted(_allowed(request)))
        detail = str(error.detail)
        if error.status_code == 404 and detail == HTTPStatus.NOT_FOUND.phrase:
            # Starlette's own text, for a path that has no route.
            detail = str(NotFound("Path", request.url.path))
        return _answer(error.status_code, detail, headers)

    async def data(request: Request, error: psycopg.Error) -> Json:
        return _answer(422, not_storable(error))

    for kind in ABOUT_A_VALUE:
        app.exception_handler(kind)(data)

    @app.exception_handler(psycopg.OperationalError)
    @app.exception_handler(PoolTimeout)
    async def unavailable(request: Request, error: Exception) -> Json:
        detail = "The database cannot be reached. What was not confirmed may or may not have happened."
        return _answer(503, detail, {"retry-after": "1"})

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Json:
        # Starlette raises it again, and the layer around everything logs it.
        return _answer(500, FAILED)

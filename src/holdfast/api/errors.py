"""How errors become answers: `{"detail": string}` and the right status, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import psycopg
import structlog
from psycopg_pool import PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from holdfast.errors import AlreadyAnswered, OverLimit, RequestError
from holdfast.streams.serialize import MAX_RESPONSE_DEPTH, to_json

log = structlog.get_logger(__name__)

FAILED = "Something went wrong on the server; its log says what."


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content, MAX_RESPONSE_DEPTH)


def _answer(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Json:
    return Json({"detail": detail}, status_code=status, headers=None if headers is None else dict(headers))


# Errors that Postgres raises because of a value, and not because of its own state.
ABOUT_A_VALUE = (
    psycopg.DataError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.ConfigurationLimitExceeded,
)


def not_storable(error: psycopg.Error) -> str:
    """The message for a value that Postgres cannot store: usually a NUL character, which JSON allows and Postgres does
    not."""
    return f"The request holds a value that cannot be stored: {str(error).strip().splitlines()[0]}"


def sentence_about(error: Exception) -> str:
    """The message of a response for one of many rows that could not be processed."""
    if isinstance(error, RequestError):
        return str(error)
    if isinstance(error, ABOUT_A_VALUE):
        return f"The database refuses it: {str(error).strip().splitlines()[0]}"
    return FAILED


def answer_to(error: Exception) -> Json | None:
    """The answer to a request that failed; None for an unexpected error."""
    match error:
        case AlreadyAnswered():
            return Json({"detail": str(error), **error.details}, status_code=error.status)
        case RequestError():
            if isinstance(error, OverLimit):
                log.info("quota.refused", reason=str(error))
            return _answer(error.status, str(error), error.headers)
        case HTTPException():
            return _answer(error.status_code, str(error.detail), error.headers)
        # Checked before OperationalError, because some of these are subclasses of it.
        case psycopg.Error() if isinstance(error, ABOUT_A_VALUE):
            return _answer(422, not_storable(error))
        case psycopg.OperationalError() | PoolTimeout():
            detail = "The database cannot be reached. What was not confirmed may or may not have happened."
            return _answer(503, detail, {"retry-after": "1"})
    return None


def unexpected() -> Json:
    """The answer to a request that failed with an unexpected error."""
    return _answer(500, FAILED)


async def refuse(denied: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request, or the handshake of a WebSocket, that is refused before it reaches a route."""
    if scope["type"] == "http":
        answer = Json({"detail": str(denied)}, status_code=denied.status, headers=dict(denied.headers))
        await answer(scope, receive, send)
        return
    # An HTTP answer in place of the upgrade, where the server can send one; WebSockets know no other status.
    if "websocket.http.response" in scope.get("extensions", {}):
        headers = [(b"content-type", b"application/json")]
        await send({"type": "websocket.http.response.start", "status": denied.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": orjson.dumps({"detail": str(denied)})})
    else:
        await WebSocketClose()(scope, receive, send)

"""A request's body: within MAX_BODY_BYTES, declared as JSON, and valid JSON to the letter.

`api/http_limits.py` limits the time in which it must arrive, and the bytes of all clients' bodies together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope

from holdfast.api.context import CALLER, WebContext
from holdfast.auth.bounded_json import read_bounded
from holdfast.auth.keys import KeyAuth
from holdfast.errors import BadRequest, RequestError, TooLarge

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# `application/json`, and types that are JSON inside, such as `application/merge-patch+json`.
JSON_TYPE = re.compile(rb"\s*application/([\w!#$&^.+-]+\+)?json\s*(;.*)?", re.IGNORECASE | re.DOTALL)


class JsonRequest(Request):
    """Limits the body, and parses it with orjson, which refuses what JSON does not allow (NaN, lone surrogates) and is
    quick."""

    def __init__(self, scope: Scope, receive: Receive, web: WebContext) -> None:
        super().__init__(scope, LimitedBody(receive, web.settings.max_body_bytes))
        self._auth = web.auth
        self._parsed: tuple[Any] | None = None

    async def body(self) -> bytes:
        """The body. Raises TooLarge, ClientDisconnect, Denied when the caller's API key stopped working while the
        client was sending it, and BadRequest for what else keeps a layer around the API from handing it over."""
        try:
            body = await super().body()
        except (RequestError, HTTPException, ClientDisconnect):
            raise
        except Exception as error:
            raise BadRequest("There was an error parsing the body") from error
        if CALLER in self.scope and isinstance(self._auth, KeyAuth):
            self._auth.require_accepted(self.scope[CALLER])
        return body

    async def json(self) -> Any:
        """The body's value. Raises what `body` raises, JSONDecodeError, and InvalidRequest for what is too deep."""
        if self._parsed is None:
            self._parsed = (read_bounded(await self.body()),)
        return self._parsed[0]


class LimitedBody:
    """Stands in for `receive`. Raises TooLarge."""

    def __init__(self, receive: Receive, limit: int) -> None:
        """`limit`: bytes of the whole body."""
        self._receive = receive
        self._limit = limit
        self._received = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            raise _too_large(self._limit)
        return message


def require_within(limit: int, method: str, headers: Mapping[bytes, bytes]) -> None:
    """Raise TooLarge for a request that declares a body over the limit, before any of it is read."""
    declared = headers.get(b"content-length", b"")
    if method not in SAFE_METHODS and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)


def require_json(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Raise 415 for a request that may change something and has a body that is not declared as JSON.

    Any web page can send forms and plain text to any server. For JSON a browser asks the server first, which is where
    other origins are refused.
    """
    if method in SAFE_METHODS:
        return
    declared = headers.get(b"content-type", b"")
    empty = b"transfer-encoding" not in headers and not headers.get(b"content-length", b"").strip(b"0")
    if empty or declared == b"application/json" or JSON_TYPE.fullmatch(declared) is not None:
        return
    shown = repr(declared.decode("latin-1")[:100]) if declared else "missing"
    raise HTTPException(
        415, f"The request body must be JSON: send the header `content-type: application/json`. It is {shown}."
    )


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The request body is larger than MAX_BODY_BYTES={limit}.")

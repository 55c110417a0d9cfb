"""Parses JSON of clients within limits. Some of it is parsed before the client is authenticated, because an
authenticator may read the request body."""

from __future__ import annotations

from typing import Any

import orjson

from holdfast.errors import InvalidRequest

# How deeply a request body may be nested.
MAX_LEVELS = 200
# How many objects and arrays a request body may have. An empty one takes two bytes on the wire, seventy in Python and
# two hundred in Postgres. They are counted without parsing, so brackets within strings count, too.
MAX_CONTAINERS = 500_000


def read_bounded(body: bytes) -> Any:
    """Parse a body or a frame. Raises JSONDecodeError, and InvalidRequest if it has too many objects and arrays or is
    nested too deeply."""
    containers = body.count(b"{") + body.count(b"[")
    if containers > MAX_CONTAINERS:
        raise InvalidRequest(
            f"The request body has more than {MAX_CONTAINERS:,} objects and arrays. Send them in several requests."
        )
    value = orjson.loads(body)
    if containers > MAX_LEVELS:
        _refuse_too_deep(value)
    return value


def _refuse_too_deep(value: Any) -> None:
    """orjson writes at most 254 levels and reads more. The value will be written within other JSON, so its own levels
    are limited to MAX_LEVELS."""
    for _ in range(254 - MAX_LEVELS):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError:
        raise InvalidRequest(f"The request body is nested deeper than {MAX_LEVELS} levels.") from None

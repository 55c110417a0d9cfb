"""JSON that a client sends, read within bounds. An authenticator may ask for it, so some is read before it is known who
sends it."""

from __future__ import annotations

from typing import Any

import orjson

from holdfast.errors import InvalidRequest

# Levels of nesting in a request body.
DEEPEST = 200
# Objects and arrays in a request body. An empty one takes two bytes on the wire, seventy in Python and two hundred in
# Postgres. Counted without parsing, so brackets inside of strings count too.
MAX_CONTAINERS = 500_000


def read_bounded(body: bytes) -> Any:
    """The value that a body or a frame is. Raises JSONDecodeError, and InvalidRequest for one that has too many objects
    and arrays or is nested too deeply."""
    containers = body.count(b"{") + body.count(b"[")
    if containers > MAX_CONTAINERS:
        raise InvalidRequest(
            f"The request body has more than {MAX_CONTAINERS:,} objects and arrays. Send them in several requests."
        )
    value = orjson.loads(body)
    if containers > DEEPEST:
        _refuse_too_deep(value)
    return value


def _refuse_too_deep(value: Any) -> None:
    """orjson reads deeper nesting than it writes (254), and what is read here is written later, inside of something."""
    for _ in range(254 - DEEPEST):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError:
        raise InvalidRequest(f"The request body is nested deeper than {DEEPEST} levels.") from None

"""Which errors are retried, and after how long.

An error is transient if the same step may succeed a moment later: a connection was refused or broke, something that the
graph called timed out, a service answered 408, 425, 429 or 5xx. All other errors are permanent. Exceptions of libraries
are recognised by their attributes and the names of their classes, so that no library has to be installed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import psycopg

from holdfast.errors import Retry
from holdfast.settings import Settings

_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
# The longest pause that an error can ask for. Postgres cannot add arbitrarily large numbers to a time.
MAX_PAUSE_SECONDS = 366 * 24 * 3600.0
# Base classes of what clients of HTTP services and models raise when they got no answer.
_NAMES = frozenset({"TransportError", "APIConnectionError", "APITimeoutError", "ClientConnectionError"})


def is_transient(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, is transient. A group is transient if all its errors are."""
    return any(_is_transient(link) for link in _causes(error))


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group and in the groups inside it. For an error that is no group, the error itself."""
    found: list[BaseException] = []
    groups = [error]
    while groups:
        current = groups.pop()
        if isinstance(current, BaseExceptionGroup):
            groups.extend(reversed(current.exceptions))
        else:
            found.append(current)
    return found


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on. Graph code can make a cycle of causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(is_transient(inside) for inside in error.exceptions)
    if isinstance(error, Retry | ConnectionError | TimeoutError | psycopg.OperationalError):
        return True
    for carrier in (error, _attribute(error, "response")):
        for attribute in ("status_code", "status"):
            status = _attribute(carrier, attribute)
            if isinstance(status, int):
                return status in _STATUSES
    return any(base.__name__ in _NAMES for base in type(error).__mro__)


def _attribute(carrier: object, name: str) -> Any:
    """An attribute; None if there is none, or if it is a property that raises."""
    try:
        return getattr(carrier, name, None)
    except Exception:
        return None


def pause_before_retry(error: BaseException, retries: int, settings: Settings) -> float:
    """Seconds before the next try: what the error asks for, or exponential back-off, half of it random."""
    for link in (link for leaf in leaves(error) for link in _causes(leaf)):
        if isinstance(link, Retry) and isinstance(link.after, int | float) and math.isfinite(link.after):
            return min(max(0.0, link.after), MAX_PAUSE_SECONDS)
    pause = min(settings.retry_cap, settings.retry_base * 2.0 ** min(retries, 30))
    return pause * random.uniform(0.5, 1.0)  # noqa: S311

"""Which errors are worth another try, and when.

An error is transient when the same step may succeed a moment later: a connection refused or broken, a time-out of
something the graph called, a service that answers 408, 425, 429 or 5xx. Everything else is permanent at once. Libraries
are recognised by what their exceptions carry, so that none of them has to be installed.
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
# No error can ask for a longer pause: Postgres cannot add any number to a time.
LONGEST_PAUSE_SECONDS = 366 * 24 * 3600.0
# The roots of what HTTP and model clients raise when no answer came.
_NAMES = frozenset({"TransportError", "APIConnectionError", "APITimeoutError", "ClientConnectionError"})


def is_transient(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, is transient. A group is if all errors in it are."""
    return any(_is_transient(link) for link in _causes(error))


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group and in the groups inside it; of an error that is no group, itself."""
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
    """The error, what it was raised from, and so on. Graph code can make a circle of them."""
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
    """None if there is none, or reading it fails: it may be a property."""
    try:
        return getattr(carrier, name, None)
    except Exception:
        return None


def pause_before_retry(error: BaseException, retries: int, settings: Settings) -> float:
    """Seconds before the next try: what the error asks for, else exponential with full jitter above a half."""
    for link in (link for leaf in leaves(error) for link in _causes(leaf)):
        if isinstance(link, Retry) and isinstance(link.after, int | float) and math.isfinite(link.after):
            return min(max(0.0, link.after), LONGEST_PAUSE_SECONDS)
    pause = min(settings.retry_cap, settings.retry_base * 2.0 ** min(retries, 30))
    return pause * random.uniform(0.5, 1.0)  # noqa: S311

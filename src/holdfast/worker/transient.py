"""Which errors are worth another try, and when.

An error is transient when the same step may succeed a moment later: a connection refused or broken, a time-out of
something the graph called, a service that answers 408, 425, 429 or 5xx. Everything else is permanent at once. Libraries
are recognised by what their exceptions carry, so that none of them has to be installed.
"""

from __future__ import annotations

import random

import psycopg

from holdfast.errors import Retry
from holdfast.settings import Settings

_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
# The roots of what HTTP and model clients raise when no answer came.
_NAMES = frozenset({"TransportError", "APIConnectionError", "APITimeoutError", "ClientConnectionError"})


def is_transient(error: BaseException) -> bool:
    """Whether the error, or the one it was raised from, is transient."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if _is_transient(current):
            return True
        current = current.__cause__
    return False


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, Retry | ConnectionError | TimeoutError | psycopg.OperationalError):
        return True
    for carrier in (error, getattr(error, "response", None)):
        for attribute in ("status_code", "status"):
            status = getattr(carrier, attribute, None)
            if isinstance(status, int):
                return status in _STATUSES
    return any(base.__name__ in _NAMES for base in type(error).__mro__)


def pause_before_retry(error: BaseException, retries: int, settings: Settings) -> float:
    """Seconds before the next try: what the error asks for, else exponential with full jitter above a half."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, Retry) and current.after is not None:
            return max(0.0, current.after)
        current = current.__cause__
    pause = min(settings.retry_cap, settings.retry_base * 2.0 ** min(retries, 30))
    return pause * random.uniform(0.5, 1.0)  # noqa: S311

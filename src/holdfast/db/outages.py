"""Distinguishes errors of an unavailable database from errors that concern one statement or row."""

from __future__ import annotations

import psycopg

# Classes of SQLSTATE: 08, connection exception; 53, insufficient resources, such as connections or disk space.
_OUTAGE_CLASSES = ("08", "53")
# Out of memory: one statement may need more than there is, while others do not.
_OUT_OF_MEMORY = "53200"
# One statement may exceed a limit of the server's configuration, such as `temp_file_limit`, while others do not.
CONFIGURATION_LIMIT_EXCEEDED = "53400"
# 57P01 to 57P05: the server shuts down, starts up, or has terminated the session.
_SHUTDOWN_CLASS = "57P"
# Read-only transaction: the server is a standby, before or after a fail-over.
_READ_ONLY = "25006"


def is_outage(error: BaseException) -> bool:
    """Whether the same call would fail with other rows, too. False for all errors that one row may cause by its
    content, its size or a lock on it."""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)  # OSError includes TimeoutError.
    state = error.sqlstate
    if state is None:
        # Raised by psycopg or its pool: there is no connection. A DataError of psycopg is about a value.
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    if state in (_OUT_OF_MEMORY, CONFIGURATION_LIMIT_EXCEEDED):
        return False
    return state[:2] in _OUTAGE_CLASSES or state[:3] == _SHUTDOWN_CLASS or state == _READ_ONLY

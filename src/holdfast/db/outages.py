"""Which errors say that the database is away, and which that it refuses one thing."""

from __future__ import annotations

import psycopg

# Classes of SQLSTATE: the connection failed; resources are insufficient, such as connections or disk space.
_CLASSES = ("08", "53")
# One statement may need more memory than there is, while others do not.
_OUT_OF_MEMORY = "53200"
# One statement may exceed a limit that the operator has set, such as `temp_file_limit`, while others do not.
CONFIGURATION_LIMIT_EXCEEDED = "53400"
# 57P01 to 57P05: the server ends, starts, or has ended the session.
_SERVER_STATES = "57P"
# A standby that was the primary, or is not one yet.
_READ_ONLY = "25006"


def is_outage(error: BaseException) -> bool:
    """Whether the same call with other rows would fail, too. False for everything that a row may be to blame for: its
    content, its size, or that somebody has locked it."""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)  # Which TimeoutError is one of.
    state = error.sqlstate
    if state is None:
        # Raised by the driver or the pool: there is no connection. A DataError of the driver is about a value.
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    if state in (_OUT_OF_MEMORY, CONFIGURATION_LIMIT_EXCEEDED):
        return False
    return state[:2] in _CLASSES or state[:3] == _SERVER_STATES or state == _READ_ONLY

"""Checks connection strings without showing their contents.

The error messages of libpq quote a string that it cannot parse, with the password. So they are never passed on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from holdfast.errors import DatabaseError

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})://")
EXPECTED_FORM = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, or key=value pairs such as host=db user=holdfast"
DOCS_URL = "https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS"
ESCAPE_HINT = "In a URL, write @ : / ? # % and spaces of a user name or a password as %40 %3A %2F %3F %23 %25 and %20."
# libpq parses these only when it connects. Holdfast overrides most of them, but still refuses a value that is no
# number: it must be a mistake.
INTEGER_PARAMETERS = (
    "connect_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
)

# A path where no server listens. libpq checks all other parameters before it connects, and then fails at once.
MISSING_SOCKET = "/nonexistent/holdfast"


def check_dsn(name: str, dsn: str) -> None:
    """Raise DatabaseError for a connection string that libpq cannot parse, or would parse in another way than was
    meant. `name` is the variable that holds it."""
    scheme = SCHEME.match(dsn)
    if scheme is not None and scheme[1] not in ("postgresql", "postgres"):
        raise DatabaseError(f"{name} begins with {scheme[1]}://. It must be {EXPECTED_FORM}.")
    try:
        read = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise DatabaseError(f"{name} cannot be read. It must be {EXPECTED_FORM}. {ESCAPE_HINT}") from None
    # A password with an unencoded / or @ splits the URL in the wrong place, and would be shown as a port or a host.
    if "@" in str(read.get("host") or "") or (scheme is not None and "@" in str(read.get("dbname") or "")):
        raise DatabaseError(f"{name} has more than one @ before its path. {ESCAPE_HINT}")
    for port in str(read.get("port") or "").split(","):
        if port and not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < 65536):
            raise DatabaseError(
                f"{name} has a port that is not a number from 1 to 65535. It must be {EXPECTED_FORM}. {ESCAPE_HINT}"
            )
    for parameter in INTEGER_PARAMETERS:
        if (value := read.get(parameter)) and not _is_integer(str(value)):
            raise DatabaseError(f"{name} cannot be used: its {parameter} must be a whole number. See {DOCS_URL}")
    if (refused := _refused_parameters(read)) is not None:
        which = " and ".join(refused) or "parameters"
        raise DatabaseError(f"{name} cannot be used: libpq refuses its {which}. See {DOCS_URL}")


def _is_integer(value: str) -> bool:
    """Whether libpq accepts it as a number: 32 bits, in ASCII digits."""
    return re.fullmatch(r"\s*[+-]?[0-9]{1,10}\s*", value) is not None and -(2**31) <= int(value) < 2**31


def _refused_parameters(read: Mapping[str, Any]) -> list[str] | None:
    """The refused parameters that libpq's error message names; None if libpq refuses nothing. Sends nothing over a
    network."""
    conninfo = make_conninfo("", **{**read, "host": MISSING_SOCKET, "hostaddr": "", "port": ""})
    attempt = pq.PGconn.connect_start(conninfo.encode())
    try:
        if attempt.status != pq.ConnStatus.BAD:
            return None
        message = attempt.error_message.decode(errors="replace")
    finally:
        attempt.finish()
    # The message may be in the operator's language, but it contains the path of the socket.
    if MISSING_SOCKET in message:
        return None
    return [parameter for parameter in read if re.search(rf"\b{parameter}\b", message)]

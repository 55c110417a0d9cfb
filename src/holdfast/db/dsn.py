"""Connection strings: whether they can be used, said without showing what is in them.

What libpq says of a string that it cannot read quotes it, with the password. So its words are never passed on.
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
FORM = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, or key=value pairs such as host=db user=holdfast"
PARAMETERS = "https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS"
ENCODING = "In a URL, write @ : / ? # % and spaces of a user name or a password as %40 %3A %2F %3F %23 %25 and %20."
# libpq reads them only when it connects. Holdfast replaces most of them with values of its own: even so, a value that
# cannot be meant is refused.
WHOLE_NUMBERS = (
    "connect_timeout",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
)

# Where no server listens: libpq looks at all other parameters before it connects, and then fails at once.
NOWHERE = "/nonexistent/holdfast"


def check_dsn(name: str, dsn: str) -> None:
    """Raise DatabaseError for a connection string that libpq cannot read, or reads as something else than was meant.
    `name` is the variable that it is from."""
    scheme = SCHEME.match(dsn)
    if scheme is not None and scheme[1] not in ("postgresql", "postgres"):
        raise DatabaseError(f"{name} begins with {scheme[1]}://. It must be {FORM}.")
    try:
        read = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise DatabaseError(f"{name} cannot be read. It must be {FORM}. {ENCODING}") from None
    # A password with an unencoded / or @ splits the URL in the wrong place, and would be shown as a port or a host.
    if "@" in str(read.get("host") or "") or (scheme is not None and "@" in str(read.get("dbname") or "")):
        raise DatabaseError(f"{name} has more than one @ before its path. {ENCODING}")
    for port in str(read.get("port") or "").split(","):
        if port and not (port.isascii() and port.isdigit() and 0 < int(port[:9]) < 65536):
            raise DatabaseError(
                f"{name} has a port that is not a number from 1 to 65535. It must be {FORM}. {ENCODING}"
            )
    for parameter in WHOLE_NUMBERS:
        if (value := read.get(parameter)) and not _is_whole_number(str(value)):
            raise DatabaseError(f"{name} cannot be used: its {parameter} must be a whole number. See {PARAMETERS}")
    if (refused := _refused_parameters(read)) is not None:
        which = " and ".join(refused) or "parameters"
        raise DatabaseError(f"{name} cannot be used: libpq refuses its {which}. See {PARAMETERS}")


def _is_whole_number(value: str) -> bool:
    """As libpq reads it: of 32 bits, in ASCII digits."""
    return re.fullmatch(r"\s*[+-]?[0-9]{1,10}\s*", value) is not None and -(2**31) <= int(value) < 2**31


def _refused_parameters(read: Mapping[str, Any]) -> list[str] | None:
    """The parameters that libpq says it refuses, as far as it names them; None when it refuses nothing. Nothing is sent
    over a network."""
    conninfo = make_conninfo("", **{**read, "host": NOWHERE, "hostaddr": "", "port": ""})
    attempt = pq.PGconn.connect_start(conninfo.encode())
    try:
        if attempt.status != pq.ConnStatus.BAD:
            return None
        message = attempt.error_message.decode(errors="replace")
    finally:
        attempt.finish()
    # Its message is in its own words and perhaps the operator's language, but the path of the socket is in it.
    if NOWHERE in message:
        return None
    return [parameter for parameter in read if re.search(rf"\b{parameter}\b", message)]

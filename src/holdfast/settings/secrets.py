"""What may be shown of settings that hold secrets.

Such a setting is declared with `repr=False`: its value is in no `repr` and in no message about the settings. Of a URL,
messages may show what `shown_url` leaves of it.
"""

from __future__ import annotations

import re

NOT_SHOWN = "(secret)"
RULE_FOR_PASSWORDS = "percent-encode what is not a letter or a digit in the user and the password (@ is %40, / is %2F)"

_HOST = re.compile(r"(?:\[[\da-fA-F:.%]*\]|[\w.%-]*)(?::\d+)?", re.ASCII)


def shown_url(url: str) -> str:
    """The scheme, the hosts and the path of a URL, if they stand where they belong. What may be a part of a password,
    because the URL is malformed, is left out."""
    scheme, separator, rest = url.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return NOT_SHOWN
    # The query may have passwords too. A password with a ? in it is cut here, whose beginning is no host with a port.
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    _, at, address = place.rpartition("@")
    hosts, slash, path = address.partition("/")
    if "@" in rest[len(place) :] or not all(map(_HOST.fullmatch, hosts.split(","))):
        return f"{scheme}://…"
    if not at:
        # Of a URL that lacks its host, the path may be the rest of a password. The number of a database is not.
        return f"{scheme}://{hosts}{slash}{path if re.fullmatch('[0-9]{0,2}', path) else '…'}"
    return f"{scheme}://***@{hosts}{slash}{path}{'?…' if place != rest else ''}"

"""Hides the secrets of settings in messages.

A setting with a secret is declared with `repr=False`: its value is not in any `repr`, nor in a message about the
settings. A URL is shown without its secrets, by `shown_url`.
"""

from __future__ import annotations

import re

NOT_SHOWN = "(secret)"
RULE_FOR_PASSWORDS = "percent-encode what is not a letter or a digit in the user and the password (@ is %40, / is %2F)"

_HOST = re.compile(r"(?:\[[\da-fA-F:.%]*\]|[\w.%-]*)(?::\d+)?", re.ASCII)


def shown_url(url: str) -> str:
    """The scheme, the hosts and the path of a URL. Omits each part that may contain a piece of a password because the
    URL is malformed."""
    scheme, separator, rest = url.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        return NOT_SHOWN
    # The query may contain passwords, too. If a password contains a ?, its beginning is left here, but it does not
    # match a host with a port.
    place = re.split(r"[?#]", rest, maxsplit=1)[0]
    _, at, address = place.rpartition("@")
    hosts, slash, path = address.partition("/")
    if "@" in rest[len(place) :] or not all(map(_HOST.fullmatch, hosts.split(","))):
        return f"{scheme}://…"
    if not at:
        # If the URL has no host, the path may be a part of a password, unless it is the number of a Redis database.
        return f"{scheme}://{hosts}{slash}{path if re.fullmatch('[0-9]{0,2}', path) else '…'}"
    return f"{scheme}://***@{hosts}{slash}{path}{'?…' if place != rest else ''}"

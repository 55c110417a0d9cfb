"""Parses REDIS_URL: one server, a master found through Sentinel, or a Cluster.

    redis://[user:password@]host[:6379][/0]             one server; rediss:// for TLS
    unix:///path/to/socket[?db=0]                       one server, over a Unix socket
    redis+sentinel://host1:26379,host2:26379/name[/0]   the master that these sentinels call `name`
    redis+cluster://host1:6379,host2:6379               a Cluster; any of its nodes

`rediss+sentinel` and `rediss+cluster` use TLS, with the options `?ssl_ca_certs=`, `ssl_certfile=`, `ssl_keyfile=` and
`ssl_cert_reqs=none`. The sentinels may have a different password: `?sentinel_password=…`.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

from holdfast.errors import SettingsError
from holdfast.settings.secrets import RULE_FOR_PASSWORDS, shown_url

Mode = Literal["server", "socket", "sentinel", "cluster"]
Address = tuple[str, int]

REDIS_URL_RULE = (
    "must be redis://host:port/0, rediss:// for TLS, unix:///path, redis+sentinel://host:26379,host:26379/master-name "
    "or redis+cluster://host:port,host:port"
)
_SCHEMES: dict[str, tuple[Mode, bool]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("socket", False),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_TLS_OPTIONS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"})
_CERTIFICATE_REQUIREMENTS = ("none", "optional", "required")
_PORTS: dict[Mode, int] = {"server": 6379, "socket": 0, "sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True)
class RedisTarget:
    """The addresses, credentials and options of a REDIS_URL."""

    mode: Mode
    addresses: tuple[Address, ...] = ()
    path: str = ""
    tls: bool = False
    master: str = ""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    tls_options: dict[str, Any] = field(default_factory=dict)
    # The URL without its passwords, for logs.
    shown: str = ""

    @property
    def credentials(self) -> dict[str, Any]:
        return {"username": self.username, "password": self.password}


def parse_redis_url(url: str) -> RedisTarget:
    """Parse a REDIS_URL. Raises SettingsError with the setting, its value without passwords, and the rule."""

    def wrong(why: str) -> SettingsError:
        return SettingsError(f"REDIS_URL={shown_url(url)}: {REDIS_URL_RULE} ({why})")

    place = re.split(r"[?#]", url.partition("://")[2], maxsplit=1)[0]
    if "@" in place.partition("/")[2] or place.partition("/")[0].count("@") > 1 or ("@" in url and "@" not in place):
        # urlsplit would parse a part of the password as a host, a path or a query, and a message below would show it.
        raise wrong(RULE_FOR_PASSWORDS)
    # Without the hosts: from Python 3.14 on, and in security releases before, urlsplit refuses a list with [::1] in it.
    before, authority, after = _split_at_hosts(url)
    try:
        parts = urlsplit(before + after)
        query = {name: values[-1] for name, values in parse_qs(parts.query, strict_parsing=bool(parts.query)).items()}
    except ValueError:
        raise wrong(f"it cannot be parsed: {RULE_FOR_PASSWORDS}") from None
    if parts.scheme not in _SCHEMES:
        raise wrong("the scheme is none of these")
    mode, tls = _SCHEMES[parts.scheme]
    user, _, hosts = authority.rpartition("@")
    if "[" in user or "]" in user:
        raise wrong(f"it cannot be parsed: {RULE_FOR_PASSWORDS}")
    username, _, password = user.partition(":")
    segments = [unquote(segment) for segment in parts.path.split("/") if segment]
    tls_options = {name: value for name, value in query.items() if tls and name in _TLS_OPTIONS}
    requirement = tls_options.get("ssl_cert_reqs", "required")
    if requirement not in _CERTIFICATE_REQUIREMENTS:
        raise wrong(f"ssl_cert_reqs must be one of {', '.join(_CERTIFICATE_REQUIREMENTS)}")
    if "ssl_keyfile" in tls_options and "ssl_certfile" not in tls_options:
        raise wrong("ssl_keyfile needs ssl_certfile")
    if unknown := set(query) - {"db", "sentinel_password"} - set(tls_options):
        raise wrong(f"{sorted(unknown)[0]} is not understood")
    master = ""
    if mode == "socket":
        segments, path = [], unquote(parts.path)
        if not path or "\0" in path:
            raise wrong("the path is missing" if not path else "the path has a NUL character")
    else:
        path = ""
    if mode == "sentinel":
        if not segments:
            raise wrong("the name of the master is missing")
        master = segments.pop(0)
    number = query.get("db") or (segments.pop(0) if segments else "0")
    if segments:
        raise wrong("there is no use for what comes after the database")
    if not number.isdecimal() or (mode == "cluster" and number != "0"):
        raise wrong("a Cluster has only database 0" if number.isdecimal() else "the database is not a number")
    addresses = () if mode == "socket" else tuple(_address(host, _PORTS[mode], wrong) for host in hosts.split(","))
    if mode == "server" and len(addresses) > 1:
        raise wrong("several hosts need redis+sentinel:// or redis+cluster://")
    return RedisTarget(
        mode=mode,
        addresses=addresses,
        path=path,
        tls=tls,
        master=master,
        database=int(number),
        username=unquote(username) or None,
        password=unquote(password) or None,
        tls_options=tls_options,
        sentinel_password=query.get("sentinel_password"),
        shown=shown_url(url),
    )


def check_redis_url(url: str) -> None:
    """Parse a REDIS_URL and read the certificates that it names. Raises SettingsError if one of them cannot be used."""
    options = parse_redis_url(url).tls_options
    context = ssl.create_default_context()
    try:
        if (authorities := options.get("ssl_ca_certs")) is not None:
            context.load_verify_locations(authorities)
        if (certificate := options.get("ssl_certfile")) is not None:
            context.load_cert_chain(certificate, options.get("ssl_keyfile"), password="")
    except (OSError, ValueError) as error:
        named = ", ".join(f"{name}={value}" for name, value in sorted(options.items()) if name != "ssl_cert_reqs")
        rule = "these must be PEM files that can be read, the key without a password"
        raise SettingsError(f"REDIS_URL={shown_url(url)}: {named}: {rule} ({error})") from None


def _split_at_hosts(url: str) -> tuple[str, str, str]:
    """What is before, in and behind the part of a URL that has the user and the hosts."""
    found = re.fullmatch(r"([^:/?#]*://)([^/?#]*)(.*)", re.sub(r"[\t\r\n]", "", url), re.DOTALL)
    return (found[1], found[2], found[3]) if found else (url, "", "")


def _address(text: str, port: int, wrong: Any) -> Address:
    match = re.fullmatch(r"(?:\[(?P<six>[0-9a-fA-F:.%]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d+))?", text)
    if match is None:
        raise wrong("a host with a port is missing")
    number = int(match["port"] or port)
    if not 0 < number < 65536:
        raise wrong(f"{number} is not a port")
    host = unquote(match["six"] or match["host"])
    try:
        usable = bool(host.encode("idna")) and "\0" not in host
    except UnicodeError:
        usable = False
    if not usable:
        raise wrong("a host is no name that can be looked up: its parts must have 1 to 63 characters")
    return host, number

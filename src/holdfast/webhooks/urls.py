"""Decides which URLs a webhook may have.

A client that may create runs names a URL, which the server calls from within its own network. So addresses that are not
public are refused: when the run is created, as far as the URL itself shows the address, and again when the webhook is
sent, after the name has been resolved. The connection then goes to the address that was checked.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from holdfast.graphs.webhooks import WebhooksSection
from holdfast.settings import Settings

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# IPv4 networks without public unicast addresses. Not `is_global` of `ipaddress`, which differs between versions of
# Python.
SPECIAL_IPV4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by carriers; Alibaba's metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's metadata and DNS
        "169.254.0.0/16",  # link-local; metadata of most clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
# IANA has assigned public IPv6 addresses only from this network. All others are refused: loopback, IPv4-compatible,
# site-local, unique local, link-local, multicast, and what may be defined later.
GLOBAL_UNICAST_IPV6 = ipaddress.IPv6Network("2000::/3")
SPECIAL_IPV6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4: leads to an IPv4 address
        "3fff::/20",  # documentation
    )
)
# IPv6 addresses that stand for the IPv4 address in their last four bytes: mapped ones, and those of NAT64.
EMBEDDED_IPV4 = (ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96"))
# Control characters, the space, and the backslash, which some parsers treat as a slash.
SPECIAL_CHARACTERS = re.compile(r"[\x00-\x20\x7f\\]")


class RefusedUrl(ValueError):
    """The policy does not allow this URL.

    The message is a sentence for the client that sent the URL. `cause` is for the operator's log; it may contain
    addresses that the client must not see.
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """A URL that may be called if the address of its host is allowed."""

    url: str
    scheme: str
    host: str
    port: int
    path: str
    """Path and query."""

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port


@dataclass(frozen=True, slots=True)
class UrlPolicy:
    section: WebhooksSection
    allow_private: bool

    @classmethod
    def of(cls, section: WebhooksSection, settings: Settings) -> UrlPolicy:
        return cls(section, settings.webhook_allow_private)

    def admit(self, url: str) -> None:
        """Check the URL of a request, absolute or relative, without resolving its host. Raises RefusedUrl."""
        if is_relative(url):
            self.check_relative(url)
        else:
            self.check(url)

    def check_relative(self, url: str) -> None:
        """Check a path of the project's own app. Raises RefusedUrl."""
        self._check_any(url)
        if not self.section.allow_relative:
            raise RefusedUrl(
                "it must be an absolute URL that begins with https:// or http://. A path of the project's own app is "
                "only allowed with webhooks.url.disable_loopback: false in langgraph.json."
            )
        if not self.section.has_app:
            raise RefusedUrl("a path calls a route of the project's own app, and langgraph.json names none (http.app).")
        if url.startswith("//") or "#" in url or not url.isascii() or SPECIAL_CHARACTERS.search(url):
            raise RefusedUrl("a path must begin with one slash, with special characters percent-encoded.")

    def check(self, url: str) -> WebhookTarget:
        """Check an absolute URL without resolving its host. Raises RefusedUrl."""
        self._check_any(url)
        section = self.section
        parts, port = _split(url)
        host = (parts.hostname or "").rstrip(".").lower()
        if section.require_https and parts.scheme != "https":
            raise RefusedUrl("only https URLs are allowed here (webhooks.url.require_https).")
        if section.allowed_ports is not None and port not in section.allowed_ports:
            raise RefusedUrl(f"port {port} is not among those allowed here (webhooks.url.allowed_ports).")
        if section.allowed_domains is not None and not any(
            _matches_domain(host, one) for one in section.allowed_domains
        ):
            raise RefusedUrl(f"{host} is not among the domains allowed here (webhooks.url.allowed_domains).")
        if not self.allow_private and (host == "localhost" or host.endswith(".localhost")):
            raise RefusedUrl(f"{host} is this machine, which only WEBHOOK_ALLOW_PRIVATE allows.")
        literal = _literal_address(host)
        if literal is not None:
            self.check_address(literal)
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        return WebhookTarget(url, parts.scheme, host, port, path)

    def _check_any(self, url: str) -> None:
        if self.section.disabled:
            raise RefusedUrl("webhooks are switched off here (http.disable_webhooks); leave it out.")
        if len(url) > self.section.max_url_length:
            longest = self.section.max_url_length
            raise RefusedUrl(f"the URL is longer than {longest} characters (webhooks.url.max_url_length).")

    def check_address(self, address: Address) -> None:
        """Raise RefusedUrl for an address that is not public."""
        if not self.allow_private and not is_public(address):
            raise RefusedUrl(f"{address} is not a public address; only WEBHOOK_ALLOW_PRIVATE allows others.")


def is_relative(url: str) -> bool:
    """Whether a webhook calls the project's own app. The SQL of the outbox decides it in the same way."""
    return url.startswith("/")


def is_public(address: Address) -> bool:
    """Whether a packet to this address goes to a public unicast address of the internet."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in SPECIAL_IPV4)
    if address.scope_id is not None:
        return False
    if any(address in network for network in EMBEDDED_IPV4):
        return is_public(ipaddress.IPv4Address(address.packed[12:]))
    return address in GLOBAL_UNICAST_IPV6 and not any(address in network for network in SPECIAL_IPV6)


def _split(url: str) -> tuple[SplitResult, int]:
    if not url or not url.isascii() or SPECIAL_CHARACTERS.search(url):
        raise RefusedUrl("it must be an absolute URL, with spaces and other special characters percent-encoded.")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError as error:
        raise RefusedUrl(f"it is not a URL: {error}.") from None
    if parts.scheme not in ("http", "https") or not host:
        raise RefusedUrl("it must be an absolute URL that begins with https:// or http://.")
    if parts.username is not None or parts.password is not None:
        raise RefusedUrl("a URL with a user name or password in it is not accepted: it would be shown to others.")
    if ":" not in host and not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise RefusedUrl(f"{host!r} is not the name of a host.")
    if port == 0:
        raise RefusedUrl("port 0 cannot be called.")
    return parts, port or (443 if parts.scheme == "https" else 80)


def _matches_domain(host: str, domain: str) -> bool:
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain


def _literal_address(host: str) -> Address | None:
    """The address if the host is a literal address, in any notation that resolvers accept: 127.1, 0x7f000001, …"""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    if ":" in host:
        raise RefusedUrl(f"{host!r} is not an address.")
    try:
        return ipaddress.ip_address(socket.inet_aton(host))
    except OSError:
        return None

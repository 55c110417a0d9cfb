"""Where a webhook may lead.

Whoever may create a run names a URL that the server will call from where it stands, behind its firewall. So addresses
that are not public are refused: when the run is created as far as the URL itself tells, and again when it is called,
when the name has been resolved; the connection then goes to the address that was checked.
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

# Public by their numbers, at least for some versions of Python, and yet the platform's own: Azure's metadata and DNS,
# Oracle's metadata.
PLATFORM = (ipaddress.IPv4Network("168.63.129.16/32"), ipaddress.IPv4Network("192.0.0.0/24"))
# IPv6 addresses that a gateway turns into the IPv4 address in their last four bytes.
TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")


class RefusedUrl(ValueError):
    """The policy does not allow to call this. The message is a sentence for whoever named the URL."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that may be called, if its host's address may."""

    url: str
    scheme: str
    host: str
    port: int

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

    def check(self, url: str) -> Target:
        """What the URL itself tells. Raises RefusedUrl."""
        section = self.section
        if section.disabled:
            raise RefusedUrl("webhooks are switched off here (http.disable_webhooks); leave it out.")
        if len(url) > section.max_url_length:
            raise RefusedUrl(
                f"the URL is longer than {section.max_url_length} characters (webhooks.url.max_url_length)."
            )
        parts, port = _split(url)
        host = (parts.hostname or "").rstrip(".").lower()
        if section.require_https and parts.scheme != "https":
            raise RefusedUrl("only https URLs are allowed here (webhooks.url.require_https).")
        if section.allowed_ports is not None and port not in section.allowed_ports:
            raise RefusedUrl(f"port {port} is not among those allowed here (webhooks.url.allowed_ports).")
        if section.allowed_domains is not None and not any(_below(host, one) for one in section.allowed_domains):
            raise RefusedUrl(f"{host} is not among the domains allowed here (webhooks.url.allowed_domains).")
        if not self.allow_private and (host == "localhost" or host.endswith(".localhost")):
            raise RefusedUrl(f"{host} is this machine, which only WEBHOOK_ALLOW_PRIVATE allows.")
        literal = _literal(host)
        if literal is not None:
            self.check_address(literal)
        return Target(url, parts.scheme, host, port)

    def check_address(self, address: Address) -> None:
        """Raises RefusedUrl for an address that is not public."""
        if not self.allow_private and not is_public(address):
            raise RefusedUrl(f"{address} is not a public address; only WEBHOOK_ALLOW_PRIVATE allows others.")


def is_public(address: Address) -> bool:
    """Whether an address can be anybody's on the internet: not loopback, link-local, private, shared, multicast or
    reserved, and no detour to such a one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address.ipv4_mapped is not None or address in TRANSLATED:
            return is_public(ipaddress.IPv4Address(address.packed[12:]))
        detours = [address.sixtofour, *(address.teredo or ())]
        if any(detour is not None and not is_public(detour) for detour in detours):
            return False
    elif any(address in network for network in PLATFORM):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _split(url: str) -> tuple[SplitResult, int]:
    if not url or not url.isascii() or re.search(r"[\x00-\x20\x7f\\]", url):
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


def _below(host: str, domain: str) -> bool:
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain


def _literal(host: str) -> Address | None:
    """The address that a host is written as, in all the ways that resolvers understand: 127.1, 0x7f000001, …"""
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

"""Host names: which ones mean this machine, and what a `Host` header names."""

from __future__ import annotations

import ipaddress
import socket


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a name spells out; None for a DNS name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Whether a name can only mean this machine: `localhost`, a name below it, 127.0.0.0/8 or ::1.

    DNS is not asked: a DNS name is under the control of its owner.
    """
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = address_of(name)
    return address is not None and address.is_loopback


def usable_host(name: str) -> str:
    """A name or an address to listen on or to connect to. Raises ValueError for what cannot be looked up: a label that
    is empty (`a..b`) or has more than 63 characters."""
    try:
        name.encode("idna")
    except UnicodeError:
        raise ValueError("must be a host name or an IP address") from None
    return name


def listens_beyond_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be reached from other machines. A name that cannot be resolved
    counts as reachable."""
    name = host.lower().rstrip(".")
    if is_loopback(name):
        return False
    if not name or address_of(name) is not None:
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return True
    return not all(is_loopback(address) for address in found)


def host_name(authority: str) -> str:
    """The name in `name`, `name:port` or `[address]:port`, in lower case and without a final dot."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    name, colon, port = authority.rpartition(":")
    return (name if colon and port.isdigit() else authority).lower().rstrip(".")

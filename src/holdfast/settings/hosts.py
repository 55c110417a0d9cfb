"""Checks host names: whether they are usable, and whether they name this machine."""

from __future__ import annotations

import ipaddress
import socket


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a name represents; None for a DNS name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Whether a name always means this machine: `localhost`, a name below it, 127.0.0.0/8 or ::1.

    Does not resolve DNS names, because the owner of a name decides what it resolves to.
    """
    if name == "localhost" or name.endswith(".localhost"):
        return True
    address = address_of(name)
    return address is not None and address.is_loopback


def usable_host(name: str) -> str:
    """Return a name or an address for listening or connecting. Raises ValueError if it cannot be resolved: a label is
    empty (`a..b`) or has more than 63 characters."""
    try:
        name.encode("idna")
    except UnicodeError:
        raise ValueError("must be a host name or an IP address") from None
    return name


def listens_beyond_loopback(host: str) -> bool:
    """Whether other machines can reach a server that listens on `host`. True for a name that cannot be resolved."""
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

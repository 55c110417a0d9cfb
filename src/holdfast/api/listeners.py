"""The sockets that the web process listens on."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from holdfast.errors import SettingsError
from holdfast.settings import Settings


def open_listeners(settings: Settings) -> list[socket.socket]:
    """Bind one socket for each address of HOLDFAST_HOST, all to the same port; port 0 takes a free one.

    Raises SettingsError when an address cannot be used or the port is taken, and then leaves no socket open.
    """
    port, listeners = settings.port, []
    with ExitStack() as opened:
        try:
            for family, address in _addresses(settings.host, port):
                listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    # A client that stops reading would keep its connection, and the stream that writes to it, for ever.
                    # Accepted connections inherit the option: the kernel closes one whose data is not acknowledged.
                    milliseconds = round(settings.stream_stall * 1000)
                    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
                if family == socket.AF_INET6:
                    # "::" must not take the port of 0.0.0.0, which has a socket of its own.
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((address[0], port, *address[2:]))
                port = int(listener.getsockname()[1])
                listeners.append(listener)
        except OSError as error:
            raise cannot_listen(settings, error) from None
        opened.pop_all()
    return listeners


def cannot_listen(settings: Settings, error: OSError) -> SettingsError:
    return SettingsError(
        f"HOLDFAST_HOST={settings.host} PORT={settings.port}: the web process cannot listen there: "
        f"{error.strerror or error}. Choose another address with --host or HOLDFAST_HOST, or another port with --port "
        "or PORT."
    )


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))  # type: ignore[misc]

"""A way from the page to the server that can be lost."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from urllib.parse import urlsplit


class Line:
    """Relays connections to a server. `url` is the server as seen through it."""

    def __init__(self, server_url: str) -> None:
        self._server = ("127.0.0.1", urlsplit(server_url).port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._whole = True
        self._open: list[socket.socket] = []
        self._changing = Lock()

    def cut(self) -> None:
        """Break every connection, and refuse new ones until `restore`."""
        with self._changing:
            self._whole = False
            for one in self._open:
                _reset(one)
            self._open.clear()

    def restore(self) -> None:
        self._whole = True

    def relay(self) -> None:
        """Until `close`."""
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with self._changing:
                    if not self._whole:
                        _reset(client)
                        continue
                    server = socket.create_connection(self._server)
                    self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    Thread(target=_pump, args=(source, target), daemon=True).start()

    def close(self) -> None:
        # Wakes up `accept`, which closing does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def _reset(connection: socket.socket) -> None:
    # Closed also if the other side has closed it already and `shutdown` fails.
    with connection, suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def line_to(server_url: str) -> Iterator[Line]:
    line = Line(server_url)
    relaying = Thread(target=line.relay)
    relaying.start()
    try:
        yield line
    finally:
        line.close()
        relaying.join()

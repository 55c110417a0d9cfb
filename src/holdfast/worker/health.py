"""The probes of a worker, over HTTP from a thread of its own: they are answered while graph code blocks the event loop.

/live    whether the process can still do its work at all. It does not fail when the worker is busy or the database
         is away: an orchestrator would kill the process for it.
/ready   whether it takes runs: its lease is held and it is not draining.
/metrics the worker's metrics, for Prometheus; as JSON with ?format=json or `Accept: application/json`.
"""

from __future__ import annotations

import http.client
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any, ClassVar, Protocol
from urllib.parse import parse_qs

import orjson
import structlog

from holdfast.errors import SettingsError
from holdfast.lifecycle.service import Service, thread_ended
from holdfast.settings import Settings
from holdfast.telemetry.exposition import CONTENT_TYPE, wanted_format

log = structlog.get_logger(__name__)

# Probes that are answered at once, each in a thread. One more disconnects the oldest.
MAX_PROBES = 32
# Seconds that one probe may take in all. A client that sends a byte now and then would keep its thread otherwise.
PROBE_SECONDS = 10.0
# Bytes of a probe's request line and headers. Python's server takes a hundred headers of 64 KiB each.
MAX_HEAD_BYTES = 16 * 1024


@dataclass(frozen=True)
class Verdict:
    """Whether all is well, and why not."""

    well: bool
    reason: str = "ok"


class ProbeMetrics(Protocol):
    """Metrics as Prometheus reads them, and as JSON."""

    def text(self) -> bytes: ...

    def json(self) -> dict[str, Any]: ...


class Probed(Protocol):
    """The process that is probed. Called from the threads of the server."""

    def live(self) -> Verdict: ...

    def ready(self) -> Verdict: ...

    def metrics(self) -> ProbeMetrics: ...


class ProbeServer:
    """Answers probes until it is closed. For a process without an event loop, such as the supervisor."""

    def __init__(self, probed: Probed, host: str = "", port: int = 0, *, listener: socket.socket | None = None) -> None:
        """Listens at once, on `listener` if there is one: a bound socket of the supervisor, which then serves probes
        itself. Raises SettingsError when it cannot."""
        handler = type("Probe", (_Probe,), {"probed": probed})
        self._supervised = listener is not None
        try:
            self._server = _BoundedServer((host, port), handler, listener)
        except OSError as error:
            raise SettingsError(
                f"HOLDFAST_HEALTH_PORT={port}: cannot listen on {host}:{port} ({error.strerror}). Each worker, "
                "`dev` and `serve` on a machine needs a port of its own."
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()
        if not self._supervised:
            log.info("health.listening", port=self.port)

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class HealthServer(Service):
    """The probe server of a worker: on the supervisor's socket, on HOLDFAST_HEALTH_PORT, or none."""

    name = "health"

    def __init__(self, probed: Probed, settings: Settings, listener: socket.socket | None) -> None:
        super().__init__()
        self._patient = probed
        self._settings = settings
        self._listener = listener
        self._server: ProbeServer | None = None

    async def _start(self) -> None:
        """Raises SettingsError when it cannot listen."""
        if self._listener is not None:
            self._server = ProbeServer(self._patient, listener=self._listener)
        elif self._settings.health_port is not None:
            self._server = ProbeServer(self._patient, self._settings.health_host, self._settings.health_port)
        if self._server is not None:
            self._server.start()

    async def _stop(self) -> None:
        if self._server is not None:
            # In a thread, because it waits for up to half a second.
            closing = threading.Thread(target=self._server.close, name="health-close", daemon=True)
            closing.start()
            await thread_ended(closing)


class _BoundedServer(ThreadingHTTPServer):
    """A server with few connections, none of them for long."""

    daemon_threads = True
    # Connections that wait to be accepted. Python's five are soon full, and a probe that comes then is tried again by
    # the kernel after a second, which is as long as an orchestrator waits.
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], listener: socket.socket | None
    ) -> None:
        self._begun: dict[socket.socket, float] = {}
        super().__init__(address, handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener
            self.server_address = listener.getsockname()
            self.server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        while len(self._begun) >= MAX_PROBES:
            # The oldest: a new one may be the orchestrator's, which restarts a process that does not answer.
            oldest = next(iter(self._begun))
            del self._begun[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        self._begun[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._begun.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called every half second. Disconnect probes that take too long; their threads end by that."""
        for request, begun in list(self._begun.items()):
            if time.monotonic() - begun > PROBE_SECONDS:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Not the traceback on stderr that Python prints by default. A client that is gone needs no line."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("health.failed", exc_info=error)


class _Head:
    """The beginning of what a client sends: lines, of MAX_HEAD_BYTES together."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = MAX_HEAD_BYTES

    def readline(self, limit: int) -> bytes:
        """Raises LineTooLong."""
        line = self._file.readline(min(limit, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise http.client.LineTooLong("head")
        return line

    def close(self) -> None:
        self._file.close()


class _Probe(BaseHTTPRequestHandler):
    probed: ClassVar[Probed]
    # A probe that sends nothing does not keep a thread.
    timeout = 5

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.rfile)  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        # Python's server answers 431 to headers that are too long, and does not expect as much of the request line.
        with suppress(http.client.LineTooLong):
            super().handle_one_request()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        match path:
            case "/live":
                self._verdict(self.probed.live())
            case "/ready":
                self._verdict(self.probed.ready())
            case "/metrics":
                self._metrics(parse_qs(query).get("format", [None])[-1])
            case _:
                self._answer(404, "text/plain", b"There are /live, /ready and /metrics.\n")

    do_HEAD = do_GET  # noqa: N815

    def _metrics(self, asked: str | None) -> None:
        if asked not in (None, "prometheus", "json"):
            self._answer(422, "text/plain", b"format is prometheus or json.\n")
        elif wanted_format(asked, self.headers.get("accept")) == "json":
            self._answer(200, "application/json", orjson.dumps(self.probed.metrics().json()))
        else:
            self._answer(200, CONTENT_TYPE, self.probed.metrics().text())

    def _verdict(self, verdict: Verdict) -> None:
        self._answer(200 if verdict.well else 503, "text/plain", f"{verdict.reason}\n".encode())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds, and say nothing worth a line."""

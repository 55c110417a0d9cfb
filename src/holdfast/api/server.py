"""uvicorn as a service of the web process.

This module overrides methods that uvicorn does not document. docs/dependencies.md says why, and
tests/test_private_parts.py fails when they change.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
import uvicorn

from holdfast.api.app import Application
from holdfast.api.connection_limits import ConnectionLimits
from holdfast.api.http_limits import LimitedHttpProtocol
from holdfast.api.listeners import cannot_listen, open_listeners
from holdfast.api.websocket_limits import LimitedWebSocketProtocol
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.lifecycle.service import TaskService
from holdfast.settings import Settings

log = structlog.get_logger(__name__)

# Seconds that open connections have to end when the server stops. Clients resume their streams elsewhere.
CONNECTIONS_END_TIMEOUT_SECONDS = 3
# Seconds that the whole shutdown of the server may take. Most of it is for the lifespan of the project's own app.
SERVER_STOP_TIMEOUT_SECONDS = 60.0
# Lines of uvicorn that tell an operator nothing. A client can cause any number of them.
NOT_LOGGED = frozenset(
    {
        "ASGI callable returned without completing response.",
        "Invalid HTTP request received.",
    }
)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Drop uvicorn's lines for an answer that is cut off on purpose and a malformed request.

    When the process stops, open streams end without a last chunk, so that clients see that there is more and resume
    elsewhere. An answer that is still open when the time for the shutdown is over is cancelled.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and record.msg not in NOT_LOGGED


class Uvicorn(uvicorn.Server):
    """uvicorn that reports when it listens, and calls `on_signal` instead of stopping by itself."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal
        self._signalled = False
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            for listener in sockets or ():
                host, port = listener.getsockname()[:2]
                log.info("web.listening", host=host, port=port)
        self.listening.set()

    def handle_exit(self, sig: int, frame: object) -> None:
        # uvicorn's own handler raises the signal again after the shutdown, and the process would end by it although
        # everything was stopped in good order.
        if self._signalled:
            os._exit(130)
        self._signalled = True
        asyncio.get_running_loop().call_soon_threadsafe(self._on_signal)

    @property
    def connections(self) -> set[Any]:
        """The protocols of all open connections."""
        return self.server_state.connections


class ServerNotStarted(Exception):
    """uvicorn could not start, and has logged why. `code`: what the process should exit with."""

    def __init__(self, code: object) -> None:
        super().__init__(f"uvicorn has exited with {code}")
        self.code = code if isinstance(code, int) else 1


class HttpServer(TaskService):
    """uvicorn as a service: it listens when `start` returns."""

    name = "http"
    stop_timeout_seconds = SERVER_STOP_TIMEOUT_SECONDS

    def __init__(self, uvicorn_server: Uvicorn, application: Application, settings: Settings) -> None:
        super().__init__()
        self._uvicorn = uvicorn_server
        self._application = application
        self._settings = settings

    async def _start(self) -> None:
        await super()._start()
        assert self._task is not None
        listening = asyncio.create_task(self._uvicorn.listening.wait())
        try:
            await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all([listening])
        if self._task.done():
            self._task.result()

    async def _stop(self) -> None:
        self._uvicorn.should_exit = True
        if self._task is not None and self._uvicorn.listening.is_set():
            await asyncio.wait({self._task})
        await super()._stop()

    async def _run(self) -> None:
        listeners = open_listeners(self._settings)
        logging.getLogger("uvicorn.error").addFilter(_is_worth_logging)
        try:
            await self._uvicorn.serve(listeners)
        except OSError as error:
            # Another process has bound the port at the same moment, and listens already.
            raise cannot_listen(self._settings, error) from None
        except SystemExit as exit:
            # uvicorn could not start. If the custom app is why, the operator must read that.
            raise self._application.failure or ServerNotStarted(exit.code) from None
        finally:
            logging.getLogger("uvicorn.error").removeFilter(_is_worth_logging)
            for listener in listeners:
                listener.close()


def uvicorn_config(application: Application, settings: Settings, limits: ConnectionLimits) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=partial(LimitedHttpProtocol, limits=limits),  # type: ignore[arg-type]
        ws=partial(LimitedWebSocketProtocol, limits=limits),  # type: ignore[arg-type]
        ws_max_size=settings.max_body_bytes,
        # A small compressed message can be a large one.
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=CONNECTIONS_END_TIMEOUT_SECONDS,
        timeout_keep_alive=30,
        server_header=False,
    )

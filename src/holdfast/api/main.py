"""A web process: the HTTP API, the hub behind its streams, and a candidate for upkeep."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from functools import partial

import structlog
import uvicorn

from holdfast.api.app import Application
from holdfast.api.connection_limits import ConnectionLimits
from holdfast.api.context import WebContext
from holdfast.api.http_limits import LimitedHttpProtocol
from holdfast.api.listeners import cannot_listen, open_listeners
from holdfast.api.own_routes import OwnRoutes, OwnWebhooks
from holdfast.api.unsent_bytes import UnsentBytes
from holdfast.api.websocket_limits import LimitedWebSocketProtocol
from holdfast.auth.custom import CustomAuth
from holdfast.auth.exposure import refuse_open_server
from holdfast.auth.keys import KeyAuth
from holdfast.auth.known_keys import Roster
from holdfast.db.connect import Database
from holdfast.engine.group_commit import GroupCommitter
from holdfast.errors import OperatorError
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.checkpointer import checkpointer_section
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.exits import contain_exits
from holdfast.graphs.store import store_section
from holdfast.graphs.webhooks import webhooks_section
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.lifecycle.event_loop import run_in_event_loop
from holdfast.lifecycle.garbage_collection import collect_garbage_rarely
from holdfast.lifecycle.service import CoroutineService, Service, Services, TaskService, run_until
from holdfast.resources.assistants import ensure_system_assistants
from holdfast.resources.store import PooledStore
from holdfast.settings import Settings
from holdfast.signals.choose import signals_for
from holdfast.streams.hub import Hub
from holdfast.telemetry.logs import configure_logging
from holdfast.telemetry.loop_delay import watch_loop
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.tracing import configure_tracing, end_tracing
from holdfast.upkeep.leader import Upkeep

log = structlog.get_logger(__name__)


# Lines of uvicorn that say nothing to an operator, and that a client can cause as often as it likes.
NOT_LOGGED = frozenset(
    {
        "ASGI callable returned without completing response.",
        "Invalid HTTP request received.",
    }
)


def _worth_logging(record: logging.LogRecord) -> bool:
    """Drop uvicorn's lines for an answer that is cut off on purpose and a malformed request.

    When the process stops, open streams end without a last chunk, so that clients see that there is more and resume
    elsewhere. An answer that is still open when the time for the shutdown is over is cancelled.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and record.msg not in NOT_LOGGED


# Seconds that open connections have to end when the server stops. Clients resume their streams elsewhere.
CONNECTIONS_END_TIMEOUT_SECONDS = 3
# Seconds that the whole shutdown of the server may take. Most of it is for the lifespan of the project's own app.
SERVER_STOP_TIMEOUT_SECONDS = 60.0
# Seconds to close the store and the database, beyond what the parts take.
CLOSE_TIMEOUT_SECONDS = 15.0


class _Uvicorn(uvicorn.Server):
    """uvicorn that reports when it listens, and calls `on_signal` instead of stopping by itself."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None], stall: float) -> None:
        super().__init__(config)
        self._on_signal = on_signal
        self._signalled = False
        self._stall = stall
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in getattr(self, "servers", ()):
            for listener in server.sockets:
                host, port = listener.getsockname()[:2]
                log.info("web.listening", host=host, port=port)
        # A client that stops reading fills its connection and then holds up whoever writes to it, for ever. The kernel
        # knows for how long nothing has got through; connections have this from the socket they were accepted on.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            for server in getattr(self, "servers", ()):
                for listener in server.sockets:
                    if listener.family in (socket.AF_INET, socket.AF_INET6):
                        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._stall * 1000))
        self.listening.set()

    def handle_exit(self, sig: int, frame: object) -> None:
        # Not uvicorn's own handler: it raises the signal again after the shutdown, and the process would end by it
        # although everything was stopped in good order.
        if self._signalled:
            os._exit(130)
        self._signalled = True
        asyncio.get_running_loop().call_soon_threadsafe(self._on_signal)


class ServerNotStarted(Exception):
    """uvicorn could not start, and has logged why. `code`: what the process should exit with."""

    def __init__(self, code: object) -> None:
        super().__init__(f"uvicorn has exited with {code}")
        self.code = code if isinstance(code, int) else 1


class HttpServer(TaskService):
    """uvicorn as a service: it listens when `start` returns."""

    name = "http"
    stop_timeout_seconds = SERVER_STOP_TIMEOUT_SECONDS

    def __init__(self, uvicorn_server: _Uvicorn, application: Application, settings: Settings) -> None:
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
        logging.getLogger("uvicorn.error").addFilter(_worth_logging)
        try:
            await self._uvicorn.serve(listeners)
        except OSError as error:
            # Another process has bound the port at the same moment, and listens already.
            raise cannot_listen(self._settings, error) from None
        except SystemExit as exit:
            # uvicorn could not start. If the custom app is why, the operator must read that.
            raise self._application.failure or ServerNotStarted(exit.code) from None
        finally:
            logging.getLogger("uvicorn.error").removeFilter(_worth_logging)
            for listener in listeners:
                listener.close()


class WebProcess(Service):
    """Serves the API until it is stopped. See `run_until` and `stop_requested`."""

    name = "web"

    def __init__(self, settings: Settings, catalog: GraphCatalog, stop_requested: asyncio.Event) -> None:
        super().__init__()
        self._settings = settings
        self._catalog = catalog
        # First of all: without it nobody may be let in.
        custom = CustomAuth.load(catalog.project, studio=settings.studio_auth)
        self._database = database = Database(settings, "web")
        metrics = Metrics(enabled=settings.metrics)
        self._roster = roster = Roster(database)
        signals = signals_for(database)
        self._store = PooledStore(database, catalog.project, settings.max_page_bytes)
        catalog.lend(self._store)
        self._hub = Hub(database, signals, metrics)
        committer = GroupCommitter(database)
        auth = KeyAuth(roster) if custom is None else custom
        web = WebContext(
            settings,
            catalog,
            database,
            signals,
            metrics,
            self._hub,
            self._store,
            auth,
            roster=roster,
            committer=committer,
        )
        web.abandoned.cancel = web.cancel
        webhooks = webhooks_section(catalog.project)
        upkeep = Upkeep(
            database,
            signals,
            metrics,
            store_section(catalog.project).sweep_interval,
            checkpointer_section(catalog.project),
            webhooks,
        )
        web.leads = lambda: upkeep.leading
        application = Application(web)
        if webhooks.own_routes:
            routes = OwnRoutes(application, application.mount_prefix, settings.port, lambda: application.state)
            application.background = OwnWebhooks(database, signals, metrics, webhooks, routes)
        self._stop_requested = stop_requested
        limits = ConnectionLimits.of(settings)
        server = _Uvicorn(_uvicorn_config(application, settings, limits), self._request_stop, settings.stream_stall)
        self._parts = Services(
            "web.parts",
            signals,
            self._hub,
            upkeep,
            roster,
            CoroutineService("loop_delay", lambda: watch_loop(metrics)),
            UnsentBytes(server.server_state.connections, limits),
            committer,
            web.abandoned,
            HttpServer(server, application, settings),
        )
        self._parts.on_failure(self._ended_by_itself)
        self.stop_timeout_seconds = self._parts.stop_timeout_seconds + CLOSE_TIMEOUT_SECONDS

    async def _start(self) -> None:
        contain_exits(asyncio.get_running_loop())
        await self._database.open()
        await self._store.setup()
        await self._roster.read()
        refuse_open_server(self._settings, self._catalog.project, keys=self._roster.has_keys)
        await ensure_system_assistants(self._database, self._catalog)
        await self._parts.start()

    async def _stop(self) -> None:
        # Before the server waits for its connections: streams are open-ended.
        self._hub.end_streams()
        await self._parts.stop()
        await self._store.close()
        await self._database.close()
        log.info("web.stopped")

    def _request_stop(self) -> None:
        self._stop_requested.set()


def _uvicorn_config(application: Application, settings: Settings, limits: ConnectionLimits) -> uvicorn.Config:
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


async def serve(settings: Settings, catalog: GraphCatalog, stop: asyncio.Event | None = None) -> None:
    """Serve until a signal comes, or `stop` is set."""
    stop_requested = stop or asyncio.Event()
    await run_until(WebProcess(settings, catalog, stop_requested), stop_requested)


def run_web(settings: Settings, project: ProjectConfig) -> int:
    """Serve until told to stop. Streams are closed; their clients resume where they were."""
    configure_logging(settings, importing=True, role="web", pid=os.getpid())
    catalog = GraphCatalog.load(project)
    configure_logging(settings, role="web", pid=os.getpid())
    configure_tracing(settings, "web")
    collect_garbage_rarely()
    code = 0
    try:
        run_in_event_loop(serve(settings, catalog))
    except* OperatorError as group:
        raise group.exceptions[0] from None
    except* ServerNotStarted as group:
        not_started = group.exceptions[0]
        code = not_started.code if isinstance(not_started, ServerNotStarted) else 1
    finally:
        end_tracing()
    return code

"""A web process: the HTTP API, the hub behind its streams, and a candidate for upkeep."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
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
from holdfast.resources.assistants import ensure_system_assistants
from holdfast.resources.store import PooledStore
from holdfast.settings import Settings
from holdfast.signals.choose import signals_for
from holdfast.streams.hub import Hub
from holdfast.telemetry.logs import configure_logging
from holdfast.telemetry.loop_delay import watch_loop
from holdfast.telemetry.tracing import configure_tracing, end_tracing
from holdfast.upkeep.leader import Upkeep

log = structlog.get_logger(__name__)


class _Server(uvicorn.Server):
    """uvicorn, telling the application at the first signal instead of when all connections are closed."""

    def __init__(self, config: uvicorn.Config, hub: Hub, stall: float) -> None:
        super().__init__(config)
        self._hub = hub
        self._stall = stall

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

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.should_exit:
            os._exit(130)
        asyncio.get_running_loop().call_soon_threadsafe(self._hub.close)
        # Not uvicorn's own handler: it raises the signal again after the shutdown, and the process would end by it
        # although everything was stopped in good order.
        self.should_exit = True

    async def stop_when(self, event: asyncio.Event) -> None:
        await event.wait()
        self._hub.close()
        self.should_exit = True


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


async def serve(settings: Settings, catalog: GraphCatalog, stop: asyncio.Event | None = None) -> None:
    """Serve until a signal comes, or `stop` is set."""
    contain_exits(asyncio.get_running_loop())
    # First of all: without it nobody may be let in.
    custom = CustomAuth.load(catalog.project, studio=settings.studio_auth)
    database = Database(settings, "web")
    roster = Roster(database)
    auth = KeyAuth(roster) if custom is None else custom
    signals = signals_for(database)
    store = PooledStore(database, catalog.project, settings.max_page_bytes)
    catalog.lend(store)
    hub, committer = Hub(database, signals), GroupCommitter(database)
    web = WebContext(settings, catalog, database, signals, hub, store, auth, roster=roster, committer=committer)
    sweep_interval = store_section(catalog.project).sweep_interval
    threads = checkpointer_section(catalog.project)
    webhooks = webhooks_section(catalog.project)
    upkeep = Upkeep(database, signals, sweep_interval, threads, webhooks)
    web.leads = lambda: upkeep.leading
    application = Application(web)
    limits = ConnectionLimits.of(settings)
    if webhooks.own_routes:
        routes = OwnRoutes(application, application.mount_prefix, settings.port, lambda: application.state)
        application.background = OwnWebhooks(database, signals, webhooks, routes).run
    await database.open()
    server = _Server(
        uvicorn.Config(
            application,
            http=partial(LimitedHttpProtocol, limits=limits),  # type: ignore[arg-type]
            ws=partial(LimitedWebSocketProtocol, limits=limits),  # type: ignore[arg-type]
            ws_max_size=settings.max_body_bytes,
            # A small compressed message can be a large one.
            ws_per_message_deflate=False,
            log_config=None,
            access_log=False,
            lifespan="on",
            # Streams are open-ended; clients resume them elsewhere.
            timeout_graceful_shutdown=3,
            timeout_keep_alive=30,
            server_header=False,
        ),
        web.hub,
        settings.stream_stall,
    )
    unsent = UnsentBytes(server.server_state.connections, limits)
    try:
        logging.getLogger("uvicorn.error").addFilter(_worth_logging)
        await store.setup()
        await roster.read()
        refuse_open_server(settings, catalog.project, keys=roster.has_keys)
        await ensure_system_assistants(database, catalog)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(signals.run(), name="signals"),
                tasks.create_task(web.hub.run(), name="hub"),
                tasks.create_task(web.abandoned.run(web.cancel), name="abandoned"),
                tasks.create_task(upkeep.run(), name="upkeep"),
                tasks.create_task(roster.run(), name="roster"),
                tasks.create_task(watch_loop(database.metrics), name="loop_delay"),
                tasks.create_task(unsent.run(), name="unsent"),
            ]
            if stop is not None:
                background.append(tasks.create_task(server.stop_when(stop), name="stop"))
            listeners = open_listeners(settings)
            try:
                await server.serve(listeners)
            except OSError as error:
                # Another process has bound the port at the same moment, and listens already.
                raise cannot_listen(settings, error) from None
            except SystemExit:
                # How uvicorn says that it could not start. If the custom app is why, that is for the operator to read.
                if application.failure is None:
                    raise
                raise application.failure from None
            finally:
                for listener in listeners:
                    listener.close()
            await web.abandoned.drain()
            await cancel_all(background)
    finally:
        await store.close()
        await database.close()
        logging.getLogger("uvicorn.error").removeFilter(_worth_logging)
        log.info("web.stopped")


def run_web(settings: Settings, project: ProjectConfig) -> int:
    """Serve until told to stop. Streams are closed; their clients resume where they were."""
    configure_logging(settings, importing=True, role="web", pid=os.getpid())
    catalog = GraphCatalog.load(project)
    configure_logging(settings, role="web", pid=os.getpid())
    configure_tracing(settings, "web")
    collect_garbage_rarely()
    try:
        run_in_event_loop(serve(settings, catalog))
    except* OperatorError as group:
        raise group.exceptions[0] from None
    finally:
        end_tracing()
    return 0

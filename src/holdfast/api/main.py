"""A web process: the HTTP API, the hub behind its streams, and a candidate for upkeep."""

from __future__ import annotations

import asyncio
import os

import structlog

from holdfast.api.app import Application
from holdfast.api.connection_limits import ConnectionLimits
from holdfast.api.context import WebContext
from holdfast.api.own_routes import OwnRoutes, OwnWebhooks
from holdfast.api.server import HttpServer, ServerNotStarted, Uvicorn, uvicorn_config
from holdfast.api.unsent_bytes import UnsentBytes
from holdfast.auth.custom import CustomAuth
from holdfast.auth.exposure import refuse_open_server
from holdfast.auth.keys import KeyAuth
from holdfast.auth.known_keys import KnownKeys
from holdfast.db.connect import Database
from holdfast.engine.group_commit import GroupCommitter
from holdfast.errors import OperatorError
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.checkpointer import checkpointer_section
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.exits import contain_exits
from holdfast.graphs.store import store_section
from holdfast.graphs.webhooks import webhooks_section
from holdfast.lifecycle.event_loop import run_in_event_loop
from holdfast.lifecycle.garbage_collection import collect_garbage_rarely
from holdfast.lifecycle.service import CoroutineService, Service, Services, run_until
from holdfast.resources.assistants import ensure_system_assistants
from holdfast.resources.store import PooledStore
from holdfast.settings import Settings
from holdfast.signals.choose import signals_for
from holdfast.streams.hub import Hub
from holdfast.telemetry.logs import configure_logging
from holdfast.telemetry.loop_delay import measure_loop_delay
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.tracing import configure_tracing, end_tracing
from holdfast.upkeep.leader import Upkeep

log = structlog.get_logger(__name__)


# Seconds to close the store and the database, beyond what the parts take.
CLOSE_TIMEOUT_SECONDS = 15.0


class WebProcess(Service):
    """Serves the API until it is stopped. See `run_until` and `stop_requested`."""

    name = "web"

    def __init__(self, settings: Settings, catalog: GraphCatalog, stop_requested: asyncio.Event) -> None:
        super().__init__()
        self._settings = settings
        self._catalog = catalog
        # Loaded first: without it no request can be authenticated.
        custom = CustomAuth.load(catalog.project, studio=settings.studio_auth)
        self._database = database = Database(settings, "web")
        metrics = Metrics(enabled=settings.metrics)
        self._known_keys = known_keys = KnownKeys(database)
        signals = signals_for(database)
        self._store = PooledStore(database, catalog.project, settings.max_page_bytes)
        catalog.set_default_store(self._store)
        self._hub = Hub(database, signals, metrics)
        committer = GroupCommitter(database)
        auth = KeyAuth(known_keys) if custom is None else custom
        web = WebContext(
            settings,
            catalog,
            database,
            signals,
            metrics,
            self._hub,
            self._store,
            auth,
            known_keys=known_keys,
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
        server = Uvicorn(uvicorn_config(application, settings, limits), self._request_stop)
        self._parts = Services(
            "web.parts",
            signals,
            self._hub,
            upkeep,
            known_keys,
            CoroutineService("loop_delay", lambda: measure_loop_delay(metrics)),
            UnsentBytes(server.connections, limits),
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
        await self._known_keys.read()
        refuse_open_server(self._settings, self._catalog.project, keys=self._known_keys.has_keys)
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


async def serve(settings: Settings, catalog: GraphCatalog, stop: asyncio.Event | None = None) -> None:
    """Serve until a signal comes, or `stop` is set."""
    stop_requested = stop or asyncio.Event()
    await run_until(WebProcess(settings, catalog, stop_requested), stop_requested)


def run_web(settings: Settings, project: ProjectConfig) -> int:
    """Serve until the process gets a signal. Streams are closed then; their clients resume where they were."""
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

"""A project with an app and an auth of its own, and servers for it with any `http` section."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from holdfast.api.app import Application
from holdfast.api.context import WebContext
from holdfast.auth.custom import CustomAuth
from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import ProjectConfig, load_config
from holdfast.resources.store import PooledStore
from holdfast.settings import Settings, load_settings
from holdfast.signals.postgres import PostgresSignals
from holdfast.streams.hub import Hub
from holdfast.telemetry.metrics import Metrics
from holdfast.worker.main import Worker
from tests.support.live_worker import running_worker
from tests.support.serving import answering

PROJECT = Path(__file__).parent / "langgraph.json"
APP = "./webapp.py:app"


def project(http: dict[str, Any] | None = None, **sections: Any) -> ProjectConfig:
    config = load_config(PROJECT)
    return replace(config, raw={**config.raw, "http": http or {}, **sections})


def context(config: ProjectConfig, settings: Settings) -> WebContext:
    """What a web process has, without a database that answers."""
    database = Database(settings, "test")
    signals = PostgresSignals(database)
    catalog = GraphCatalog.load(config)
    auth = CustomAuth.load(config, studio=False)
    metrics = Metrics()
    hub = Hub(database, signals, metrics)
    return WebContext(settings, catalog, database, signals, metrics, hub, PooledStore(database, config), auth)


@asynccontextmanager
async def calling(
    http: dict[str, Any] | None = None, environ: dict[str, str] | None = None, **sections: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application alone: no sockets, no database, and the lifespan has not begun."""
    settings = load_settings(environ or {}, database_url="postgresql://nowhere.invalid/none")
    application = Application(context(project(http, **sections), settings))
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@asynccontextmanager
async def serving(settings: Settings, config: ProjectConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server of the project, for the length of the block."""
    async with answering(settings, GraphCatalog.load(config)) as client:
        yield client


@asynccontextmanager
async def working(settings: Settings, config: ProjectConfig) -> AsyncIterator[Worker]:
    async with running_worker(settings, GraphCatalog.load(config)) as worker:
        yield worker

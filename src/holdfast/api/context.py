"""The objects that all routes share, one set per web process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any
from uuid import UUID

import psycopg
import structlog
from fastapi import Depends
from langgraph.store.base import BaseStore
from starlette.requests import HTTPConnection

from holdfast.api.abandoned import AbandonedRuns
from holdfast.api.disconnects import WhileOpen
from holdfast.auth.custom import ANYONE, Authenticator, Caller, Resource
from holdfast.auth.keys import KeyAuth
from holdfast.auth.known_keys import KnownKeys
from holdfast.db.connect import Database
from holdfast.db.time_limit import TooSlow
from holdfast.db.visibility import Table, Visibility, is_visible
from holdfast.engine.cancel import CancelledRuns, announce_cancelled, cancel_runs
from holdfast.engine.children.families import cancel_children
from holdfast.engine.group_commit import GroupCommitter
from holdfast.engine.states import CancelAction
from holdfast.engine.threads import delete_thread
from holdfast.errors import Denied, InvalidRequest, NotFound
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.checkpointer import ThreadTtl, checkpointer_section
from holdfast.graphs.webhooks import webhooks_section
from holdfast.insight.activity import recent_activity
from holdfast.insight.cached_figures import CachedFigures
from holdfast.insight.figures import FleetFigures
from holdfast.insight.fleet import queue_figures
from holdfast.resources.known_assistants import KnownAssistants
from holdfast.resources.tenant_store import TenantStore
from holdfast.resources.tenants import Quota
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.streams.hints import thread_changed_hint
from holdfast.streams.hub import Hub
from holdfast.telemetry.exceptions import describe
from holdfast.telemetry.metrics import Metrics
from holdfast.webhooks.urls import RefusedUrl, UrlPolicy

log = structlog.get_logger(__name__)

CALLER = "holdfast.caller"


@dataclass
class WebContext:
    settings: Settings
    catalog: GraphCatalog
    database: Database
    signals: Signals
    metrics: Metrics
    hub: Hub
    store: BaseStore
    auth: Authenticator | None = None
    # The caller of the current request: each route gets a copy of the process's context with its caller.
    caller: Caller = ANYONE
    queue: CachedFigures = field(default_factory=partial(CachedFigures, queue_figures))
    known_keys: KnownKeys | None = None
    # None for a request with an idempotency key: its run is created in the transaction that stores the answer.
    committer: GroupCommitter | None = None
    assistants: KnownAssistants = field(default_factory=KnownAssistants)
    activity: CachedFigures = field(default_factory=partial(CachedFigures, recent_activity))
    figures: FleetFigures = field(default_factory=FleetFigures)
    # Whether only Holdfast's layers are between the routes and the connection. A project's app may add others, such as
    # compression.
    own_layers_only: bool = False
    # Whether this process leads the upkeep.
    leads: Callable[[], bool] = lambda: False
    abandoned: AbandonedRuns = field(default_factory=AbandonedRuns)
    _background: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def thread_ttl(self) -> ThreadTtl | None:
        """The default time to live of threads."""
        return checkpointer_section(self.catalog.project).thread_ttl

    @property
    def quota(self) -> Quota | None:
        """The quota that applies to a run of the caller's tenant."""
        tenant = self.caller.tenant
        return None if self.known_keys is None or tenant is None else self.known_keys.quota(tenant)

    def guarded(self) -> bool:
        """Whether every request must be authenticated now."""
        return self.auth is not None and self.auth.guarded

    async def admit(self, caller: Caller) -> None:
        """Count a request of the caller's tenant. Raises OverLimit."""
        if self.known_keys is not None and caller.tenant is not None:
            await self.known_keys.admit(caller.tenant)

    @property
    def still_admitted(self) -> bool:
        """Whether the caller's API key is still valid. The project's own authentication is not called again."""
        return not isinstance(self.auth, KeyAuth) or self.auth.accepts(self.caller)

    def require_admitted(self) -> None:
        """Raise Denied when the caller's API key is not valid any more. Does not read the database."""
        if isinstance(self.auth, KeyAuth):
            self.auth.require_accepted(self.caller)

    def while_admitted(self) -> AbstractContextManager[object]:
        """A block that ends when the caller's API key is not valid any more. Every stream and WebSocket is served in
        it."""
        if not isinstance(self.auth, KeyAuth):
            return nullcontext()
        return WhileOpen(self.auth.connections.opened_by(self.caller.credential))

    def check_webhook(self, url: str | None) -> None:
        """Raise InvalidRequest for a webhook that may not be called, as far as its URL shows."""
        if url is not None:
            try:
                UrlPolicy.of(webhooks_section(self.catalog.project), self.settings).admit(url)
            except RefusedUrl as refusal:
                raise InvalidRequest(f"webhook: {refusal}") from None

    def cancel_children_of(self, cancelled: CancelledRuns) -> None:
        """Start to cancel the children of cancelled runs."""
        if cancelled.parents:
            self.spawn(self._cancel_children(cancelled.parents))

    def touched(self, thread_id: UUID) -> None:
        """Notify the streams of a thread that a client has updated its state or deleted it."""
        self.signals.publish("events", thread_changed_hint(thread_id), thread_id=thread_id)

    async def delete_thread(self, thread_id: UUID, visible: Visibility) -> None:
        """Delete a thread with its runs, and notify its workers and watchers. Raises NotFound for a thread that
        is not visible."""
        unfinished = await delete_thread(self.database, thread_id, visible)
        running = [run for run in unfinished if run["status"] == "running"]
        announce_cancelled(self.signals, CancelledRuns([run["run_id"] for run in unfinished], running), "rollback")
        self.touched(thread_id)

    async def cancel(self, thread_id: UUID, run_ids: list[UUID], action: CancelAction) -> CancelledRuns:
        cancelled = await cancel_runs(self.database, thread_id, run_ids, action)
        announce_cancelled(self.signals, cancelled, action)
        if cancelled.parents:
            await self._cancel_children(cancelled.parents)
        return cancelled

    async def _cancel_children(self, parents: list[UUID]) -> None:
        """Cancel the children of cancelled runs. Upkeep cancels those for which this fails."""
        try:
            await cancel_children(self.database, self.signals, parents)
        except (psycopg.Error, OSError, TooSlow) as error:
            log.warning("children.not_cancelled", parents=[str(run_id) for run_id in parents], error=describe(error))

    async def require(self, table: Table, row_id: UUID, visible: Visibility) -> None:
        """Raise NotFound for a row that does not exist or that the caller may not see."""
        if visible.restricted:
            async with self.database.connection() as connection:
                if not await is_visible(connection, table, row_id, visible):
                    raise NotFound(table.capitalize(), row_id)

    async def may_thread(self, thread_id: UUID, access: str, **value: Any) -> dict[str, Any]:
        """Authorize an action on a thread or one of its runs. Returns `value` as the project's handler changed it.
        Raises Denied, and NotFound for a thread that the caller may not see."""
        value = {"thread_id": thread_id, **value}
        visible = await self.caller.may("threads", access, value)
        await self.require("thread", thread_id, visible)
        return value

    async def may_each(self, thread_ids: Iterable[UUID], access: str, visible: Visibility, **value: Any) -> list[UUID]:
        """Of threads that `visible` has selected, those for which the caller is authorized. `visible` is the handler's
        answer for all threads together. A handler may also decide by the thread's id, so it is called for each thread
        as well."""
        allowed = []
        for thread_id in thread_ids:
            with suppress(Denied, NotFound):
                own = await self.caller.may("threads", access, {"thread_id": thread_id, **value})
                if own != visible:
                    await self.require("thread", thread_id, own)
                allowed.append(thread_id)
        return allowed

    async def may_show_existing(self, resource: Resource, value: dict[str, Any]) -> Visibility:
        """Authorize a caller who creates an object under an existing id with `if_exists: do_nothing` and gets the
        existing object. This reads the object, so the right to create is not sufficient. Raises Denied."""
        try:
            return await self.caller.may(resource, "read", value)
        except Denied as refusal:
            raise Denied(refusal.status, f"if_exists 'do_nothing': {refusal}", refusal.headers) from None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine to its end, even after the end of its request."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def admitted(web: WebContext, connection: HTTPConnection) -> Caller:
    """Authenticate a request and count it. Raises Denied and OverLimit."""
    caller = ANYONE if web.auth is None else await web.auth.authenticate(connection)
    await web.admit(caller)
    return caller


async def identified(web: WebContext, connection: HTTPConnection) -> WebContext:
    """Authenticate a request and return the context of its caller. Raises Denied and OverLimit."""
    if web.auth is None:
        return web
    # With `middleware_order: auth_first` the request has been authenticated already.
    if CALLER not in connection.scope:
        connection.scope[CALLER] = await admitted(web, connection)
    return seen_by(web, connection.scope[CALLER])


def seen_by(context: WebContext, caller: Caller) -> WebContext:
    """A copy of the context for a caller."""
    if caller is ANYONE:
        return context
    catalog = context.catalog.acting_for(caller.user, caller.configurable)
    if caller.tenant is None:
        return replace(context, caller=caller, catalog=catalog)
    store = TenantStore(context.store, caller.tenant)
    catalog.set_default_store(store)
    return replace(context, caller=caller, catalog=catalog, store=store)


def _given_by_router() -> None:
    """Marks a parameter that does not come from the request. FastAPI, which describes the routes, would treat an
    unmarked one as part of the request."""


# The context of an endpoint: that of the caller; in public routes and for WebSockets, that of the process.
Web = Annotated[WebContext, Depends(_given_by_router)]

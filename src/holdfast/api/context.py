"""What the routes share: one object per web process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Request

from holdfast.db.connect import Database
from holdfast.engine.cancel import CancelledRuns, announce_cancelled, cancel_runs
from holdfast.engine.states import CancelAction
from holdfast.graphs.catalog import GraphCatalog
from holdfast.resources.store import PooledStore
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.streams.hub import Hub


@dataclass
class WebContext:
    settings: Settings
    catalog: GraphCatalog
    database: Database
    signals: Signals
    hub: Hub
    store: PooledStore
    _background: set[asyncio.Task[Any]] = field(default_factory=set)

    def announce_cancelled(self, cancelled: CancelledRuns, action: CancelAction) -> None:
        announce_cancelled(self.signals, cancelled, action)

    async def cancel(self, thread_id: UUID, run_ids: list[UUID], action: CancelAction) -> CancelledRuns:
        cancelled = await cancel_runs(self.database, thread_id, run_ids, action)
        self.announce_cancelled(cancelled, action)
        return cancelled

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something to its end although the request that began it is over."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def web_context(request: Request) -> WebContext:
    context: WebContext = request.app.state.holdfast
    return context


Web = Annotated[WebContext, Depends(web_context)]

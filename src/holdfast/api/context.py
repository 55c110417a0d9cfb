"""What the routes share: one object per web process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import Depends, Request

from holdfast.db.connect import Database
from holdfast.engine.cancel import CancelledRuns, cancel_runs
from holdfast.engine.states import CancelAction
from holdfast.graphs.catalog import GraphCatalog
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
    _background: set[asyncio.Task[Any]] = field(default_factory=set)

    def announce_cancelled(self, cancelled: CancelledRuns, action: CancelAction) -> None:
        """Tell the owners of runs to stop, and the watchers of runs that ended already."""
        for run in cancelled.requested:
            self.signals.publish("cancel", orjson.dumps({"run_id": str(run["run_id"]), "action": action}).decode())
        if cancelled.ended:
            self.signals.publish("events", orjson.dumps({"ended": [str(run) for run in cancelled.ended]}).decode())
            self.signals.publish("work", "")

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

"""The run whose graph code is being executed, in a context variable.

The executor sets it for the task that runs the graph. LangGraph copies the context into the tasks and threads of nodes,
so code at any depth below them can read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from holdfast.db.connect import Database
from holdfast.errors import NotInRun, RunSignal
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.exits import enter_graph_code
from holdfast.signals import Signals


@dataclass(frozen=True, kw_only=True)
class CurrentRun:
    """One attempt of a run, as far as the functions for graph code need it."""

    run_id: UUID
    thread_id: UUID
    fence: int
    kwargs: dict[str, Any]
    database: Database
    catalog: GraphCatalog
    # None: no hints are sent, and other processes notice new runs by polling.
    signals: Signals | None
    loop: asyncio.AbstractEventLoop
    # Ends the attempt. Raising the signal is not enough: graph code may catch it, or wrap it in an exception group.
    stop: Callable[[RunSignal], None]
    # The children that code of this attempt waits for, by their keys; see `engine.outcome.Waiting`.
    awaited: dict[str, bool] = field(default_factory=dict)


_current: ContextVar[CurrentRun | None] = ContextVar("current_run", default=None)


def enter_run(run: CurrentRun) -> None:
    """Make this the current run of this task and of all tasks that it starts."""
    _current.set(run)
    enter_graph_code()


def current_run(asked_by: str) -> CurrentRun:
    """The current run. Raises NotInRun outside of a run, with the name of the function that was called."""
    run = _current.get()
    if run is None:
        raise NotInRun(
            f"{asked_by} was called where no run is being executed. It is for the nodes and tools of graphs that a "
            "Holdfast worker runs, and for what they call in the same task or thread."
        )
    return run

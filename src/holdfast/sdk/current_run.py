"""The run whose code is being executed.

A context variable, set by the executor for the task that runs the graph. LangGraph copies it into the tasks and threads
of the nodes, so that code below them finds it, however deep.
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
    """One attempt at a run, as far as its own code may use it."""

    run_id: UUID
    thread_id: UUID
    fence: int
    kwargs: dict[str, Any]
    database: Database
    catalog: GraphCatalog
    # None: nobody is told of anything, and everybody finds it by looking.
    signals: Signals | None
    loop: asyncio.AbstractEventLoop
    # Ends the attempt. What is raised into the run's code may be caught there, or come back in a group.
    stop: Callable[[RunSignal], None]
    # The children that code of this attempt waits for, by their keys; see `engine.outcome.Waiting`.
    awaited: dict[str, bool] = field(default_factory=dict)


_current: ContextVar[CurrentRun | None] = ContextVar("current_run", default=None)


def enter_run(run: CurrentRun) -> None:
    """From here on, in this task and in all that it starts, this is the current run."""
    _current.set(run)
    enter_graph_code()


def current_run(asked_by: str) -> CurrentRun:
    """The run whose code calls. Raises NotInRun elsewhere."""
    run = _current.get()
    if run is None:
        raise NotInRun(
            f"{asked_by} was called where no run is being executed. It is for the nodes and tools of graphs that a "
            "Holdfast worker runs, and for what they call in the same task or thread."
        )
    return run

"""Executes attempts: a pipeline of named stages.

    begin → stream → conclude → finish

- `begin` (opening.py) opens the graph with its checkpointer.
- `stream` (streaming.py) decides where the graph starts, runs it, and journals its events, until it ends or is stopped.
- `conclude` (conclusion.py), which `finish` calls, turns the way it ended into an outcome.
- `finish` (finishing.py) writes the outcome. Only when that is durable is the attempt over. If the outcome cannot be
  written, it concludes again, with less of what the run's code has made (`finishing.Form`).

Observers (observers.py) count usage, measure latency and record traces. They change nothing about the run, except that
the usage meter stops it at the end of its budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore

from holdfast.db.connect import Database
from holdfast.engine.outcome import Outcome
from holdfast.execution.attempt import Attempt, Execution
from holdfast.execution.checkpoints import JournalSaver
from holdfast.execution.environment import Environment
from holdfast.execution.finishing import finish
from holdfast.execution.opening import begin, close_resources
from holdfast.execution.streaming import stream
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.exits import GraphCode, contained
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS
from holdfast.telemetry.metrics import Metrics


class Executor:
    """Executes attempts. Keeps nothing between them."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        catalog: GraphCatalog,
        metrics: Metrics,
        *,
        store: BaseStore | None = None,
        signals: Signals | None = None,
        saver: Callable[..., BaseCheckpointSaver[Any]] = JournalSaver,
    ) -> None:
        self._environment = Environment(settings, database, catalog, saver, metrics, store, signals)

    async def execute(self, attempt: Attempt) -> Outcome | None:
        """Run the pipeline. Returns the outcome once it is durable, or None if the run's lease was lost.

        All that the graph's code can raise, return or leave in the state ends in an outcome. If this raises, there is a
        defect in Holdfast, or the database refuses every outcome.
        """
        try:
            attempt.begin(self._environment.metrics)
            outcome = await self._run_stages(Execution(attempt))
        except GRAPH_CODE_EXCEPTIONS as error:
            for observer in attempt.observers:
                observer.crashed(error)
            raise
        for observer in attempt.observers:
            observer.ended(outcome)
        return outcome

    async def _run_stages(self, execution: Execution) -> Outcome | None:
        try:
            try:
                with GraphCode():
                    await begin(execution, self._environment)
                await stream(execution, self._environment)
            except GRAPH_CODE_EXCEPTIONS as error:
                execution.fail(contained(error))
            return await finish(execution, self._environment.settings)
        finally:
            await close_resources(execution, self._environment)

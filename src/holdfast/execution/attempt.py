"""An attempt at a run, and its execution while it is under way."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel

from holdfast.engine.claimed_run import ClaimedRun
from holdfast.errors import Cancelled, LeaseLost, RunSignal
from holdfast.execution.meter import UsageMeter
from holdfast.execution.observers import AttemptObserver
from holdfast.execution.start_latency import StartLatency
from holdfast.execution.stream_progress import StreamProgress
from holdfast.execution.traces import AttemptTrace
from holdfast.journal.run_writer import RunWriter
from holdfast.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import AttemptSpan


class Attempt:
    """A claimed run while this worker holds it. `stop` may be called at any time, and more than once.

    The claim loop creates attempts, so creating one reads no stored value that could make it raise. That is done by
    `begin`, where an error fails this run alone."""

    meter: UsageMeter

    def __init__(self, run: ClaimedRun, writer: RunWriter, span: AttemptSpan | None = None) -> None:
        """`span` None: traces are off."""
        self.run = run
        self.writer = writer
        self.observers: list[AttemptObserver] = [] if span is None else [AttemptTrace(span)]
        self.stopped: asyncio.Future[RunSignal] = asyncio.get_running_loop().create_future()
        """Has the signal that stops the attempt, once there is one."""
        self._claimed_at = time.monotonic()
        if run.cancel_action is not None:
            self.stop(Cancelled(run.cancel_action))

    def begin(self, metrics: Metrics) -> None:
        """Begin to count what the run uses. Before everything else that is done with it."""
        for observer in self.observers:
            observer.began()
        self.meter = UsageMeter(self.run, self._add_usage, self.stop)
        self.observers += [self.meter, StartLatency(metrics, self.run.graph_id, self._claimed_at)]
        self.writer.on_shared_usage = self.meter.update_shared
        if self.meter.exceeded is not None:
            self.stop(self.meter.exceeded)

    def stop(self, signal: RunSignal) -> None:
        """Interrupt the graph where it is. The first signal decides the outcome. But after a LeaseLost nothing is
        written, also if it is not the first."""
        if isinstance(signal, LeaseLost) and self.writer.failure is None:
            self.writer.mark_lost()
        if not self.stopped.done():
            self.stopped.set_result(signal)

    def write_final_usage(self) -> None:
        """Hand in the whole usage again, with the outcome: a failed try to write the outcome may have dropped it."""
        if (usage := self.meter.final_count()) is not None:
            self._add_usage(usage)

    def _add_usage(self, usage: str) -> None:
        if self.writer.failure is None:
            self.writer.add_usage(usage)


@dataclass
class Execution:
    """An attempt under way: what the stages of the executor hand on to each other."""

    attempt: Attempt
    # What the graph's factory has opened.
    resources: AsyncExitStack = field(default_factory=AsyncExitStack)
    # None: it could not be opened, or its state cannot be read any more.
    graph: Pregel[Any, Any, Any, Any] | None = None
    config: RunnableConfig | None = None
    progress: StreamProgress = field(default_factory=StreamProgress)
    # What ended the attempt. None: the graph came to its own end.
    failure: BaseException | None = None

    @property
    def opened(self) -> tuple[Pregel[Any, Any, Any, Any], RunnableConfig]:
        """The graph and its config, for stages that come after its opening."""
        assert self.graph is not None
        assert self.config is not None
        return self.graph, self.config

    def fail(self, failure: BaseException) -> None:
        """A stage failed. The graph's state is not read for the end of the run."""
        self.graph, self.config, self.failure = None, None, failure

"""One attempt at a run: a pipeline of named stages.

    begin → stream → conclude → finish

The claim has told watchers that the run has started or been taken over. `begin` opens the graph and decides what to
start from. `stream` runs it and journals its events. `conclude` turns the way it ended into an outcome. `finish`
writes the outcome; only when that is durable does the attempt count as over.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

import orjson
import structlog
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import UnknownInterruptError
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore

from holdfast.db.connect import Database
from holdfast.engine.gates import answer_of
from holdfast.engine.outbox import has_webhook
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.states import DeadLetter, RunStatus
from holdfast.errors import (
    BudgetExceeded,
    Cancelled,
    ConfigError,
    Drained,
    JournalFailed,
    LeaseLost,
    NotFound,
    Retry,
    RunSignal,
    RunTimeout,
)
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.context_schema import graph_context
from holdfast.resources.checkpoints import highest_step
from holdfast.resources.tenant_store import store_of
from holdfast.resources.threads import get_thread
from holdfast.runtime.children import WaitsForChildren
from holdfast.runtime.current import CurrentRun, enter_run
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.streams.serialize import to_json
from holdfast.telemetry.exceptions import kind_and_place
from holdfast.worker.batch import Ties
from holdfast.worker.checkpoints import JournalSaver, PooledSaver
from holdfast.worker.graph_stream import Claimed, run_config, stream_graph
from holdfast.worker.journal import Lane
from holdfast.worker.messages import MessageModes
from holdfast.worker.meter import UsageMeter
from holdfast.worker.pace import Pace
from holdfast.worker.private_fields import public_json
from holdfast.worker.progress import Progress
from holdfast.worker.protocol import CONTENT_BLOCKS, PROTOCOL_MODES, ProtocolModes
from holdfast.worker.resume import waits_at_breakpoint
from holdfast.worker.transformers import Transformers
from holdfast.worker.transient import is_transient, pause_before_retry

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import AttemptSpan

log = structlog.get_logger(__name__)

# How long user code may take to react to being stopped before it is left behind.
STOP_PATIENCE = 10.0


class Attempt:
    """A claimed run while this worker holds it. `stop` may be called at any time, by anybody, more than once."""

    def __init__(self, run: Claimed, lane: Lane) -> None:
        self.run = run
        self.lane = lane
        # None: traces are off.
        self.trace: AttemptSpan | None = None
        self._stopped: asyncio.Future[RunSignal] = asyncio.get_running_loop().create_future()
        if run.cancel_action is not None:
            self.stop(Cancelled(run.cancel_action))
        self.meter = UsageMeter(run, self._used, self.stop)
        self.pace = Pace()
        if self.meter.exceeded is not None:
            self.stop(self.meter.exceeded)

    def stop(self, signal: RunSignal) -> None:
        """Interrupt the graph where it stands. The first signal decides, but a lost lease outranks all."""
        if isinstance(signal, LeaseLost) and self.lane.failure is None:
            self.lane.void()
        if not self._stopped.done():
            self._stopped.set_result(signal)

    def _used(self, usage: str) -> None:
        if self.lane.failure is None:
            self.lane.usage(usage)

    def settle(self) -> None:
        """Hand in what the attempt has used, for the last time: with its end, whatever was discarded before."""
        if (usage := self.meter.settle()) is not None:
            self._used(usage)

    @property
    def stopped(self) -> asyncio.Future[RunSignal]:
        return self._stopped


class Executor:
    """Executes attempts. Holds nothing between them."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        catalog: GraphCatalog,
        *,
        saver: Callable[..., BaseCheckpointSaver[Any]] = JournalSaver,
    ) -> None:
        self._settings = settings
        self._database = database
        self._catalog = catalog
        self._saver = saver
        # For graph code. Whoever runs the process opens it before the first attempt.
        self.store: BaseStore | None = None
        # To tell others of what graph code creates.
        self.signals: Signals | None = None

    async def execute(self, attempt: Attempt) -> Outcome | None:
        """Run the pipeline. Returns the outcome once it is durable, or None when the run was not ours to end."""
        run = attempt.run
        progress = Progress()
        async with AsyncExitStack() as stack:
            try:
                graph, config = await self._begin(attempt, stack)
                failure = await self._stream(attempt, graph, config, progress)
            except Exception as error:
                graph, config, failure = None, None, error
            for last_try in (False, False, True):
                try:
                    outcome = await self._conclude(attempt, graph, config, progress, failure)
                    if outcome is None:
                        return None
                    attempt.settle()
                    await attempt.lane.finish(outcome, graph_id=run.graph_id, ties=_ties(run))
                except LeaseLost:
                    log.info("run.lost", fence=run.fence)
                    return None
                except (Cancelled, JournalFailed) as signal:
                    # The end itself could not be written as it was: a rollback came first, or the last values cannot
                    # be stored. Either way there is another end to write.
                    if last_try:
                        raise
                    attempt.lane.discard()
                    progress.values = None
                    failure = signal
                else:
                    return outcome
        return None

    async def _begin(
        self, attempt: Attempt, stack: AsyncExitStack
    ) -> tuple[Pregel[Any, Any, Any, Any], RunnableConfig]:
        run = attempt.run
        durability = run.kwargs.get("durability")
        saver = self._saver(
            self._database, attempt.lane, wait=durability == "sync", hold=durability == "exit", fresh=run.fresh
        )
        config = run_config(run)
        graph = await stack.enter_async_context(
            self._catalog.open(
                run.graph_id,
                config=config,
                access_context="threads.create_run",
                checkpointer=saver,
                store=store_of(self.store, run.tenant_id),
                user=config["configurable"].get("langgraph_auth_user"),
                context=graph_context(None, run.kwargs, config["configurable"]) or {},
            )
        )
        return graph, config

    async def _stream(
        self, attempt: Attempt, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig, progress: Progress
    ) -> BaseException | None:
        """Run the graph until it ends or is stopped. Returns what ended it, None if it came to its own end."""
        limit, overdue = attempt.meter.time_limit(self._settings.run_timeout)
        remaining = limit - attempt.run.elapsed
        task = asyncio.create_task(self._pump(attempt, graph, config, progress), name=f"run {attempt.run.run_id}")
        waiting: set[asyncio.Future[Any]] = {task, attempt.stopped}
        await asyncio.wait(waiting, timeout=max(0.0, remaining), return_when=asyncio.FIRST_COMPLETED)
        signal: RunSignal | None = None
        if attempt.stopped.done():
            signal = attempt.stopped.result()
        elif not task.done():
            signal = overdue
        lane = attempt.lane
        await _stop_task(task, attempt)
        attempt.meter.close()
        if attempt.lane is not lane:
            # The checkpointer belongs to the one left behind, and can do nothing more; the state still has to be read.
            graph.checkpointer = PooledSaver(self._database).with_allowlist(self._catalog.checkpoint_types)
        if task.done() and not task.cancelled():
            task.exception()  # Fetched, or asyncio would report it where the lane's failure says it all.
        if attempt.lane.failure is not None:
            return attempt.lane.failure
        if signal is not None and (isinstance(signal, Cancelled) or not _succeeded(task)):
            return signal
        return asyncio.CancelledError() if task.cancelled() else task.exception()

    async def _pump(
        self, attempt: Attempt, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig, progress: Progress
    ) -> None:
        """The graph's stream, into the journal."""
        run, lane = attempt.run, attempt.lane
        kwargs = run.kwargs
        attempt.meter.attach()
        enter_run(self._current(run))
        if run.attempt > 1:
            progress.state = await waits_at_breakpoint(
                graph, config, str(run.run_id), kwargs.get("interrupt_before"), kwargs.get("interrupt_after")
            )
            if progress.state is not None:
                progress.paused = True
                return
            if kwargs.get("strict_resume"):
                run = replace(run, asked=await self._asked(run))
        requested = frozenset(kwargs.get("stream_mode") or ["values"])
        modes: MessageModes | ProtocolModes
        if kwargs.get("protocol"):
            requested = PROTOCOL_MODES
            modes = ProtocolModes(None if run.fresh else await highest_step(self._database, run.thread_id))
            config = {**config, "configurable": {**config["configurable"], CONTENT_BLOCKS: True}}
        else:
            modes = MessageModes(requested)
        if kwargs.get("protocol") and graph.stream_transformers:
            transformers = Transformers(graph.stream_transformers)
            stream = stream_graph(graph, config, run, requested | transformers.modes)
            stream = transformers.transform(progress.watch(stream))
            watch = None  # It is the graph's own stream that tells, before anything is made of it.
        else:
            stream = stream_graph(graph, config, run, requested)
            watch = progress.see
        attempt.pace.start(self._database.metrics)
        try:
            async for namespace, mode, chunk in stream:
                if watch is not None:
                    watch(namespace, mode, chunk)
                if attempt.pace.silent:
                    attempt.pace.first_event(self._database.metrics, run.graph_id)
                for place, kind, data in modes.events(namespace, mode, chunk):
                    lane.event(kind, public_json(kind, to_json(data)), place)
                if lane.crowded:
                    await lane.room()
        finally:
            if isinstance(graph.checkpointer, JournalSaver):
                graph.checkpointer.release()
            if lane.failure is None:
                for place, kind, data in modes.finish():
                    lane.event(kind, public_json(kind, to_json(data)), place)
        if progress.seen_values and ("values" not in requested or not progress.told):
            # Whoever waits for the result finds it here.
            lane.event("output", to_json(progress.output))

    def _current(self, run: Claimed) -> CurrentRun:
        """The run as its own code finds it."""
        return CurrentRun(
            run_id=run.run_id,
            thread_id=run.thread_id,
            fence=run.fence,
            kwargs=run.kwargs,
            database=self._database,
            catalog=self._catalog,
            signals=self.signals,
            loop=asyncio.get_running_loop(),
        )

    async def _asked(self, run: Claimed) -> frozenset[str]:
        """What waited for an answer before the run: the thread's row changes only when a run ends."""
        async with self._database.connection() as connection:
            thread = await get_thread(connection, run.thread_id)
        return frozenset(waiting["id"] for of_task in thread["interrupts"].values() for waiting in of_task)

    async def _conclude(
        self,
        attempt: Attempt,
        graph: Pregel[Any, Any, Any, Any] | None,
        config: RunnableConfig | None,
        progress: Progress,
        failure: BaseException | None,
    ) -> Outcome | None:
        """What the way an attempt ended means for the run. None: nothing may be written."""
        if isinstance(failure, RunSignal) and not isinstance(failure, Retry):
            match failure:
                case LeaseLost():
                    return None
                case Drained():
                    return Released()
                case Cancelled(action="rollback"):
                    return RolledBack()
                case Cancelled():
                    error = {"error": "UserInterrupt", "message": "The run was cancelled."}
                    return await self._ended(RunStatus.INTERRUPTED, graph, config, progress, error)
                case RunTimeout():
                    error = describe(failure)
                    attempt.lane.event("error", to_json(error))
                    return await self._ended(RunStatus.TIMEOUT, graph, config, progress, error)
                case BudgetExceeded():
                    log.warning("run.over_budget", limit=str(failure))
                    return self._failed(attempt, failure, await self._left(graph, config, progress))
                case JournalFailed():
                    return self._failed(attempt, failure)
                case _:
                    assert_never(failure)  # type: ignore[arg-type]
        if failure is None:
            if progress.values is not None and not progress.paused:
                return Ended(status=RunStatus.SUCCESS, resting="idle", values=to_json(progress.values))
            return await self._ended(RunStatus.SUCCESS, graph, config, progress, None)
        if isinstance(failure, WaitsForChildren):
            return Waiting(awaited=dict(failure.awaited))
        if isinstance(failure, UnknownInterruptError) and attempt.run.kwargs.get("strict_resume"):
            # Raised before anything is written: whoever does wait for an answer goes on waiting.
            return self._failed(attempt, failure, Ended(status=RunStatus.ERROR, resting=None))
        if is_transient(failure):
            run = attempt.run
            if run.retries < self._settings.max_retries:
                pause = pause_before_retry(failure, run.retries, self._settings)
                if attempt.trace is not None:
                    attempt.trace.failed(failure)
                kind = kind_and_place(failure)
                log.warning("run.retrying", error=kind, after=round(pause, 2), retry=run.retries + 1)
                return Released(after=pause)
            left = await self._left(graph, config, progress)
            return self._failed(attempt, failure, left, dead_letter="retries_exhausted")
        # The worker said that it has the graph, but it cannot be opened any more.
        gone = graph is None and isinstance(failure, NotFound | ConfigError)
        left = await self._left(graph, config, progress)
        return self._failed(attempt, failure, left, dead_letter="graph_gone" if gone else None)

    async def _left(
        self, graph: Pregel[Any, Any, Any, Any] | None, config: RunnableConfig | None, progress: Progress
    ) -> Ended | None:
        """What a run that failed leaves behind: the values it came to, and the questions that still wait. None when
        that cannot be told, for what the graph failed at may be its state."""
        try:
            left = await self._ended(RunStatus.ERROR, graph, config, progress, None)
        except RunSignal:
            raise
        except Exception as error:
            log.warning("state.unreadable", error=kind_and_place(error))
            return None
        return replace(left, resting="error")

    def _failed(
        self,
        attempt: Attempt,
        failure: BaseException,
        left: Ended | None = None,
        *,
        dead_letter: DeadLetter | None = None,
    ) -> Ended:
        error = describe(failure)
        # Not the message: that may be made of the run's input. It is kept with the run.
        log.warning("run.failed", error=kind_and_place(failure))
        if dead_letter is not None:
            log.warning("run.dead_letter", reason=dead_letter)
        attempt.lane.event("error", to_json(error))
        return replace(
            left or Ended(status=RunStatus.ERROR, resting="error"),
            error=error,
            traceback="".join(traceback.format_exception(failure))[-20_000:],
            dead_letter=dead_letter,
        )

    async def _ended(
        self,
        status: Any,
        graph: Pregel[Any, Any, Any, Any] | None,
        config: RunnableConfig | None,
        progress: Progress,
        error: dict[str, str] | None,
    ) -> Ended:
        """An end in the middle of the graph, or possibly so: the thread's head tells what is left to do."""
        state = progress.state
        if state is None and graph is not None and config is not None:
            state = await graph.aget_state(at_head(config))
        values = progress.values
        if isinstance(values, dict):
            values = {key: value for key, value in values.items() if key != "__interrupt__"}
        if state is None:
            resting = "idle"
            interrupts: dict[str, Any] = {}
        else:
            resting = "interrupted" if state.next else "idle"
            interrupts = {task.id: list(task.interrupts) for task in state.tasks if task.interrupts}
            if values is None and state.created_at is not None:
                values = state.values
        return Ended(
            status=status,
            resting=resting,
            values=None if values is None else to_json(values),
            interrupts=orjson.loads(to_json(interrupts)),
            error=error,
        )


def at_head(config: RunnableConfig) -> RunnableConfig:
    """The config without the checkpoint that a run branched off from: it has written others since."""
    places = ("checkpoint_id", "checkpoint_map", "checkpoint_ns")
    configurable = {key: value for key, value in config["configurable"].items() if key not in places}
    return {**config, "configurable": configurable}


def _ties(run: Claimed) -> Ties:
    gated = run.asking or answer_of(run.kwargs) is not None
    return Ties(webhook=has_webhook(run.kwargs), parent=run.parent_run_id, gated=gated)


def describe(error: BaseException) -> dict[str, str]:
    """An error as clients see it."""
    return {"error": type(error).__name__, "message": str(error)}


def _succeeded(task: asyncio.Task[None]) -> bool:
    """Whether the graph came to its own end before a stop reached it."""
    return task.done() and not task.cancelled() and task.exception() is None


async def _stop_task(task: asyncio.Task[None], attempt: Attempt) -> None:
    """Cancel user code and wait for it. Code that swallows the cancellation is asked again, then left behind with a
    lane that writes nothing more."""
    deadline = time.monotonic() + STOP_PATIENCE
    while not task.done() and time.monotonic() < deadline:
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)
    if not task.done():
        log.error("run.unstoppable", seconds=STOP_PATIENCE)
        attempt.lane = await attempt.lane.supersede()
        # Whatever becomes of it, nobody is there any more to hear of it.
        task.add_done_callback(lambda left: None if left.cancelled() else left.exception())

"""One attempt at a run: a pipeline of named stages.

    begin → stream → conclude → finish

The claim has told watchers that the run has started or been taken over. `begin` opens the graph and decides what to
start from. `stream` runs it and journals its events. `conclude` turns the way it ended into an outcome. `finish`
writes the outcome; only when that is durable does the attempt count as over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, assert_never

import structlog
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.errors import UnknownInterruptError
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore

from holdfast.db.connect import Database
from holdfast.engine.interrupts.accepting import refuse_late_resume
from holdfast.engine.outcome import Ended, Outcome, Released, RolledBack, Waiting
from holdfast.engine.states import DeadLetter, RunStatus
from holdfast.engine.threads import get_thread
from holdfast.engine.usage import read_shared_usage
from holdfast.errors import (
    AnswerTooLate,
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
from holdfast.execution.checkpoints import JournalSaver, PooledSaver
from holdfast.execution.endings import awaited_children, bare_end, describe, effects_of, left_behind, state_at_end
from holdfast.execution.graph_stream import Claimed, run_config, stream_graph
from holdfast.execution.messages import MessageModes
from holdfast.execution.meter import UsageMeter
from holdfast.execution.pace import Pace
from holdfast.execution.private_fields import public_json
from holdfast.execution.progress import Progress
from holdfast.execution.protocol import CONTENT_BLOCKS, PROTOCOL_MODES, ProtocolModes
from holdfast.execution.starting_point import COMMAND_WRITES, NOTHING, waits_at_breakpoint
from holdfast.execution.traces import trace_failure
from holdfast.execution.transformers import Transformers
from holdfast.execution.transient import is_transient, pause_before_retry
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.context_schema import graph_context
from holdfast.graphs.exits import GraphCode, contained, exit_of
from holdfast.journal.run_writer import RunWriter
from holdfast.resources.checkpoints import highest_step
from holdfast.resources.tenant_store import store_of
from holdfast.sdk.current_run import CurrentRun, enter_run
from holdfast.settings import Settings
from holdfast.signals import Signals
from holdfast.streams.serialize import to_json
from holdfast.telemetry.exceptions import ESCAPING, kind_and_place, run_traceback

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import AttemptSpan

log = structlog.get_logger(__name__)

Begin = Callable[["Attempt", AsyncExitStack], Awaitable[tuple[Pregel[Any, Any, Any, Any], RunnableConfig]]]

# How the server ends an attempt. If graph code raises one of them without having been stopped, it is an error like any
# other: it would otherwise hand the run back, uncounted, each time.
STOPS = (LeaseLost, Drained, Cancelled, RunTimeout)
# How long user code may take to react to being stopped before it is left behind.
STOP_TIMEOUT_SECONDS = 10.0


class Attempt:
    """A claimed run while this worker holds it. `stop` may be called at any time, by anybody, more than once.

    To make one raises nothing, whatever is stored with the run: the claim loop does that. What reads stored values, and
    may fail, belongs to `open`, and fails this run alone."""

    meter: UsageMeter

    def __init__(self, run: Claimed, writer: RunWriter) -> None:
        self.run = run
        self.writer = writer
        # None: traces are off.
        self.trace: AttemptSpan | None = None
        self._stopped: asyncio.Future[RunSignal] = asyncio.get_running_loop().create_future()
        if run.cancel_action is not None:
            self.stop(Cancelled(run.cancel_action))
        self.pace = Pace()

    def open(self) -> None:
        """Begin to count what the run uses. Before everything else that is done with it."""
        self.meter = UsageMeter(self.run, self._used, self.stop)
        self.writer.on_shared_usage = self.meter.update_shared
        if self.meter.exceeded is not None:
            self.stop(self.meter.exceeded)

    def stop(self, signal: RunSignal) -> None:
        """Interrupt the graph where it stands. The first signal decides, but a lost lease outranks all."""
        if isinstance(signal, LeaseLost) and self.writer.failure is None:
            self.writer.mark_lost()
        if not self._stopped.done():
            self._stopped.set_result(signal)

    def _used(self, usage: str) -> None:
        if self.writer.failure is None:
            self.writer.add_usage(usage)

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
        """Run the pipeline. Returns the outcome once it is durable, or None when the run was not ours to end.

        Whatever the code of the graph raises, returns or leaves in the state ends in an outcome.
        """
        attempt.open()
        is_factory = self._catalog.is_factory(attempt.run.graph_id)
        begin = self._begin_in_time if is_factory else self._begin
        stack = AsyncExitStack()
        try:
            return await self._run_and_finish(attempt, begin, stack)
        finally:
            await (_clean_up(stack) if is_factory else stack.aclose())

    async def _run_and_finish(self, attempt: Attempt, begin: Begin, stack: AsyncExitStack) -> Outcome | None:
        run = attempt.run
        progress = Progress()
        failure: BaseException | None
        try:
            with GraphCode():
                graph, config = await begin(attempt, stack)
            failure = await self._stream(attempt, graph, config, progress)
        except ESCAPING as error:
            graph, config, failure = None, None, contained(error)
        for tries_left in (3, 2, 1, 0):
            try:
                if tries_left > 1:
                    with GraphCode():
                        outcome = await self._conclude(attempt, graph, config, progress, failure)
                else:
                    outcome = self._reduced(attempt, failure)
                if outcome is None:
                    return None
                if tries_left:
                    attempt.settle()
                elif failure is not None and attempt.meter.has_counted:
                    log.warning("usage.not_written", error=kind_and_place(failure))
                await attempt.writer.finish(outcome, graph_id=run.graph_id, effects=effects_of(run))
            except LeaseLost:
                log.info("run.lost", fence=run.fence)
                return None
            except ESCAPING as error:
                # The end itself could not be written as it was: a rollback came first, or the last values cannot be
                # read, converted or stored. In each case there is another end to write. The last try leaves out what
                # the run has used, which may be what cannot be written.
                if not tries_left:
                    raise
                if not isinstance(error, RunSignal):
                    log.warning("run.outcome_failed", error=kind_and_place(error))
                attempt.writer.discard()
                progress.values = None
                failure = contained(error)
            else:
                return outcome
        return None

    def _reduced(self, attempt: Attempt, failure: BaseException | None) -> Outcome:
        """The end of a run whose end could not be written twice: nothing of what its code has made but the message."""
        if isinstance(failure, Cancelled) and failure.action == "rollback":
            return RolledBack()
        return bare_end(attempt.writer, failure or JournalFailed("The run's end could not be written."))

    async def _begin_in_time(
        self, attempt: Attempt, stack: AsyncExitStack
    ) -> tuple[Pregel[Any, Any, Any, Any], RunnableConfig]:
        """Begin, unless the run's time is over, or it was stopped STOP_TIMEOUT_SECONDS ago: a graph's factory may wait
        for something that never comes. In the same task, because what a factory opens has to be closed by the task that
        opened it. Raises the RunSignal then."""
        loop = asyncio.get_running_loop()
        limit, overdue = attempt.meter.time_limit(self._settings.run_timeout)
        scope = asyncio.timeout(max(0.0, limit - attempt.run.elapsed) + STOP_TIMEOUT_SECONDS)

        def give_up_soon(_: object) -> None:
            scope.reschedule(loop.time() + STOP_TIMEOUT_SECONDS)

        try:
            async with scope:
                attempt.stopped.add_done_callback(give_up_soon)
                try:
                    return await self._begin(attempt, stack)
                finally:
                    attempt.stopped.remove_done_callback(give_up_soon)
        except TimeoutError:
            if not scope.expired():
                raise
            raise attempt.stopped.result() if attempt.stopped.done() else overdue from None

    async def _begin(
        self, attempt: Attempt, stack: AsyncExitStack
    ) -> tuple[Pregel[Any, Any, Any, Any], RunnableConfig]:
        run = attempt.run
        durability = run.kwargs.get("durability")
        saver = self._saver(
            self._database,
            attempt.writer,
            wait=durability == "sync",
            hold=durability == "exit",
            fresh=run.fresh,
            own_answer=run.progress != NOTHING,
        )
        config = run_config(run)
        try:
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
        except STOPS as error:
            raise exit_of(error) from error
        return graph, config

    async def _stream(
        self, attempt: Attempt, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig, progress: Progress
    ) -> BaseException | None:
        """Run the graph until it ends or is stopped. Returns what ended it, None if it came to its own end."""
        limit, overdue = attempt.meter.time_limit(self._settings.run_timeout)
        remaining = limit - attempt.run.elapsed
        enter_run(self._current(attempt))
        task = asyncio.create_task(self._pump(attempt, graph, config, progress), name=f"run {attempt.run.run_id}")
        waiting: set[asyncio.Future[Any]] = {task, attempt.stopped}
        await asyncio.wait(waiting, timeout=max(0.0, remaining), return_when=asyncio.FIRST_COMPLETED)
        signal: RunSignal | None = None
        if attempt.stopped.done():
            signal = attempt.stopped.result()
        elif not task.done():
            signal = overdue
        writer = attempt.writer
        await _stop_task(task, attempt)
        attempt.meter.close()
        if attempt.writer is not writer:
            # The checkpointer belongs to the one left behind, and can do nothing more; the state still has to be read.
            graph.checkpointer = PooledSaver(self._database).with_allowlist(self._catalog.checkpoint_types)
        if task.done() and not task.cancelled():
            task.exception()  # Fetched, or asyncio would report it where the writer's failure says it all.
        if attempt.writer.failure is not None:
            return attempt.writer.failure
        if signal is not None and (isinstance(signal, Cancelled) or not _succeeded(task)):
            return signal
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if isinstance(failure, STOPS):
            return exit_of(failure)
        if failure is None and attempt.meter.has_shared_budget:
            return await self._overspent(attempt)
        return failure

    async def _overspent(self, attempt: Attempt) -> BudgetExceeded | None:
        """What ends a run whose code is done, but whose budget the runs that share it have used up meanwhile."""
        async with self._database.connection() as connection:
            attempt.meter.update_shared(await read_shared_usage(connection, attempt.run.run_id))
        return attempt.meter.exceeded

    async def _pump(
        self, attempt: Attempt, graph: Pregel[Any, Any, Any, Any], config: RunnableConfig, progress: Progress
    ) -> None:
        """The graph's stream, into the journal."""
        run, writer = attempt.run, attempt.writer
        kwargs = run.kwargs
        attempt.meter.attach()
        if run.progress == NOTHING:
            await refuse_late_resume(self._database, run.thread_id, run.run_id, kwargs)
        if run.attempt > 1:
            progress.state = await waits_at_breakpoint(
                graph, config, str(run.run_id), kwargs.get("interrupt_before"), kwargs.get("interrupt_after")
            )
            if progress.state is not None:
                progress.paused = True
                return
            if kwargs.get("strict_resume") or run.progress == COMMAND_WRITES:
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
                    writer.add_event(kind, public_json(kind, to_json(data)), place)
                if writer.is_full:
                    await writer.wait_for_space()
        finally:
            if isinstance(graph.checkpointer, JournalSaver):
                graph.checkpointer.release()
            if writer.failure is None:
                for place, kind, data in modes.finish():
                    writer.add_event(kind, public_json(kind, to_json(data)), place)
        if progress.seen_values and ("values" not in requested or not progress.told):
            # Whoever waits for the result finds it here.
            writer.add_event("output", to_json(progress.output))

    def _current(self, attempt: Attempt) -> CurrentRun:
        """The run as its own code finds it."""
        run = attempt.run
        return CurrentRun(
            run_id=run.run_id,
            thread_id=run.thread_id,
            fence=run.fence,
            kwargs=run.kwargs,
            database=self._database,
            catalog=self._catalog,
            signals=self.signals,
            loop=asyncio.get_running_loop(),
            stop=attempt.stop,
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
                    left = await left_behind(graph, config, progress, RunStatus.INTERRUPTED)
                    return replace(left, error=error)
                case RunTimeout():
                    error = describe(failure)
                    left = await left_behind(graph, config, progress, RunStatus.TIMEOUT)
                    attempt.writer.add_event("error", to_json(error))
                    return replace(left, error=error)
                case BudgetExceeded():
                    log.warning("run.over_budget", limit=str(failure))
                    return self._failed(attempt, failure, await left_behind(graph, config, progress))
                case JournalFailed():
                    return self._failed(attempt, failure, await left_behind(graph, config, progress))
                case _:
                    assert_never(failure)  # type: ignore[arg-type]
        if failure is None:
            if progress.values is not None and not progress.paused:
                return Ended(status=RunStatus.SUCCESS, thread_status="idle", values=to_json(progress.values))
            return await state_at_end(RunStatus.SUCCESS, graph, config, progress)
        if awaited := awaited_children(failure):
            return Waiting(awaited=awaited)
        strict = attempt.run.kwargs.get("strict_resume")
        if isinstance(failure, AnswerTooLate) or (strict and isinstance(failure, UnknownInterruptError)):
            # Raised before anything is written: what does wait for an answer goes on waiting.
            return self._failed(attempt, failure, Ended(status=RunStatus.ERROR, thread_status=None))
        if is_transient(failure):
            run = attempt.run
            if run.retries < self._settings.max_retries:
                pause = pause_before_retry(failure, run.retries, self._settings)
                trace_failure(attempt.trace, failure)
                kind = kind_and_place(failure)
                log.warning("run.retrying", error=kind, after=round(pause, 2), retry=run.retries + 1)
                return Released(after=pause)
            left = await left_behind(graph, config, progress)
            return self._failed(attempt, failure, left, dead_letter="retries_exhausted")
        # The worker said that it has the graph, but it cannot be opened any more.
        gone = graph is None and isinstance(failure, NotFound | ConfigError)
        left = await left_behind(graph, config, progress)
        return self._failed(attempt, failure, left, dead_letter="graph_gone" if gone else None)

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
        attempt.writer.add_event("error", to_json(error))
        return replace(
            left or Ended(status=RunStatus.ERROR, thread_status="error", interrupts=None),
            error=error,
            traceback=run_traceback(failure),
            dead_letter=dead_letter,
        )


def _succeeded(task: asyncio.Task[None]) -> bool:
    """Whether the graph came to its own end before a stop reached it."""
    return task.done() and not task.cancelled() and task.exception() is None


async def _clean_up(stack: AsyncExitStack) -> None:
    """Leave what a graph's factory has opened. What has become of the run is decided."""
    try:
        with GraphCode():
            async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
                await stack.aclose()
    except ESCAPING as error:
        log.warning("graph.cleanup_failed", error=kind_and_place(error))


async def _stop_task(task: asyncio.Task[None], attempt: Attempt) -> None:
    """Cancel user code and wait for it. Code that swallows the cancellation is asked again, then left behind with a
    writer that writes nothing more."""
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while not task.done() and time.monotonic() < deadline:
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)
    if not task.done():
        log.error("run.unstoppable", seconds=STOP_TIMEOUT_SECONDS)
        attempt.writer = await attempt.writer.supersede()
        # Whatever becomes of it, nobody is there any more to hear of it.
        task.add_done_callback(lambda left: None if left.cancelled() else left.exception())

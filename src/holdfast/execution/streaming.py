"""The stage `stream`: runs the graph and journals its events, until it ends or is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.engine.interrupts.accepting import refuse_late_resume
from holdfast.engine.threads import get_thread
from holdfast.engine.usage import read_shared_usage
from holdfast.errors import Cancelled, RunSignal
from holdfast.execution.attempt import Attempt, Execution
from holdfast.execution.checkpoints import JournalSaver, PooledSaver
from holdfast.execution.environment import Environment
from holdfast.execution.graph_stream import stream_graph
from holdfast.execution.messages import MessageModes
from holdfast.execution.private_fields import public_json
from holdfast.execution.protocol import CONTENT_BLOCKS, PROTOCOL_MODES, ProtocolModes
from holdfast.execution.starting_point import COMMAND_WRITES, NOTHING, waits_at_breakpoint
from holdfast.execution.stopping import STOP_SIGNALS, stop_task, succeeded
from holdfast.execution.transformers import Transformers
from holdfast.graphs.exits import exit_of
from holdfast.resources.checkpoints import highest_step
from holdfast.sdk.current_run import CurrentRun, enter_run
from holdfast.streams.serialize import to_json


async def stream(execution: Execution, environment: Environment) -> None:
    """Run the graph until it ends, is stopped, or the run's time is over. `execution.failure` says what ended it."""
    attempt = execution.attempt
    limit, overdue = attempt.meter.time_limit(environment.settings.run_timeout)
    enter_run(_current_run(attempt, environment))
    task = asyncio.create_task(_run_graph(execution, environment), name=f"run {attempt.run.run_id}")
    waiting: set[asyncio.Future[Any]] = {task, attempt.stopped}
    seconds_left = max(0.0, limit - attempt.run.elapsed)
    await asyncio.wait(waiting, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED)
    signal: RunSignal | None = None
    if attempt.stopped.done():
        signal = attempt.stopped.result()
    elif not task.done():
        signal = overdue
    stopped = await stop_task(task, attempt)
    for observer in attempt.observers:
        observer.graph_stopped()
    if not stopped:
        # The graph's checkpointer writes to the run writer that was left behind, and so neither writes nor reads any
        # more. The state still has to be read.
        graph, _ = execution.opened
        graph.checkpointer = PooledSaver(environment.database).with_allowlist(environment.catalog.checkpoint_types)
    execution.failure = _what_ended(task, attempt, signal)
    if execution.failure is None and attempt.meter.has_shared_budget:
        # Other runs may have used up the shared budget by now.
        async with environment.database.connection() as connection:
            attempt.meter.update_shared(await read_shared_usage(connection, attempt.run.run_id))
        execution.failure = attempt.meter.exceeded


def _what_ended(task: asyncio.Task[None], attempt: Attempt, signal: RunSignal | None) -> BaseException | None:
    """What ended the graph's task; None if it came to its own end. `signal`: why it was stopped, if it was."""
    if attempt.writer.failure is not None:
        return attempt.writer.failure
    if signal is not None and (isinstance(signal, Cancelled) or not succeeded(task)):
        return signal
    failure = asyncio.CancelledError() if task.cancelled() else task.exception()
    return exit_of(failure) if isinstance(failure, STOP_SIGNALS) else failure


async def _run_graph(execution: Execution, environment: Environment) -> None:
    """Decide where the graph starts, and run it. In a task of its own, which can be cancelled."""
    attempt, progress = execution.attempt, execution.progress
    run = attempt.run
    graph, config = execution.opened
    # Kept here: if this task is left behind, the attempt gets another writer, and this one refuses what still comes.
    writer = attempt.writer
    asked: frozenset[str] = frozenset()
    if run.progress == NOTHING:
        await refuse_late_resume(environment.database, run.thread_id, run.run_id, run.kwargs)
    if run.attempt > 1:
        before, after = run.kwargs.get("interrupt_before"), run.kwargs.get("interrupt_after")
        progress.state = await waits_at_breakpoint(graph, config, str(run.run_id), before, after)
        if progress.state is not None:
            progress.paused = True
            return
        if run.kwargs.get("strict_resume") or run.progress == COMMAND_WRITES:
            asked = await _interrupts_at_start(attempt, environment)
    requested = frozenset(run.kwargs.get("stream_mode") or ["values"])
    modes: MessageModes | ProtocolModes
    if run.kwargs.get("protocol"):
        requested = PROTOCOL_MODES
        modes = ProtocolModes(None if run.fresh else await highest_step(environment.database, run.thread_id))
        config = {**config, "configurable": {**config["configurable"], CONTENT_BLOCKS: True}}
    else:
        modes = MessageModes(requested)
    note: Callable[[str, str, Any], None] | None = progress.note
    if run.kwargs.get("protocol") and graph.stream_transformers:
        transformers = Transformers(graph.stream_transformers)
        items = stream_graph(graph, config, run, requested | transformers.modes, asked)
        # Progress is what the graph itself says, so it is noted before the transformers change it.
        items = transformers.transform(progress.watch(items))
        note = None
    else:
        items = stream_graph(graph, config, run, requested, asked)
    silent = True
    for observer in attempt.observers:
        observer.graph_starts()
    try:
        async for namespace, mode, chunk in items:
            if note is not None:
                note(namespace, mode, chunk)
            if silent:
                silent = False
                for observer in attempt.observers:
                    observer.first_event()
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
    if progress.seen_values and ("values" not in requested or not progress.output_was_sent):
        # A client that waits for the result reads it here.
        writer.add_event("output", to_json(progress.output))


def _current_run(attempt: Attempt, environment: Environment) -> CurrentRun:
    """The run as its own code finds it."""
    run = attempt.run
    return CurrentRun(
        run_id=run.run_id,
        thread_id=run.thread_id,
        fence=run.fence,
        kwargs=run.kwargs,
        database=environment.database,
        catalog=environment.catalog,
        signals=environment.signals,
        loop=asyncio.get_running_loop(),
        stop=attempt.stop,
    )


async def _interrupts_at_start(attempt: Attempt, environment: Environment) -> frozenset[str]:
    """The interrupts that waited before the run began. The thread's row still has them, because it changes only when a
    run ends."""
    async with environment.database.connection() as connection:
        thread = await get_thread(connection, attempt.run.thread_id)
    return frozenset(waiting["id"] for of_task in thread["interrupts"].values() for waiting in of_task)

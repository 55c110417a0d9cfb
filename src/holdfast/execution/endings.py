"""What a run leaves behind when it ends: the values of its thread, the questions that wait, and its error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import structlog
from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel

from holdfast.engine.interrupts.resume import resume_of
from holdfast.engine.outbox import has_webhook
from holdfast.engine.outcome import Ended
from holdfast.engine.states import EndedStatus, RunStatus
from holdfast.errors import RunSignal
from holdfast.execution.graph_stream import Claimed
from holdfast.execution.progress import Progress
from holdfast.execution.starting_point import waiting_interrupts
from holdfast.execution.transient import leaves
from holdfast.journal.entries import EndEffects
from holdfast.journal.run_writer import RunWriter
from holdfast.sdk.children import WaitsForChildren
from holdfast.streams.serialize import to_json
from holdfast.telemetry.exceptions import ESCAPING, clean, kind_and_place, message_of

log = structlog.get_logger(__name__)

LONGEST_CLASS_NAME_CHARACTERS = 200


async def state_at_end(
    status: EndedStatus,
    graph: Pregel[Any, Any, Any, Any] | None,
    config: RunnableConfig | None,
    progress: Progress,
) -> Ended:
    """An end in the middle of the graph, or possibly so: the thread's head tells what is left to do."""
    state = progress.state
    if state is None and graph is not None and config is not None:
        state = await graph.aget_state(at_head(config))
    values = progress.values
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if key != "__interrupt__"}
    interrupts: dict[str, Any] | None
    if state is None:
        # The graph could not be opened.
        thread_status, interrupts = "idle", None
    else:
        thread_status = "interrupted" if state.next else "idle"
        interrupts = {task.id: list(task.interrupts) for task in state.tasks if task.interrupts}
        if interrupts and graph is not None and config is not None and status != RunStatus.SUCCESS:
            # A graph inside may have used its answer and failed after that. Only its own state tells.
            waiting = waiting_interrupts(await graph.aget_state(at_head(config), subgraphs=True))
            interrupts = {
                task_id: kept
                for task_id, asked in interrupts.items()
                if (kept := [interrupt for interrupt in asked if interrupt.id in waiting])
            }
        if values is None and state.created_at is not None:
            values = state.values
    return Ended(
        status=status,
        thread_status=thread_status,
        values=None if values is None else to_json(values),
        interrupts=None if interrupts is None else orjson.loads(to_json(interrupts)),
    )


async def left_behind(
    graph: Pregel[Any, Any, Any, Any] | None,
    config: RunnableConfig | None,
    progress: Progress,
    status: EndedStatus = RunStatus.ERROR,
) -> Ended:
    """What a run that was stopped or failed leaves behind: the values it came to, and the questions that still
    wait. Neither when that cannot be told: what the graph failed at may be its state, and LangGraph cannot read a
    state in which finished nodes left writes that contradict each other."""
    thread_status = "error" if status == RunStatus.ERROR else "interrupted"
    try:
        left = await state_at_end(status, graph, config, progress)
    except RunSignal:
        raise
    except ESCAPING as error:
        log.warning("state.unreadable", error=kind_and_place(error))
        return Ended(status=status, thread_status=thread_status, interrupts=None)
    return replace(left, thread_status="error") if status == RunStatus.ERROR else left


def at_head(config: RunnableConfig) -> RunnableConfig:
    """The config without the checkpoint that a run branched off from: it has written others since."""
    places = ("checkpoint_id", "checkpoint_map", "checkpoint_ns")
    configurable = {key: value for key, value in config["configurable"].items() if key not in places}
    return {**config, "configurable": configurable}


def describe(error: BaseException) -> dict[str, str]:
    """An error as clients see it. A metaclass of graph code can give a class any name."""
    name = clean(str(type(error).__name__)[:LONGEST_CLASS_NAME_CHARACTERS])
    return {"error": name, "message": message_of(error)}


def awaited_children(failure: BaseException) -> dict[str, bool]:
    """The children that the code waits for, if that is all that ended it. In an asyncio.TaskGroup several tasks may
    wait, and what they raise comes as a group."""
    waits = leaves(failure)
    if not all(isinstance(wait, WaitsForChildren) for wait in waits):
        return {}
    awaited: dict[str, bool] = {}
    for wait in waits:
        assert isinstance(wait, WaitsForChildren)
        awaited.update({key: enough or awaited.get(key, False) for key, enough in wait.awaited.items()})
    return awaited


def bare_end(writer: RunWriter, failure: BaseException) -> Ended:
    """The end with nothing of what the run's code has made but the message."""
    error = describe(failure)
    writer.add_event("error", to_json(error))
    return Ended(status=RunStatus.ERROR, thread_status="error", interrupts=None, error=error)


def effects_of(run: Claimed) -> EndEffects:
    answer = resume_of(run.kwargs)
    return EndEffects(
        webhook=has_webhook(run.kwargs),
        parent=run.parent_run_id,
        touches_interrupts=run.asking or answer is not None,
        branches=answer is not None and answer.branches,
    )

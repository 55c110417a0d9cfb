"""What a run leaves in its thread when it ends: the values, and the interrupts that wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import structlog
from langchain_core.runnables import RunnableConfig

from holdfast.engine.outcome import Ended
from holdfast.engine.states import EndedStatus, RunStatus
from holdfast.errors import RunSignal
from holdfast.execution.attempt import Execution
from holdfast.execution.starting_point import waiting_interrupts
from holdfast.streams.serialize import to_json
from holdfast.telemetry.exceptions import GRAPH_CODE_EXCEPTIONS, type_and_place

log = structlog.get_logger(__name__)


async def state_at_end(execution: Execution, status: EndedStatus) -> Ended:
    """An end that may be in the middle of the graph: the thread's head says which nodes would be next."""
    graph, config, progress = execution.graph, execution.config, execution.progress
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
            # A subgraph may have used its answer and failed after that. Only the subgraph's own state shows it.
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


async def left_behind(execution: Execution, status: EndedStatus = RunStatus.ERROR) -> Ended:
    """What a run that was stopped or failed leaves: the last values, and the interrupts that still wait.

    Neither, if the state cannot be read: it may be what the graph failed at. LangGraph cannot read a state in which
    finished nodes left writes that contradict each other."""
    thread_status = "error" if status == RunStatus.ERROR else "interrupted"
    try:
        left = await state_at_end(execution, status)
    except RunSignal:
        raise
    except GRAPH_CODE_EXCEPTIONS as error:
        log.warning("state.unreadable", error=type_and_place(error))
        return Ended(status=status, thread_status=thread_status, interrupts=None)
    return replace(left, thread_status="error") if status == RunStatus.ERROR else left


def at_head(config: RunnableConfig) -> RunnableConfig:
    """The config without the checkpoint that a run branched off from: the run has written others since."""
    places = ("checkpoint_id", "checkpoint_map", "checkpoint_ns")
    configurable = {key: value for key, value in config["configurable"].items() if key not in places}
    return {**config, "configurable": configurable}

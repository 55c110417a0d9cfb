"""Where an attempt starts: from the run's input, or from the last thing that an earlier attempt made durable.

The journal records in the run's row how far the run has come (`progress`), in the same transaction as the write itself.
Comparing run ids with the head checkpoint would be wrong in two cases: a Command stores its writes on a checkpoint of
an earlier run, and a fork starts from a checkpoint that is not the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.types import RESUME
from langgraph.pregel import Pregel
from langgraph.types import All, Command, Send, StateSnapshot

from holdfast.engine.interrupts.resume import names_interrupts

# What is durable of a run: nothing, the writes of its Command, or a checkpoint.
NOTHING, COMMAND_WRITES, CHECKPOINT = 0, 1, 2

# The id of the task under which LangGraph stores a Command's writes.
NULL_TASK_ID = "00000000-0000-0000-0000-000000000000"

# A key of the config that makes LangGraph refuse an answer to an interrupt that does not wait.
STRICT_RESUME = "__pregel_strict_resume"


def build_command(command: dict[str, Any]) -> Command[Any]:
    """LangGraph's Command from the form that clients send. `goto` takes node names and {node, input} objects."""
    goto = command.get("goto")
    targets = goto if isinstance(goto, list) else [] if goto is None else [goto]
    update = command.get("update")
    if isinstance(update, list):
        update = [(key, value) for key, value in update]
    return Command(
        resume=command.get("resume"),
        update=update,
        goto=[target if isinstance(target, str) else Send(target["node"], target.get("input")) for target in targets],
    )


async def starting_input(
    graph: Pregel[Any, Any, Any, Any],
    config: RunnableConfig,
    kwargs: dict[str, Any],
    progress: int,
    attempt: int,
    asked: frozenset[str],
) -> tuple[Any, bool]:
    """The graph's input for this attempt, and whether LangGraph must refuse answers to interrupts that do not wait. An
    input of None means: continue from the thread's head. `asked`: the interrupts that waited before the first attempt.
    """
    command = kwargs.get("command")
    if progress == CHECKPOINT:
        return None, False
    if command is None and kwargs.get("answers"):
        # A client may send answers to interrupts of several graphs. Take those for this one.
        waiting = waiting_interrupts(await graph.aget_state(config, subgraphs=True))
        for_this = {key: answer for key, answer in kwargs["answers"].items() if key in waiting}
        command = {"resume": for_this} if for_this else None
    if command is None:
        return kwargs.get("input") if progress == NOTHING else None, False
    resume = command.get("resume")
    by_id = names_interrupts(resume)
    strict = bool(kwargs.get("strict_resume")) and progress == NOTHING
    if by_id and attempt > 1:
        # For LangGraph, an interrupt that an earlier attempt has answered does not wait any more. Only an answer to an
        # interrupt that never waited is certainly wrong.
        strict = strict and not (asked | await _asked_interrupts(graph, config)).issuperset(resume)
        if not strict:
            waiting = waiting_interrupts(await graph.aget_state(config, subgraphs=True))
            resume = {key: answer for key, answer in resume.items() if key in waiting}
    if progress == NOTHING:
        return build_command({**command, "resume": resume}), strict
    if resume is None:
        return None, False
    # The Command is stored, except for answers by interrupt id. An empty answer tells LangGraph that this is a resume.
    # With None, it would treat a run that names its checkpoint as a fork, and drop the stored answers.
    return Command(resume=resume if by_id else await _unstored_answer(graph, config, resume, asked)), False


async def _unstored_answer(
    graph: Pregel[Any, Any, Any, Any], config: RunnableConfig, answer: Any, asked: frozenset[str]
) -> dict[str, Any]:
    """An answer that was given as a plain value, by interrupt id, if its interrupt still waits and the answer is not
    stored. With durability "exit" a task that failed has used it up; and that of a dead letter was deleted when the run
    ended."""
    saver = graph.checkpointer
    assert isinstance(saver, BaseCheckpointSaver)
    saved = await saver.aget_tuple(config)
    writes = [] if saved is None else saved.pending_writes or []
    if any(task_id == NULL_TASK_ID and channel == RESUME for task_id, channel, _ in writes):
        return {}
    waiting = waiting_interrupts(await graph.aget_state(config, subgraphs=True))
    return dict.fromkeys(waiting & asked, answer)


async def _asked_interrupts(graph: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> set[str]:
    """The interrupts of the checkpoint that a run starts from, answered or not."""
    saver = graph.checkpointer
    assert isinstance(saver, BaseCheckpointSaver)
    saved = await saver.aget_tuple(config)
    writes = [] if saved is None else saved.pending_writes or []
    return {interrupt.id for _, channel, asked in writes if channel == "__interrupt__" for interrupt in asked}


def waiting_interrupts(state: StateSnapshot) -> set[str]:
    """The ids of the interrupts that still wait, by the states of the innermost subgraphs. The state of an outer graph
    may name an interrupt that its subgraph has passed. Answering that again would answer the next interrupt."""
    waiting: set[str] = set()
    for task in state.tasks:
        if isinstance(task.state, StateSnapshot) and task.state.tasks:
            waiting |= waiting_interrupts(task.state)
        else:
            waiting |= {interrupt.id for interrupt in task.interrupts}
    return waiting


def has_breakpoints(graph: Pregel[Any, Any, Any, Any]) -> bool:
    """Whether the graph or a subgraph was compiled with static breakpoints."""
    return bool(graph.interrupt_before_nodes or graph.interrupt_after_nodes or _nested_breakpoints(graph))


def _nested_breakpoints(
    graph: Pregel[Any, Any, Any, Any],
) -> dict[str, tuple[All | Sequence[str], All | Sequence[str]]]:
    """The breakpoints of the subgraphs, before and after nodes, by the path of the subgraph."""
    return {
        path: (child.interrupt_before_nodes, child.interrupt_after_nodes)
        for path, child in graph.get_subgraphs(recurse=True)
        if isinstance(child, Pregel) and (child.interrupt_before_nodes or child.interrupt_after_nodes)
    }


async def waits_at_breakpoint(
    graph: Pregel[Any, Any, Any, Any],
    config: RunnableConfig,
    run_id: str,
    before: All | Sequence[str] | None,
    after: All | Sequence[str] | None,
) -> StateSnapshot | None:
    """The thread's state, if an earlier attempt of this run reached a static breakpoint and was lost before its end was
    written. Continuing from there would pass the breakpoint, because LangGraph takes a resume as permission."""
    before, after = before or graph.interrupt_before_nodes, after or graph.interrupt_after_nodes
    nested = _nested_breakpoints(graph)
    if not before and not after and not nested:
        return None
    saver = graph.checkpointer
    assert isinstance(saver, BaseCheckpointSaver)
    state = await graph.aget_state(config, subgraphs=bool(nested))
    levels = [("", state)]
    while levels:
        path, level = levels.pop()
        stops_before, stops_after = nested.get(path, ((), ())) if path else (before, after)
        if await _stopped(saver, level, run_id, stops_before, stops_after):
            return state
        levels += [
            (f"{path}|{task.name}" if path else task.name, task.state)
            for task in level.tasks
            if isinstance(task.state, StateSnapshot)
        ]
    return None


async def _stopped(
    saver: BaseCheckpointSaver[Any],
    state: StateSnapshot,
    run_id: str,
    before: All | Sequence[str],
    after: All | Sequence[str],
) -> bool:
    """Whether this run wrote the state of this graph, and the graph is at a breakpoint."""
    metadata = state.metadata or {}
    if not state.next or metadata.get("run_id") != run_id or metadata.get("source") == "fork":
        return False
    if _stops(before, set(state.next)):
        return True
    if not after or metadata.get("source") != "loop":
        return False
    head = await saver.aget_tuple(state.config)
    # With durability "exit" the parent is the checkpoint where the run began, or missing. The result is the same: if an
    # earlier step had executed such a node, the run would have stopped there.
    parent = None if state.parent_config is None else await saver.aget_tuple(state.parent_config)
    seen = {} if head is None else head.checkpoint["versions_seen"]
    earlier = {} if parent is None else parent.checkpoint["versions_seen"]
    return _stops(after, {node for node in seen if seen[node] != earlier.get(node) and not node.startswith("__")})


def _stops(at: All | Sequence[str], nodes: set[str]) -> bool:
    if at == "*":
        return any(not node.startswith("__") for node in nodes)
    return bool(nodes & set(at))

"""What an attempt starts from: the run's input, or the last thing an earlier attempt made durable.

The journal records on the run's row, in the same transaction as the write itself, how far the run has come
(`progress`). That is exact where comparing run ids with the head checkpoint is not: a Command leaves writes on a
checkpoint of an earlier run, and a fork starts from one that is not the head.
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

NOTHING, COMMAND_WRITES, CHECKPOINT = 0, 1, 2

# The task that a Command's writes are stored under.
NULL_TASK_ID = "00000000-0000-0000-0000-000000000000"

# LangGraph's switch, in the config, for refusing an answer to a question that does not wait.
STRICT_RESUME = "__pregel_strict_resume"


def build_command(command: dict[str, Any]) -> Command[Any]:
    """A Command as clients send it. `goto` takes node names and {node, input} objects."""
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
    """The graph's input for this attempt, and whether it must answer nothing that does not wait. None as the input
    means: go on from the thread's head. `asked` is what waited for an answer before the first attempt."""
    command = kwargs.get("command")
    if progress == CHECKPOINT:
        return None, False
    if command is None and kwargs.get("answers"):
        # They may be for this graph, or for another that its caller has asked.
        waiting = waiting_interrupts(await graph.aget_state(config, subgraphs=True))
        for_this = {key: answer for key, answer in kwargs["answers"].items() if key in waiting}
        command = {"resume": for_this} if for_this else None
    if command is None:
        return kwargs.get("input") if progress == NOTHING else None, False
    resume = command.get("resume")
    by_id = names_interrupts(resume)
    strict = bool(kwargs.get("strict_resume")) and progress == NOTHING
    if by_id and attempt > 1:
        # To LangGraph, what an earlier attempt has answered does not wait any more. Only what was never asked is
        # certain to be wrong.
        strict = strict and not (asked | await _asked_interrupts(graph, config)).issuperset(resume)
        if not strict:
            waiting = waiting_interrupts(await graph.aget_state(config, subgraphs=True))
            resume = {key: answer for key, answer in resume.items() if key in waiting}
    if progress == NOTHING:
        return build_command({**command, "resume": resume}), strict
    if resume is None:
        return None, False
    # The Command is stored, but for answers by interrupt id. An empty answer says that this is a resume: with None,
    # a run that names its checkpoint would be taken for a fork, and forget the answers it has.
    return Command(resume=resume if by_id else await _unstored_answer(graph, config, resume, asked)), False


async def _unstored_answer(
    graph: Pregel[Any, Any, Any, Any], config: RunnableConfig, answer: Any, asked: frozenset[str]
) -> dict[str, Any]:
    """An answer that was given as a value, by interrupt id, if its question still waits and the answer is not stored:
    with durability "exit" a task that failed has used it up, and a dead letter's is deleted when the run ends."""
    saver = graph.checkpointer
    assert isinstance(saver, BaseCheckpointSaver)
    saved = await saver.aget_tuple(config)
    writes = [] if saved is None else saved.pending_writes or []
    if any(task_id == NULL_TASK_ID and channel == RESUME for task_id, channel, _ in writes):
        return {}
    waiting = waiting_interrupts(await graph.aget_state(config, subgraphs=True))
    return dict.fromkeys(waiting & asked, answer)


async def _asked_interrupts(graph: Pregel[Any, Any, Any, Any], config: RunnableConfig) -> set[str]:
    """The last questions of the checkpoint that a run starts from, answered or not."""
    saver = graph.checkpointer
    assert isinstance(saver, BaseCheckpointSaver)
    saved = await saver.aget_tuple(config)
    writes = [] if saved is None else saved.pending_writes or []
    return {interrupt.id for _, channel, asked in writes if channel == "__interrupt__" for interrupt in asked}


def waiting_interrupts(state: StateSnapshot) -> set[str]:
    """The questions that still wait, as the innermost graphs know them. A node that took an answer, and asked
    something else before the crash, would take the same answer again for the next question."""
    waiting: set[str] = set()
    for task in state.tasks:
        if isinstance(task.state, StateSnapshot) and task.state.tasks:
            waiting |= waiting_interrupts(task.state)
        else:
            waiting |= {interrupt.id for interrupt in task.interrupts}
    return waiting


def has_breakpoints(graph: Pregel[Any, Any, Any, Any]) -> bool:
    """Whether the graph, or a graph inside it, was compiled with static breakpoints."""
    return bool(graph.interrupt_before_nodes or graph.interrupt_after_nodes or _nested_breakpoints(graph))


def _nested_breakpoints(
    graph: Pregel[Any, Any, Any, Any],
) -> dict[str, tuple[All | Sequence[str], All | Sequence[str]]]:
    """Where the graphs inside stop, before and after, by their path."""
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
    """The thread's state, if an earlier attempt of this run came to a static breakpoint and was lost before it could
    say so. Going on from there would walk through the breakpoint: LangGraph takes a resume for the consent."""
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
    """Whether this run brought one graph to the place it is in, and that place is a breakpoint."""
    metadata = state.metadata or {}
    if not state.next or metadata.get("run_id") != run_id or metadata.get("source") == "fork":
        return False
    if _stops(before, set(state.next)):
        return True
    if not after or metadata.get("source") != "loop":
        return False
    head = await saver.aget_tuple(state.config)
    # With durability "exit" the parent is where the run began, or missing. That does as well: had an earlier step
    # executed such a node, the run would have stopped there.
    parent = None if state.parent_config is None else await saver.aget_tuple(state.parent_config)
    seen = {} if head is None else head.checkpoint["versions_seen"]
    earlier = {} if parent is None else parent.checkpoint["versions_seen"]
    return _stops(after, {node for node in seen if seen[node] != earlier.get(node) and not node.startswith("__")})


def _stops(at: All | Sequence[str], nodes: set[str]) -> bool:
    if at == "*":
        return any(not node.startswith("__") for node in nodes)
    return bool(nodes & set(at))

"""What an attempt starts from: the run's input, or the last thing an earlier attempt made durable.

The journal records on the run's row, in the same transaction as the write itself, how far the run has come
(`progress`). That is exact where comparing run ids with the head checkpoint is not: a Command leaves writes on a
checkpoint of an earlier run, and a fork starts from one that is not the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.pregel import Pregel
from langgraph.types import All, Command, Send, StateSnapshot

NOTHING, COMMAND_WRITES, CHECKPOINT = 0, 1, 2


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


def starting_input(kwargs: dict[str, Any], progress: int) -> Any:
    """The graph's input for this attempt. None means: go on from the thread's head."""
    command = kwargs.get("command")
    if progress == NOTHING:
        return kwargs.get("input") if command is None else build_command(command)
    if progress == COMMAND_WRITES and command is not None and _is_resume_map(command.get("resume")):
        # Answers by interrupt id are not stored with the Command's other writes; they have to be given again, alone.
        return Command(resume=command["resume"])
    return None


def _is_resume_map(resume: Any) -> bool:
    return isinstance(resume, dict) and bool(resume) and all(isinstance(key, str) and len(key) == 32 for key in resume)


async def waits_at_breakpoint(
    graph: Pregel[Any, Any, Any, Any],
    config: RunnableConfig,
    run_id: str,
    before: All | list[str] | None,
    after: All | list[str] | None,
) -> StateSnapshot | None:
    """The thread's state, if an earlier attempt of this run came to a static breakpoint and was lost before it could
    say so. Going on from there would walk through the breakpoint: LangGraph takes a resume for the consent."""
    stops_before: All | Sequence[str] = before or graph.interrupt_before_nodes
    stops_after: All | Sequence[str] = after or graph.interrupt_after_nodes
    if not stops_before and not stops_after:
        return None
    state = await graph.aget_state(config)
    metadata = state.metadata or {}
    if not state.next or metadata.get("run_id") != run_id or metadata.get("source") == "fork":
        return None
    if _stops(stops_before, set(state.next)):
        return state
    if stops_after and metadata.get("source") == "loop" and state.parent_config is not None:
        saver = graph.checkpointer
        assert saver is not None
        assert not isinstance(saver, bool)
        head = await saver.aget_tuple(state.config)
        parent = await saver.aget_tuple(state.parent_config)
        if head is not None and parent is not None:
            seen, earlier = head.checkpoint["versions_seen"], parent.checkpoint["versions_seen"]
            executed = {node for node in seen if seen[node] != earlier.get(node) and not node.startswith("__")}
            if _stops(stops_after, executed):
                return state
    return None


def _stops(at: All | Sequence[str], nodes: set[str]) -> bool:
    if at == "*":
        return any(not node.startswith("__") for node in nodes)
    return bool(nodes & set(at))

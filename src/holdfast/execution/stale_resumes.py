"""Leaves out answers that are stored with a checkpoint and belong to a run that has failed.

Such an answer must have no effect: its interrupt waits, and the next answer is accepted. This version stores no answer
of a task that fails, and deletes what else a failed run has stored
(`engine/interrupts/rows.py`). Earlier versions did neither, and during a rolling update their workers still write.
So a run filters such answers when it reads its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langgraph import types
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT, RESUME

from holdfast.db.connect import Database
from holdfast.execution.starting_point import NULL_TASK_ID
from holdfast.resources.checkpoints import stale_answers

PULL = "~__pregel_pull, "
# LangGraph's id of an interrupt, made of its task's namespace and the number of answers that the task has.
interrupt_id: Callable[[str, int], str] | None = getattr(types, "_interrupt_id", None)


async def without_stale_answers(database: Database, found: CheckpointTuple, *, own_answer: bool) -> CheckpointTuple:
    """The checkpoint without stale answers. `own_answer`: this run may have stored an answer itself."""
    writes = found.pending_writes or []
    if not any(channel == RESUME for _, channel, _ in writes):
        return found
    if not own_answer:
        writes = [write for write in writes if write[:2] != (NULL_TASK_ID, RESUME)]
    channels: dict[str, set[str]] = {}
    for task_id, channel, _ in writes:
        channels.setdefault(task_id, set()).add(channel)
    failed = [task_id for task_id, used in channels.items() if used >= {ERROR, INTERRUPT, RESUME}]
    if failed:
        place = found.config["configurable"]
        for task_id, path in (await stale_answers(database, place, failed)).items():
            writes = _shorten(writes, task_id, place["checkpoint_ns"], path)
    return found._replace(pending_writes=writes)


def _shorten(
    writes: Sequence[tuple[str, str, Any]], task_id: str, namespace: str, path: str
) -> list[tuple[str, str, Any]]:
    """Keep the answers that the task had when it reached the interrupt at which it waits now."""
    of_task = {channel: value for task, channel, value in writes if task == task_id}
    answers = of_task[RESUME] if isinstance(of_task[RESUME], list) else [of_task[RESUME]]
    asked = {interrupt.id for interrupt in of_task[INTERRUPT]}
    name = path.removeprefix(PULL)
    inside = f"{namespace}|{name}:{task_id}" if namespace else f"{name}:{task_id}"
    counts = [] if interrupt_id is None else [n for n in range(len(answers)) if interrupt_id(inside, n) in asked]
    # If the id does not say how many, drop the last answer, which the failed run has added.
    kept = answers[: counts[-1] if counts else -1]
    others = [write for write in writes if write[:2] != (task_id, RESUME)]
    return [*others, (task_id, RESUME, kept)] if kept else others

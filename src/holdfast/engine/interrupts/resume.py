"""Which interrupts a run resumes, read from its kwargs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.db.stored_json import as_object

INTERRUPT_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Resume:
    """The resume of a run.

    `by_id` has a value for each interrupt id. If it is None, `value` is for every interrupt that waits. A `lenient`
    resume takes those of its interrupts that still wait and ignores the others. `checkpoint_id`: the run starts from
    this checkpoint, where interrupts that have been resumed since still wait.
    """

    by_id: Mapping[str, Any] | None
    value: Any = None
    lenient: bool = False
    checkpoint_id: str | None = None

    @property
    def branches(self) -> bool:
        return self.checkpoint_id is not None

    def to(self, interrupt_id: str) -> Any:
        return self.value if self.by_id is None else self.by_id[interrupt_id]


def resume_of(kwargs: Mapping[str, Any]) -> Resume | None:
    """The resume in a run's kwargs; None if it has none."""
    command = kwargs.get("command")
    if command is None and (answers := as_object(kwargs.get("answers"))):
        # A call of this graph by a parent graph. The call is repeated when the parent crashes.
        return Resume(dict(answers), lenient=True)
    resume = as_object(command).get("resume")
    if resume is None or resume == {}:
        return None
    named = as_object(as_object(kwargs.get("config")).get("configurable")).get("checkpoint_id")
    checkpoint_id = str(named) if named else None
    if names_interrupts(resume):
        return Resume(resume, checkpoint_id=checkpoint_id)
    return Resume(None, resume, checkpoint_id=checkpoint_id)


def names_interrupts(resume: Any) -> bool:
    """Whether the keys of `resume` are interrupt ids. LangGraph's rule: if one key is not, `resume` is a single value
    for every interrupt that waits."""
    return (
        isinstance(resume, dict)
        and bool(resume)
        and all(isinstance(key, str) and INTERRUPT_ID.fullmatch(key) for key in resume)
    )

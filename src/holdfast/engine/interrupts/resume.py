"""What a run answers, told from its kwargs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.db.stored_json import as_object

INTERRUPT_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run answers. `by_id` None: `value` is for all that waits. `lenient`: takes what waits of it, and minds
    nothing else. `checkpoint_id`: it starts from this checkpoint, where what has been answered since still waits."""

    by_id: Mapping[str, Any] | None
    value: Any = None
    lenient: bool = False
    checkpoint_id: str | None = None

    @property
    def branches(self) -> bool:
        return self.checkpoint_id is not None

    def to(self, interrupt_id: str) -> Any:
        return self.value if self.by_id is None else self.by_id[interrupt_id]


def answer_of(kwargs: Mapping[str, Any]) -> Answer | None:
    """What a run with these kwargs answers, if it does."""
    command = kwargs.get("command")
    if command is None and (answers := as_object(kwargs.get("answers"))):
        # A graph's calls of another graph, which are repeated when it crashes.
        return Answer(dict(answers), lenient=True)
    resume = as_object(command).get("resume")
    if resume is None or resume == {}:
        return None
    named = as_object(as_object(kwargs.get("config")).get("configurable")).get("checkpoint_id")
    checkpoint_id = str(named) if named else None
    if names_interrupts(resume):
        return Answer(resume, checkpoint_id=checkpoint_id)
    return Answer(None, resume, checkpoint_id=checkpoint_id)


def names_interrupts(resume: Any) -> bool:
    """Whether these are answers by interrupt id. LangGraph has the same rule: an object of which one key is no
    interrupt id is a value, for whatever waits."""
    return (
        isinstance(resume, dict)
        and bool(resume)
        and all(isinstance(key, str) and INTERRUPT_ID.fullmatch(key) for key in resume)
    )

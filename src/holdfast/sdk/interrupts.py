"""`holdfast.ask`: stop at an interrupt and return the answer.

It is LangGraph's `interrupt()` with a value that describes the form of an answer and what happens without one. A plain
`interrupt({...})` with the same keys has the same effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any

from langgraph.types import interrupt

from holdfast.engine.interrupts.terms import check_resume, problem_with_fields, terms_of
from holdfast.errors import InvalidRequest


class _Missing(Enum):
    """Marks a missing `default`, because None is a valid one."""

    MISSING = "missing"


MISSING = _Missing.MISSING


def ask(
    question: Any,
    *,
    fields: Sequence[Mapping[str, Any]] | None = None,
    schema: Mapping[str, Any] | None = None,
    deadline: float | timedelta | datetime | None = None,
    default: Any = MISSING,
    escalate: bool | Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Interrupt the run until it is resumed with an answer, and return the answer. Meanwhile the run has ended and uses
    no worker. When it is resumed the node runs again from its start, as with `interrupt()`.

    - `question`: any JSON. The fields in `more` are shown with it.
    - `fields`: a form. Each field is a dict with a `name`, and optionally a `type` (text by default), `label`,
      `options` and `required` (True by default). The answer is a dict with these names. Or `schema`: a JSON schema of
      the answer. An answer that does not match is refused when it is sent.
    - `deadline`: seconds, a timedelta or a datetime. After it `default` is the answer, or the interrupt is escalated:
      `escalate=True` marks it in the inbox, and `{"to": name, "webhook": URL}` also calls the URL. With a second
      deadline in it, `{"deadline": seconds}`, the `default` is the answer after that.

    Raises ValueError for arguments that contradict each other, before the run stops.
    """
    value: dict[str, Any] = {**more, "question": question}
    if fields is not None and schema is not None:
        raise ValueError("ask: give fields or a schema, not both")
    if fields is not None:
        value["fields"] = [dict(field) for field in fields]
        if problem := problem_with_fields(value["fields"]):
            raise ValueError(f"ask: {problem}")
    if schema is not None:
        value["schema"] = dict(schema)
    if deadline is not None:
        value["deadline"] = _deadline(deadline)
        if terms_of(value).deadline is None:
            raise ValueError("ask: the deadline must be more than zero seconds away, and less than ten years")
    if default is not MISSING:
        value["default"] = default
    if escalate:
        value["escalate"] = escalate if escalate is True else dict(escalate)
    _check(value)
    return interrupt(value)


def _deadline(given: float | timedelta | datetime) -> float | str:
    if isinstance(given, datetime):
        return (given if given.tzinfo is not None else given.astimezone()).astimezone(UTC).isoformat()
    return given.total_seconds() if isinstance(given, timedelta) else given


def _check(value: dict[str, Any]) -> None:
    escalation = value.get("escalate")
    if "deadline" not in value:
        if "default" in value or escalation:
            raise ValueError("ask: default and escalate are for a deadline, and there is none")
        return
    if "default" not in value and not escalation:
        raise ValueError("ask: with a deadline, give a default, escalate, or both")
    if isinstance(escalation, dict):
        unknown = set(escalation) - {"to", "webhook", "deadline"}
        if unknown:
            raise ValueError(f"ask: escalate takes to, webhook and deadline, not {', '.join(sorted(unknown))}")
        known = terms_of(value).escalation or {}
        if wrong := [key for key in escalation if key not in known]:
            raise ValueError(f"ask: escalate[{wrong[0]!r}] is not what it should be")
    has_further = isinstance(escalation, dict) and "deadline" in escalation
    if escalation and ("default" in value) != has_further:
        raise ValueError(
            "ask: when escalating, a default needs a second deadline, in escalate, and the other way round"
        )
    form = terms_of(value).form
    if "default" in value and form is not None:
        try:
            check_resume(form, value["default"])
        except InvalidRequest as problem:
            raise ValueError(f"ask: the default is no answer to the question: {problem}") from None

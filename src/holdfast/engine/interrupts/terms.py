"""What an interrupt demands of its resume: a form of fields or a JSON schema, a deadline, a default, an escalation.

All of it is plain JSON in the interrupt's value, so `interrupt({...})` can do what `holdfast.ask` does. If a value uses
these keys for something else, the interrupt has no form, and no resume is refused because of a misunderstanding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast.errors import InvalidRequest

# The JSON type of each type of field. None: any value.
FIELD_TYPES: dict[str, str | None] = {
    "text": "string",
    "string": "string",
    "textarea": "string",
    "date": "string",
    "number": "number",
    "integer": "integer",
    "boolean": "boolean",
    "select": None,
    "multiselect": "array",
    "object": "object",
    "array": "array",
    "any": None,
}
CHOICES = ("select", "multiselect")
# A deadline further away is ignored.
MAX_DEADLINE_SECONDS = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of one interrupt. `default` has one item, or none."""

    form: dict[str, Any] | None = None
    deadline: float | datetime | None = None
    default: Sequence[Any] = ()
    escalation: dict[str, Any] | None = None


def terms_of(value: Any, response_schema: Any = None) -> Terms:
    """The terms in an interrupt's value. `response_schema` is the schema that LangGraph itself has for the resume."""
    schema = response_schema if isinstance(response_schema, dict) else None
    if not isinstance(value, dict):
        return Terms(form=None if schema is None else {"schema": schema})
    deadline = _deadline(value.get("deadline"))
    form: dict[str, Any] | None = None
    if problem_with_fields(value.get("fields")) is None:
        form = {"fields": value["fields"]}
    elif isinstance(value.get("schema"), dict):
        form = {"schema": value["schema"]}
    elif schema is not None:
        form = {"schema": schema}
    if deadline is None:
        return Terms(form=form)
    return Terms(
        form=form,
        deadline=deadline,
        default=[value["default"]] if "default" in value else [],
        escalation=_escalation(value.get("escalate")),
    )


def problem_with_fields(fields: Any) -> str | None:
    """What is wrong with the fields of a form; None if nothing is."""
    if not isinstance(fields, list) or not fields:
        return "fields must be a list of at least one field."
    names: set[str] = set()
    for field in fields:
        if not isinstance(field, dict) or not isinstance(field.get("name"), str) or not field["name"]:
            return "every field must be a dict with a name."
        name, kind, options = field["name"], field.get("type", "text"), field.get("options")
        if name in names:
            return f"there are two fields named {name!r}."
        names.add(name)
        if not isinstance(kind, str) or kind not in FIELD_TYPES:
            return f"the type of field {name!r} must be one of {', '.join(FIELD_TYPES)}, not {kind!r}."
        if options is not None and (not isinstance(options, list) or not options):
            return f"the options of field {name!r} must be a list of at least one."
        if kind in CHOICES and options is None:
            return f"field {name!r} is a {kind}, so it needs options."
        if not isinstance(field.get("required", True), bool):
            return f"required of field {name!r} must be True or False."
    return None


def check_resume(form: Mapping[str, Any], resume: Any) -> None:
    """Raise InvalidRequest, naming the field, if the resume does not fit the form."""
    if "fields" in form:
        _check_fields(form["fields"], resume)
    elif "schema" in form:
        _check_schema(form["schema"], resume, "answer")


def _check_fields(fields: list[dict[str, Any]], resume: Any) -> None:
    names = [field["name"] for field in fields]
    if not isinstance(resume, dict):
        raise InvalidRequest(f"The answer must be an object with the fields {', '.join(names)}.")
    for field in fields:
        name, kind = field["name"], field.get("type", "text")
        if resume.get(name) is None:
            if field.get("required", True):
                raise InvalidRequest(f"The answer lacks the field '{name}', which is required.")
            continue
        given, expected = resume[name], FIELD_TYPES[kind]
        if expected is not None and not _is(given, expected):
            raise InvalidRequest(f"The field '{name}' must be of the JSON type {expected}.")
        if field.get("options"):
            choices = [
                one.get("value") if isinstance(one, dict) and "value" in one else one for one in field["options"]
            ]
            for one in given if kind == "multiselect" else [given]:
                if not any(_same(one, choice) for choice in choices):
                    offered = ", ".join(str(choice) for choice in choices[:20])
                    raise InvalidRequest(f"The field '{name}' must be one of: {offered}.")
    unknown = sorted(str(key) for key in resume if key not in names)
    if unknown:
        raise InvalidRequest(f"The form has no field '{unknown[0]}'. It has {', '.join(names)}.")


def _check_schema(schema: Any, resume: Any, where: str) -> None:
    """Check the part of JSON Schema that forms use. The rest of a schema is for the graph to check."""
    if not isinstance(schema, dict) or "$ref" in schema:
        return
    types = schema.get("type")
    allowed = [types] if isinstance(types, str) else types if isinstance(types, list) else []
    if allowed and not any(isinstance(one, str) and _is(resume, one) for one in allowed):
        raise InvalidRequest(f"{where} must be of the JSON type {' or '.join(map(str, allowed))}.")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and not any(_same(resume, choice) for choice in choices):
        raise InvalidRequest(f"{where} must be one of: {', '.join(str(choice) for choice in choices[:20])}.")
    if isinstance(resume, dict):
        described = schema.get("properties")
        properties: dict[str, Any] = described if isinstance(described, dict) else {}
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            if isinstance(name, str) and name not in resume:
                raise InvalidRequest(f"{where} lacks the field '{name}', which is required.")
        for name, value in resume.items():
            if name in properties:
                _check_schema(properties[name], value, f"{where}.{name}")
            elif schema.get("additionalProperties") is False:
                raise InvalidRequest(f"{where} has a field '{name}', which its schema does not know.")
    elif isinstance(resume, list):
        for number, value in enumerate(resume):
            _check_schema(schema.get("items"), value, f"{where}[{number}]")
    elif isinstance(resume, int | float) and not isinstance(resume, bool):
        low: Any = schema.get("minimum")
        high: Any = schema.get("maximum")
        if _is(low, "number") and resume < low:
            raise InvalidRequest(f"{where} must not be less than {low}.")
        if _is(high, "number") and resume > high:
            raise InvalidRequest(f"{where} must not be more than {high}.")


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "string":
            return isinstance(value, str)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "integer":
            return not isinstance(value, bool) and (
                isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            )
        case "boolean":
            return isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "null":
            return value is None
        case _:
            return True


def _same(one: Any, other: Any) -> bool:
    # In Python True == 1; in JSON they differ.
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _deadline(given: Any) -> float | datetime | None:
    """The deadline in seconds after the interrupt, or as a time."""
    if _is(given, "number") and math.isfinite(given) and 0 < given <= MAX_DEADLINE_SECONDS:
        return float(given)
    if isinstance(given, str) and re.match(r"\d{4}-\d\d-\d\d[T ]", given):
        try:
            moment = datetime.fromisoformat(given)
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            return None
        return moment if abs(moment - datetime.now(UTC)) < timedelta(seconds=MAX_DEADLINE_SECONDS) else None
    return None


def _escalation(given: Any) -> dict[str, Any] | None:
    if given is True:
        return {}
    if not isinstance(given, dict) or not given:
        return None
    url, further = given.get("webhook"), _deadline(given.get("deadline"))
    known: dict[str, Any] = {"to": given["to"]} if isinstance(given.get("to"), str) else {}
    if isinstance(url, str):
        known["webhook"] = url
    if isinstance(further, float):
        known["deadline"] = further
    return known

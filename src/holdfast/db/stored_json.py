"""JSON of other people, as it was stored: nested deeply, or of another shape than this version writes."""

from __future__ import annotations

import json
from typing import Any

import orjson


def load_json(data: str | bytes) -> Any:
    """The value of a JSON text. Deep values exhaust the standard library's stack, and orjson has one of its own, for
    1,024 levels."""
    # It is UTF-8. Of bytes, json.loads would first find out which encoding they have.
    text = data if isinstance(data, str) else data.decode()
    try:
        return json.loads(text)
    except RecursionError:
        return orjson.loads(text)


def load_stored(data: str | bytes) -> Any:
    """The same for a column. None for a value that Postgres can hold and Python cannot, such as a number with ten
    thousand digits: it must not fail the statement that reads it together with others."""
    try:
        return load_json(data)
    except ValueError:
        return None


def as_object(stored: Any) -> dict[str, Any]:
    """What is stored, if it is an object, and an empty one if not. Rows may be older than the checks that requests pass
    now, and one row of another shape must not fail a list, a loop or somebody else's run."""
    return stored if isinstance(stored, dict) else {}


def object_fields(document: str) -> str:
    """The same in SQL: for `jsonb_each` and its like, which raise for a document that is no object."""
    return f"CASE WHEN jsonb_typeof({document}) = 'object' THEN {document} ELSE '{{}}' END"


def number_at(document: str, path: str) -> str:
    """The number at a place in a document, in SQL; 0 for what is none."""
    place = f"{document} #> '{path}'"
    return f"CASE WHEN jsonb_typeof({place}) = 'number' THEN ({place})::numeric ELSE 0 END"

"""Reads stored JSON from clients, graphs and older versions. It may be deeply nested, or have an unexpected shape."""

from __future__ import annotations

import json
from typing import Any

import orjson


def load_json(data: str | bytes) -> Any:
    """Parse a JSON text. Deeply nested values exceed the recursion limit of the standard library; orjson then reads up
    to 1,024 levels."""
    # Decode here: json.loads would first detect the encoding of bytes.
    text = data if isinstance(data, str) else data.decode()
    try:
        return json.loads(text)
    except RecursionError:
        return orjson.loads(text)


def load_stored(data: str | bytes) -> Any:
    """Parse the value of a column. None for a value that Postgres can store and Python cannot parse, such as a number
    with ten thousand digits: it must not fail a statement that reads other rows, too."""
    try:
        return load_json(data)
    except ValueError:
        return None


def as_object(stored: Any) -> dict[str, Any]:
    """The stored value if it is an object, else an empty one. Rows may be older than today's checks of requests, and
    one row with an unexpected shape must not fail a list, a loop or another run."""
    return stored if isinstance(stored, dict) else {}


def object_fields(document: str) -> str:
    """SQL for the document if it is an object, else an empty one. `jsonb_each` and others fail for other documents."""
    return f"CASE WHEN jsonb_typeof({document}) = 'object' THEN {document} ELSE '{{}}' END"


def number_at(document: str, path: str) -> str:
    """SQL for the number at a path of a document; 0 if there is no number."""
    place = f"{document} #> '{path}'"
    return f"CASE WHEN jsonb_typeof({place}) = 'number' THEN ({place})::numeric ELSE 0 END"

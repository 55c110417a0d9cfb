"""Values that a field can hold and that nobody expects there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.rows import TupleRow

DEPTH = 1_000
# As JSON text: some of them are not what a JSON library would write.
DOCUMENTS = {
    "null": "null",
    "number": "5",
    "text": '"text"',
    "list": "[1]",
    "object": '{"a": 1}',
    "nested": '{"a": {"b": [{"c": 1}]}}',
    "NUL": '"a\\u0000b"',
    "NUL in a key": '{"a\\u0000b": 1}',
    "lone surrogate": '"a\\ud800b"',
    "lone surrogate in a key": '{"a\\udfffb": 1}',
    "big number": "1e300",
    "many digits": "9" * 300,
    "deep list": "[" * DEPTH + "]" * DEPTH,
    "deep object": '{"a":' * DEPTH + "1" + "}" * DEPTH,
}
# Those that are tried at each place inside a document, and at places further inside. jsonb holds no NUL and no lone
# surrogate.
INSIDE = {"json": ("number", "NUL", "lone surrogate"), "jsonb": ("number", "text")}
FURTHER_INSIDE = {"json": ("number", "lone surrogate"), "jsonb": ("number", "text")}
# Those of all that are tried again in other states of the row.
AGAIN = (
    "is NUL",
    "NUL in a key",
    "lone surrogate",
    "number",
    "deep object",
    "not UTF-8",
    "markup",
    "not a number",
    "longest",
)
TEXTS = {
    "empty": "",
    "markup": "[bold]\x1b[31m</x>",
    "format": "%s %(a)s {} {0.__class__} $1 \\",
    "path": "|:,/../",
    "many": "x" * 100_000,
    "one surrogate's escape": "\\ud800",
    "not assigned": "\U0010ffff\ufffe",
}
NUMBERS = {"not a number": "NaN", "infinite": "Infinity", "huge": "1e300"}
# Times to live, in minutes. The statements that write them add them to a date: Postgres refuses all that are longer.
MINUTES = {"longest": "1.5e11"}
TIMES = {
    "infinite": "infinity",
    "without a beginning": "-infinity",
    "year 10000": "10000-01-01 11:59:59+00",
    "before Christ": "0001-12-31 12:00:00+00 BC",
    "last of Postgres": "294276-12-31 23:59:59+00",
}
BYTES = {
    "empty": b"",
    "NUL": b"\x00",
    "not UTF-8": b"\xff\xfe\xfd",
    "not JSON": b"{",
    "number": b"5",
    "list": b"[1]",
    "null": b"null",
    "object": b'{"a": 1}',
    "NUL in JSON": b'"a\\u0000b"',
    "lone surrogate": b'"a\\ud800b"',
    "encoded surrogate": b'"\xed\xa0\x80"',
    "deep list": b"[" * DEPTH + b"]" * DEPTH,
    "line ends": b'"a"\n\ndata: 5\n\n',
}


def hostile(kind: str, usual: Any, *, again: bool) -> Iterator[tuple[str, Any]]:
    """Values for a column of a type that usually holds `usual`: a name for each, and what to give Postgres. `again`:
    the most of them were tried in another state of the row."""
    found: dict[str, Any] = {}
    if kind == "bytea":
        found |= BYTES
    elif kind in ("json", "jsonb"):
        found |= DOCUMENTS
        if kind == "json" or not again:
            found |= {name: to_text(document) for name, document in shapes(kind, usual)}
    elif kind == "numeric":
        found |= NUMBERS
    elif kind == "timestamp with time zone":
        found |= TIMES
    elif kind == "double precision":
        # Without an end there is nothing to be longer.
        found |= {} if usual is None else MINUTES
    else:
        found |= TEXTS
    yield from ((name, value) for name, value in found.items() if not again or name.endswith(AGAIN))


def shapes(kind: str, document: Any) -> Iterator[tuple[str, Any]]:
    """A document with each of its parts missing, or something else, and with each part of its parts."""
    if not isinstance(document, dict):
        return
    for key, part in document.items():
        others = {name: value for name, value in document.items() if name != key}
        yield f"no {key}", others
        for name in INSIDE[kind]:
            yield f"{key} is {name}", {**document, key: Raw(DOCUMENTS[name])}
        if isinstance(part, dict):
            for inner in part:
                yield f"no {key}.{inner}", {**others, key: {name: part[name] for name in part if name != inner}}
                for name in FURTHER_INSIDE[kind]:
                    yield f"{key}.{inner} is {name}", {**others, key: {**part, inner: Raw(DOCUMENTS[name])}}


class Raw(str):
    """JSON text that goes into a document as it is."""


def to_text(value: Any) -> str:
    """JSON text of a document with raw parts."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{to_text(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(to_text, value)) + "]"
    return json.dumps(value)


def storable(connection: psycopg.Connection[TupleRow], kind: str, value: Any) -> bool:
    """Whether Postgres takes a value for a column of a type. jsonb takes no NUL and no lone surrogate."""
    try:
        with connection.transaction():
            connection.execute(f"SELECT %s::{kind}".encode(), (value,))
    except psycopg.DataError:
        return False
    return True

"""Serialises the values of graphs as JSON: exactly if JSON can represent them, else as readable text."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import orjson
from langgraph.types import Send
from pydantic import BaseModel


@runtime_checkable
class PublicFields(Protocol):
    """An object that shows clients only some of its fields."""

    def public_fields(self) -> Mapping[str, Any]: ...


# Nested lists and objects in a stored value. Readers do not support many more levels: see `db/stored_json.py`.
MAX_JSON_DEPTH = 1_000
# The same for a response, which contains such values.
MAX_RESPONSE_DEPTH = MAX_JSON_DEPTH + 50
# Matches all escapes of a JSON text, so that an escaped backslash is not taken for the start of another escape.
ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<refused>\\u0000|\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.S,
)
ORJSON_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def _default(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(bytes(value)).decode()
    if isinstance(value, BaseException):
        return {"error": type(value).__name__, "message": str(value)}
    if isinstance(value, Send):
        return {"node": value.node, "arg": value.arg}
    if isinstance(value, PublicFields):
        return value.public_fields()
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, type):
        return value.__name__
    return str(value)


def to_json(value: Any, max_depth: int = MAX_JSON_DEPTH) -> bytes:
    """Compact JSON for any value. Raises ValueError for circular references and for more than `max_depth` levels, and
    for no other value that a graph can hold."""
    try:
        return orjson.dumps(value, _default, ORJSON_OPTIONS)
    except (TypeError, ValueError, RecursionError):
        # orjson refuses integers beyond 64 bits, more than 254 levels, and lone surrogates. Lone surrogates are
        # replaced: half of the clients refuse a response that contains them.
        return _encode(value, max_depth).encode()


class _Close(NamedTuple):
    """The closing bracket of a list or an object."""

    bracket: str


class _Text(NamedTuple):
    """Encoded JSON text."""

    text: str


def _encode(value: Any, max_depth: int) -> str:
    """Encode a value as orjson would. Not recursive, because a deep value must not exhaust the stack."""
    parts: list[str] = []
    pending: list[Any] = [value]
    depth = 0
    while pending:
        item = pending.pop()
        if isinstance(item, _Text):
            parts.append(item.text)
        elif isinstance(item, _Close):
            parts.append(item.bracket)
            depth -= 1
        elif isinstance(item, dict) or (isinstance(item, (list, tuple)) and not hasattr(item, "_asdict")):
            if depth >= max_depth:
                # A circular reference ends here, too.
                raise ValueError(f"JSON with more than {max_depth:,} levels")
            depth += 1
            parts.append("{" if isinstance(item, dict) else "[")
            pending.append(_Close("}" if isinstance(item, dict) else "]"))
            pending.extend(reversed(_contents(item)))
        else:
            pending.append(_scalar(item))
    return "".join(parts)


def _contents(item: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> list[Any]:
    """The items of a list or an object, with the text between them."""
    contents: list[Any] = []
    if isinstance(item, dict):
        for key, part in item.items():
            comma = "," if contents else ""
            contents += [_Text(f"{comma}{json.dumps(_key(key), ensure_ascii=False)}:"), part]
    else:
        for part in item:
            contents += [_Text(","), part] if contents else [part]
    return contents


def _scalar(value: Any) -> Any:
    """The JSON text of a value without items, or another value to encode in its place."""
    if value is None or isinstance(value, (bool, int)):
        try:
            return _Text(json.dumps(value))
        except ValueError:
            # More digits than Python can convert to text. No client could read them either.
            return _Text("null")
    if isinstance(value, float):
        return _Text(json.dumps(value) if math.isfinite(value) else "null")
    if type(value) is str:
        return _Text(json.dumps(_text(value), ensure_ascii=False))
    try:
        return _Text(orjson.dumps(value, _default, ORJSON_OPTIONS).decode())
    except (TypeError, ValueError, RecursionError):
        return _default(value)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return _text(key)
    try:
        [name] = orjson.loads(orjson.dumps({key: None}, option=ORJSON_OPTIONS))
    except (TypeError, ValueError):
        return _text(str(key))
    return str(name)


def _text(value: str) -> str:
    """Replace lone surrogates by U+FFFD."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_jsonb(data: bytes) -> str:
    """Convert JSON to text that a `jsonb` column accepts: NUL characters and lone surrogates become U+FFFD."""
    if b"\\u0000" not in data and b"\\ud" not in data and b"\\uD" not in data:
        return data.decode()
    return ESCAPE.sub(_replace_refused, data.decode())


def storable(value: Any) -> Any:
    """The value as a `jsonb` column will return it. Raises the same errors as `to_json`."""
    return json.loads(to_jsonb(to_json(value)))


def _replace_refused(escape: re.Match[str]) -> str:
    return "\ufffd" if escape["refused"] else escape[0]

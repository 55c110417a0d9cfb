"""What graphs produce, as JSON: exact where JSON can say it, readable where it cannot."""

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
    """An object of which clients may read only a part."""

    def public_fields(self) -> Mapping[str, Any]: ...


# Levels of lists and objects in a value that is stored. No reader has room for many more: see `db/stored_json.py`.
DEEPEST = 1_000
# In an answer, which has such values inside.
DEEPEST_ANSWER = DEEPEST + 50
# Every escape of a JSON text, so that a backslash that is escaped itself begins none.
ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<refused>\\u0000|\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.S,
)
OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


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


def to_json(value: Any, deepest: int = DEEPEST) -> bytes:
    """Compact JSON for anything. Raises ValueError for circular references and for more than `deepest` levels, and
    for nothing else that a graph can hold."""
    try:
        return orjson.dumps(value, _default, OPTIONS)
    except (TypeError, ValueError, RecursionError):
        # Integers past 64 bits, more than 254 levels, and lone surrogates, which nobody should write: half of the
        # clients refuse the whole answer.
        return _written(value, deepest).encode()


class _End(NamedTuple):
    """The end of a list or an object."""

    bracket: str


class _Written(NamedTuple):
    """JSON text."""

    text: str


def _written(value: Any, deepest: int) -> str:
    """The same as orjson would have written. Not recursive: a deep value must not exhaust the stack."""
    parts: list[str] = []
    pending: list[Any] = [value]
    depth = 0
    while pending:
        item = pending.pop()
        if isinstance(item, _Written):
            parts.append(item.text)
        elif isinstance(item, _End):
            parts.append(item.bracket)
            depth -= 1
        elif isinstance(item, dict) or (isinstance(item, (list, tuple)) and not hasattr(item, "_asdict")):
            if depth >= deepest:
                # A circular reference ends here, too.
                raise ValueError(f"JSON with more than {deepest:,} levels")
            depth += 1
            parts.append("{" if isinstance(item, dict) else "[")
            pending.append(_End("}" if isinstance(item, dict) else "]"))
            pending.extend(reversed(_contents(item)))
        else:
            pending.append(_scalar(item))
    return "".join(parts)


def _contents(item: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> list[Any]:
    """The parts of a list or an object, with what is written between them."""
    contents: list[Any] = []
    if isinstance(item, dict):
        for key, part in item.items():
            comma = "," if contents else ""
            contents += [_Written(f"{comma}{json.dumps(_key(key), ensure_ascii=False)}:"), part]
    else:
        for part in item:
            contents += [_Written(","), part] if contents else [part]
    return contents


def _scalar(value: Any) -> Any:
    """JSON text of a value that has no parts, or a value that can be written in its place."""
    if value is None or isinstance(value, (bool, int)):
        try:
            return _Written(json.dumps(value))
        except ValueError:
            # More digits than Python writes or reads. No client can read it either.
            return _Written("null")
    if isinstance(value, float):
        return _Written(json.dumps(value) if math.isfinite(value) else "null")
    if type(value) is str:
        return _Written(json.dumps(_text(value), ensure_ascii=False))
    try:
        return _Written(orjson.dumps(value, _default, OPTIONS).decode())
    except (TypeError, ValueError, RecursionError):
        return _default(value)


def _key(key: Any) -> str:
    if isinstance(key, str):
        return _text(key)
    try:
        [name] = orjson.loads(orjson.dumps({key: None}, option=OPTIONS))
    except (TypeError, ValueError):
        return _text(str(key))
    return str(name)


def _text(value: str) -> str:
    """The same with U+FFFD for lone surrogates."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_jsonb(data: bytes) -> str:
    """The same JSON as text that a `jsonb` column accepts: NUL characters and lone surrogates, which it has no
    room for, become U+FFFD."""
    if b"\\u0000" not in data and b"\\ud" not in data and b"\\uD" not in data:
        return data.decode()
    return ESCAPE.sub(_allowed, data.decode())


def storable(value: Any) -> Any:
    """The value as a `jsonb` column will return it. Raises what `to_json` raises."""
    return json.loads(to_jsonb(to_json(value)))


def _allowed(escape: re.Match[str]) -> str:
    return "\ufffd" if escape["refused"] else escape[0]

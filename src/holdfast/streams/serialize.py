"""What graphs produce, as JSON: exact where JSON can say it, readable where it cannot."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol, runtime_checkable

import orjson
from langgraph.types import Send
from pydantic import BaseModel


@runtime_checkable
class PublicFields(Protocol):
    """An object of which clients may read only a part."""

    def public_fields(self) -> Mapping[str, Any]: ...


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


def to_json(value: Any) -> bytes:
    """Compact JSON for anything. Never raises for what a graph can hold, short of circular references."""
    try:
        return orjson.dumps(value, _default, OPTIONS)
    except (TypeError, ValueError):
        # Integers past 64 bits, which the standard library can write, and lone surrogates, which nobody should: half of
        # the clients refuse the whole answer.
        return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    """The same in types that the standard library writes as orjson would have: it has no times, and NaN is no JSON."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if type(value) is str:
        return _text(value)
    if isinstance(value, dict):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return [_plain(item) for item in value]
    try:
        return orjson.loads(orjson.dumps(value, _default, OPTIONS))
    except (TypeError, ValueError):
        return _plain(_default(value))


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
    if b"\\u0000" not in data and b"\\ud" not in data:
        return data.decode()
    return orjson.dumps(_scrub(json.loads(data))).decode()


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value).replace("\0", "\ufffd")
    if isinstance(value, list):
        return [_scrub(item) for item in value]
    if isinstance(value, dict):
        return {_scrub(key): _scrub(item) for key, item in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value)
    return value

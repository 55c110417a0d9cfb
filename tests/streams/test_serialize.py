"""Values that orjson refuses are encoded as orjson would encode them."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
import pytest
from pydantic import BaseModel

from holdfast.streams.serialize import to_json

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
SOME_UUID = UUID(int=1)
HUGE = 2**70
Pair = namedtuple("Pair", "left right")


@dataclass
class Point:
    x: int
    at: datetime


class Model(BaseModel):
    size: int
    at: datetime


@pytest.mark.parametrize(
    "value",
    [
        NOON,
        SOME_UUID,
        float("nan"),
        float("inf"),
        {"a", "b"} - {"b"},
        b"bytes",
        (1, 2),
        Pair(1, NOON),
        Point(1, NOON),
        Model(size=1, at=NOON),
        {1: "int", SOME_UUID: "uuid", None: "none", 1.5: "float"},
        ValueError("no"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_beside_huge_integer_is_encoded_equally(value: Any) -> None:
    expected = orjson.loads(to_json(value))
    written = to_json({"huge": HUGE, "value": value})
    assert orjson.loads(written)["value"] == expected
    assert str(HUGE).encode() in written


def test_huge_integers_in_objects_are_encoded() -> None:
    written = to_json([Pair(HUGE, NOON), Point(HUGE, NOON), Model(size=HUGE, at=NOON), {HUGE: 1}])
    assert written.count(str(HUGE).encode()) == 4
    assert written.count(b"2026-11-15T12:00:00") == 3


def test_lone_surrogates_are_replaced() -> None:
    assert orjson.loads(to_json({"half\ud83d": ["\ud800 🦊 é \0"]})) == {"half\ufffd": ["\ufffd 🦊 é \0"]}

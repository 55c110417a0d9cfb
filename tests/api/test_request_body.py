"""Reading a request's body: how much, how often, and how deep."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Scope

from holdfast.api import request_body
from holdfast.api.request_body import JsonRequest, require_within
from holdfast.auth.bounded_json import MAX_LEVELS, read_bounded
from holdfast.errors import InvalidRequest, TooLarge


def request(method: str = "POST", **headers: str) -> Scope:
    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": "/", "headers": given}


class Sender:
    """A client that sends as long as it is read from."""

    def __init__(self, chunk: bytes = b"x" * 100) -> None:
        self.sent = 0
        self._chunk = chunk

    async def receive(self) -> Message:
        self.sent += len(self._chunk)
        return {"type": "http.request", "body": self._chunk, "more_body": True}


WEB: Any = SimpleNamespace(settings=SimpleNamespace(max_body_bytes=1000), auth=None)


async def test_body_without_an_end_is_read_to_the_limit() -> None:
    sender = Sender()
    with pytest.raises(TooLarge):
        await JsonRequest(request(), sender.receive, WEB).body()
    assert sender.sent == 1100


@pytest.mark.parametrize(
    ("method", "length", "refused"),
    [("POST", b"1001", True), ("POST", b"1000", False), ("GET", b"1001", False), ("POST", b"x", False)],
)
def test_declared_length_over_the_limit_is_refused(method: str, length: bytes, refused: bool) -> None:
    with pytest.raises(TooLarge) if refused else nullcontext():
        require_within(1000, method, {b"content-length": length})


async def test_body_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def counted(body: bytes) -> Any:
        parsed.append(body)
        return read_bounded(body)

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"a": 1}', "more_body": False}

    monkeypatch.setattr(request_body, "read_bounded", counted)
    asked = JsonRequest(request(), receive, WEB)
    assert await asked.json() == await asked.json() == {"a": 1}
    assert parsed == [b'{"a": 1}']


@pytest.mark.parametrize("depth", [199, 200, 201, 254, 900])
def test_nesting(depth: int) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        body = opening * depth + b"1" + closing * depth
        if depth <= MAX_LEVELS:
            assert read_bounded(body)
        else:
            with pytest.raises(InvalidRequest):
                read_bounded(body)


def test_many_brackets_are_not_depth() -> None:
    assert len(read_bounded(b"[" + b"[],{}," * 10_000 + b"[]]")) == 20_001

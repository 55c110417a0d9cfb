"""The outermost layer by itself: how much it reads, and how often."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from holdfast.api import edge
from holdfast.api.edge import BodyLimit, JsonRequest, read_json
from holdfast.auth.bounded_json import DEEPEST


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


async def reads_everything(scope: Scope, receive: Receive, send: Send) -> None:
    await JsonRequest(scope, receive).body()


async def test_a_body_that_does_not_end_is_not_read_to_its_end() -> None:
    sender, answered = Sender(), list[Message]()

    async def send(message: Message) -> None:
        answered.append(message)

    with pytest.raises(HTTPException) as refused:
        await BodyLimit(reads_everything, limit=1000)(request(), sender.receive, send)
    assert refused.value.status_code == 413
    assert sender.sent == 1100


async def test_a_body_that_says_that_it_is_too_large_is_not_read_at_all() -> None:
    sender, answered = Sender(), list[Message]()

    async def send(message: Message) -> None:
        answered.append(message)

    await BodyLimit(reads_everything, limit=1000)(request(**{"content-length": "1001"}), sender.receive, send)
    assert (answered[0]["status"], sender.sent) == (413, 0)


async def test_a_body_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def counted(body: bytes) -> Any:
        parsed.append(body)
        return read_json(body)

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"a": 1}', "more_body": False}

    monkeypatch.setattr(edge, "read_json", counted)
    asked = JsonRequest(request(), receive)
    assert await asked.json() == await asked.json() == {"a": 1}
    assert parsed == [b'{"a": 1}']


@pytest.mark.parametrize("depth", [199, 200, 201, 254, 900])
def test_nesting(depth: int) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        body = opening * depth + b"1" + closing * depth
        if depth <= DEEPEST:
            assert read_json(body)
        else:
            with pytest.raises(HTTPException):
                read_json(body)


def test_many_brackets_are_not_depth() -> None:
    assert len(read_json(b"[" + b"[],{}," * 10_000 + b"[]]")) == 20_001

"""Frames of a WebSocket that are wrong: each gets its error, and the socket goes on as if nothing had been said."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.support.intruder import NOBODY, Intruder
from tests.support.json_body import JSON

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUBSCRIBE = {"channels": ["values"]}
DEEP = b'{"id": 5, "method": "run.start", "params": {"input": ' + b"[" * 240 + b"]" * 240 + b"}}"

FRAMES: dict[str, str | bytes] = {
    "half": '{"id": 5',
    "empty": "",
    "empty bytes": b"",
    "bytes": b"\xff\xfe",
    "text": '"text"',
    "array": "[]",
    "null": "null",
    "not a number": '{"id": NaN, "method": "run.start"}',
    "lone surrogate": '{"id": 5, "method": "\\ud800"}',
    "too deep": DEEP.decode(),
    "far too deep": "[" * 100_000,
    "no id": '{"method": "agent.getTree"}',
    "id is true": '{"id": true, "method": "agent.getTree"}',
    "id is text": '{"id": "5", "method": "agent.getTree"}',
    "huge id": '{"id": 99999999999999999999999, "method": "agent.getTree"}',
    "no method": '{"id": 5}',
    "method is a number": '{"id": 5, "method": 5}',
}
PARAMS: dict[str, tuple[str, Any, str]] = {
    "unknown": ("subscription.forget", {}, "unknown_command"),
    "array": ("subscription.subscribe", [], "invalid_argument"),
    "text": ("subscription.unsubscribe", "", "invalid_argument"),
    "array to unsubscribe": ("subscription.unsubscribe", [1], "invalid_argument"),
    "no channels": ("subscription.subscribe", {}, "invalid_argument"),
    "a channel that is none": ("subscription.subscribe", {"channels": ["values", 5]}, "invalid_argument"),
    "namespaces": ("subscription.subscribe", {**SUBSCRIBE, "namespaces": "a"}, "invalid_argument"),
    "since": ("subscription.subscribe", {**SUBSCRIBE, "since": 2**63}, "invalid_argument"),
    "negative since": ("subscription.subscribe", {**SUBSCRIBE, "since": -1}, "invalid_argument"),
    "depth": ("subscription.subscribe", {**SUBSCRIBE, "depth": 1.5}, "invalid_argument"),
    "reconnect without since": ("subscription.reconnect", SUBSCRIBE, "invalid_argument"),
    "nobody's subscription": ("subscription.unsubscribe", {"subscription_id": {"a": 1}}, "no_such_subscription"),
    "run of nothing": ("run.start", [], "invalid_argument"),
    "NUL": ("run.start", {"assistant_id": "echo", "metadata": {"a": "\0"}}, "invalid_argument"),
    "nobody's run": ("input.respond", {"interrupt_id": "x"}, "no_such_interrupt"),
}


async def test_compression_is_not_negotiated(intruder: Intruder) -> None:
    """A small compressed frame can be a large one when it is read."""
    url = f"{str(intruder.client.base_url).replace('http', 'ws', 1)}/threads/{intruder.ids['thread_id']}/stream/events"
    async with connect(url, compression="deflate") as socket:
        assert socket.request is not None
        assert "permessage-deflate" in socket.request.headers["Sec-WebSocket-Extensions"]
        assert socket.response is not None
        assert "Sec-WebSocket-Extensions" not in socket.response.headers
        assert (await _asked(socket, "{}"))["type"] == "error"


async def _asked(socket: ClientConnection, frame: str | bytes) -> dict[str, Any]:
    await socket.send(frame)
    return dict(orjson.loads(await socket.recv()))


async def _still_listens(socket: ClientConnection) -> None:
    subscribe = orjson.dumps({"id": 6, "method": "subscription.subscribe", "params": SUBSCRIBE}).decode()
    assert (await _asked(socket, subscribe))["type"] == "success"


def _url(intruder: Intruder, thread_id: str) -> str:
    return f"ws://127.0.0.1:{intruder.client.base_url.port}/threads/{thread_id}/stream/events"


def _is_refusal(answer: dict[str, Any], name: str) -> bool:
    """Whether it is an error of the protocol, with the command's id where that can be read."""
    identity = 5 if "method" in name else None
    told = {"type": "error", "id": identity, "error": "invalid_argument", "message": answer.get("message")}
    return answer == told and isinstance(answer["message"], str)


@pytest.mark.parametrize("name", FRAMES)
async def test_a_frame_that_is_no_command(intruder: Intruder, name: str) -> None:
    before = intruder.everything()
    async with connect(_url(intruder, intruder.ids["calm"])) as socket:
        answer = await _asked(socket, FRAMES[name])
        assert _is_refusal(answer, name), answer
        await _still_listens(socket)
    assert intruder.everything() == before


@pytest.mark.parametrize("name", FRAMES)
async def test_malformed_command_over_http_is_answered_like_one_over_a_socket(intruder: Intruder, name: str) -> None:
    before = intruder.everything()
    path = intruder.path("/threads/{calm}/commands")
    answer = await intruder.client.post(path, content=FRAMES[name], headers=JSON)
    assert answer.status_code == 400
    assert _is_refusal(answer.json(), name), answer.text
    assert intruder.everything() == before


@pytest.mark.parametrize(("method", "params", "code"), PARAMS.values(), ids=PARAMS)
async def test_a_command_that_fails(intruder: Intruder, method: str, params: Any, code: str) -> None:
    before = intruder.everything()
    async with connect(_url(intruder, intruder.ids["calm"])) as socket:
        answer = await _asked(socket, orjson.dumps({"id": 5, "method": method, "params": params}).decode())
        assert (answer["type"], answer["id"], answer["error"]) == ("error", 5, code)
        await _still_listens(socket)
    assert intruder.everything() == before


async def test_unknown_cursor_does_not_disturb_other_subscriptions(intruder: Intruder) -> None:
    """The events of a thread are read once for all who watch it."""
    far = {"id": 5, "method": "subscription.subscribe", "params": {**SUBSCRIBE, "since": 2**53}}
    async with (
        connect(_url(intruder, NOBODY)) as first,
        connect(_url(intruder, NOBODY)) as second,
    ):
        assert (await _asked(first, orjson.dumps(far).decode()))["type"] == "success"
        await _still_listens(second)


async def test_a_frame_over_the_limit_closes_the_socket(intruder: Intruder) -> None:
    async with connect(_url(intruder, NOBODY)) as socket:
        with pytest.raises(ConnectionClosed):
            await _asked(socket, "x" * 21_000_000)
    assert (await intruder.client.get("/ok")).status_code == 200


@pytest.mark.parametrize("thread_id", ["x", "%00", "00000000-0000-4000-8000-0000000000000"])
async def test_a_socket_of_no_thread(intruder: Intruder, thread_id: str) -> None:
    with pytest.raises(Exception, match="HTTP 403"):
        async with connect(_url(intruder, thread_id)) as socket:
            await socket.recv()

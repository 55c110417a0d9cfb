"""One call, as the sender makes it: to whom it leads in the end, and with what."""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest

from holdfast.graphs.webhooks import WebhooksSection
from holdfast.settings import load_settings
from holdfast.upkeep.webhooks import CONCURRENT, PAUSES, pause_after
from holdfast.webhooks.deliveries import Delivery
from holdfast.webhooks.sender import WebhookSender
from holdfast.webhooks.urls import WebhookTarget
from tests.support.receiver import Receiver, receiving

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

RUN: dict[str, Any] = {
    "run_id": "r",
    "thread_id": "t",
    "assistant_id": "a",
    "graph_id": "g",
    "status": "success",
    "created_at": "2026-01-02T03:04:05.6+02:00",
    "updated_at": "2026-01-02T03:04:06+02:00",
    "started_at": "2026-01-02T03:04:05.7+02:00",
    "finished_at": "2026-01-02T03:04:06+02:00",
    "metadata": {},
    "kwargs": {"input": 1, "user": {"identity": "me", "token": "secret"}, "forwarded": {"x-token": "secret"}},
    "multitask_strategy": "enqueue",
    "attempt": 1,
    "error": None,
    "priority": 0,
}


def delivery(url: str) -> Delivery:
    return Delivery(UUID(int=7), UUID(int=8), url, RUN, {"n": 1}, 1)


def sender(*, private: bool = False, timeout: float = 5, **section: Any) -> WebhookSender:
    settings = load_settings({}, database_url="postgresql:///x", webhook_allow_private=private, webhook_timeout=timeout)
    return WebhookSender(settings, WebhooksSection(**section))


def resolve_as(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Have every name resolved to these. Returns the names that were asked for."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


async def test_payload_contains_no_internal_fields(receiver: Receiver) -> None:
    answer = await sender(private=True).send(delivery(receiver.url))
    assert answer.error is None
    assert b"secret" not in receiver.received[0].body
    told = receiver.received[0].json
    assert told["created_at"] == "2026-01-02T01:04:05.600000+00:00"
    assert told["kwargs"]["config"]["configurable"]["user_id"] == "me"
    assert "webhook-signature" not in receiver.received[0].headers


async def test_a_name_of_this_machine_is_refused_when_it_is_called(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = resolve_as(monkeypatch, "127.0.0.1")
    answer = await sender().send(delivery(f"http://innocent.example:{receiver.port}/hook"))
    assert asked == ["innocent.example"]
    assert answer.final
    assert answer.error == "The URL is refused: its host has an address that is not public."
    assert answer.cause == "innocent.example has the address 127.0.0.1"
    assert receiver.received == []


async def test_a_private_address_among_public_ones_is_refused(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_as(monkeypatch, "93.184.216.34", "127.0.0.1")
    answer = await sender().send(delivery(f"http://innocent.example:{receiver.port}/hook"))
    assert answer.final
    assert receiver.received == []


async def test_the_connection_goes_to_the_address_that_was_checked(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again, the name would lead elsewhere; it is not asked again."""
    asked = resolve_as(monkeypatch, "127.0.0.1")
    answer = await sender(private=True).send(delivery(f"http://innocent.example:{receiver.port}/hook"))
    assert (answer.status, asked) == (200, ["innocent.example"])
    assert receiver.received[0].headers["host"] == f"innocent.example:{receiver.port}"


async def test_a_redirect_to_a_private_address_is_refused(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hop may be called, because this test says that it is public; the second is what it is."""
    receiver.answer = lambda _: (307, {"location": "http://169.254.169.254/latest/meta-data"})
    calling, strict = sender(private=True), sender()._policy
    lenient = calling._policy
    checked: list[str] = []

    class Policy:
        check_address = lenient.check_address

        def check(self, url: str) -> WebhookTarget:
            checked.append(url)
            return (lenient if len(checked) == 1 else strict).check(url)

    monkeypatch.setattr(calling, "_policy", Policy())
    answer = await calling.send(delivery(receiver.url))
    assert answer.final
    assert answer.error == "The URL is refused: it redirects to a URL that may not be called."
    assert "169.254.169.254 is not a public address" in (answer.cause or "")
    assert len(receiver.received) == 1


@pytest.mark.parametrize(
    "location",
    ["https://user:word@127.0.0.1/", "ftp://127.0.0.1/", "gopher://127.0.0.1/", "http://[::1/", "\u00ff://x"],
)
async def test_a_redirect_is_checked_like_the_url_itself(receiver: Receiver, location: str) -> None:
    receiver.answer = lambda _: (308, {"location": location})
    answer = await sender(private=True).send(delivery(receiver.url))
    assert answer.final
    assert "refused" in (answer.error or "")


async def test_redirects_end(receiver: Receiver) -> None:
    receiver.answer = lambda one: (307, {"location": one.path + "x"})
    answer = await sender(private=True).send(delivery(receiver.url))
    assert (answer.status, answer.final) == (307, False)
    assert [one.path for one in receiver.received] == ["/hook", "/hookx", "/hookxx", "/hookxxx"]


async def test_configured_headers_are_for_the_receiver_alone(receiver: Receiver) -> None:
    elsewhere = f"http://localhost:{receiver.port}/elsewhere"
    places = {"/hook": "/here", "/here": elsewhere}
    receiver.answer = lambda one: (307, {"location": places[one.path]}) if one.path in places else 200
    answer = await sender(private=True, headers={"x-token": "t"}).send(delivery(receiver.url))
    assert answer.status == 200
    assert [one.headers.get("x-token") for one in receiver.received] == ["t", "t", None]


async def test_the_payload_can_be_restricted(receiver: Receiver) -> None:
    fields = frozenset({"run_id", "status", "webhook_sent_at", "nonsense"})
    await sender(private=True, allowed_fields=fields).send(delivery(receiver.url))
    assert receiver.received[0].json.keys() == {"run_id", "status", "webhook_sent_at"}


async def test_a_receiver_that_does_not_answer(receiver: Receiver) -> None:
    receiver.hold = asyncio.Event()
    answer = await sender(private=True, timeout=0.3).send(delivery(receiver.url))
    assert (answer.status, answer.final) == (None, False)
    assert "0.3 seconds" in (answer.error or "")


async def test_receivers_that_do_not_answer_do_not_hold_up_another(receiver: Receiver) -> None:
    """As many as are called at once, but one."""
    receiver.hold = asyncio.Event()
    calling = sender(private=True, timeout=60)
    calls = [asyncio.create_task(calling.send(delivery(receiver.url))) for _ in range(CONCURRENT - 1)]
    await receiver.get(CONCURRENT - 1)
    async with receiving() as another:
        assert (await calling.send(delivery(another.url))).status == 200
    receiver.hold.set()
    assert {(await call).status for call in calls} == {200}


async def failed(url: str) -> str:
    """What callers are shown of a failed call. It holds no address; the operator is told more."""
    answer = await sender(private=True).send(delivery(url))
    assert (answer.status, answer.final) == (None, False)
    assert answer.error is not None
    assert answer.cause is not None
    assert answer.error not in answer.cause
    assert not re.search(r"\d", answer.error)
    return answer.error


async def test_refused_connection_is_reported_without_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_as(monkeypatch, "127.0.0.1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert await failed(f"http://innocent.example:{port}/") == "The connection was refused or failed."


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example"])
async def test_unknown_host_is_reported(host: str) -> None:
    assert await failed(f"http://{host}/") == "The host's name cannot be resolved."


@pytest.mark.parametrize(
    ("scheme", "sent", "error"),
    [
        ("http", b"SSH-2.0-internal\r\n", "The answer is not valid HTTP."),
        ("http", b"", "The answer is not valid HTTP."),
        ("https", b"SSH-2.0-internal\r\n", "The TLS handshake failed."),
    ],
)
async def test_answer_of_another_protocol_is_not_repeated(scheme: str, sent: bytes, error: str) -> None:
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(sent)
        writer.write_eof()
        with suppress(OSError):
            await reader.read()
        writer.close()
        ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await failed(f"{scheme}://127.0.0.1:{port}/") == error
        await ended.wait()


async def test_stored_url_is_checked_again_when_it_is_sent(receiver: Receiver) -> None:
    """As stored by runs and crons that were created before there was an allow-list."""
    strict = sender(private=True, headers={"x-token": "t"}, allowed_domains=("example.com",))
    answer = await strict.send(delivery(receiver.url))
    assert answer.final
    assert "not among the domains" in (answer.error or "")
    assert receiver.received == []


def test_pauses_grow_and_differ() -> None:
    drawn = [[pause_after(attempt, 5.0) for attempt in range(1, 10)] for _ in range(20)]
    for pauses in drawn:
        assert all(
            0.8 * 5 * PAUSES[min(i, 5)] <= pause <= 1.2 * 5 * PAUSES[min(i, 5)] for i, pause in enumerate(pauses)
        )
    assert len({pauses[0] for pauses in drawn}) > 1
    assert [5 * pause for pause in PAUSES[:5]] == [5, 30, 120, 600, 3600]

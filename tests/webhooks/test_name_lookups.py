"""Lookups of names whose owner does not answer: nothing else waits for them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from holdfast.webhooks.name_lookups import NameLookups
from tests.webhooks.test_sending import delivery, sender

ADDRESS = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))]
# More than an event loop has threads for.
MANY = 40


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Lookups of names below slow.example end when this is set."""
    end = threading.Event()

    def getaddrinfo(host: str, *_: Any, **__: Any) -> list[Any]:
        if host.endswith("slow.example"):
            end.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return ADDRESS

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield end
    end.set()


def test_threads_of_the_event_loop_stay_free(hanging: threading.Event) -> None:
    """With both kinds of event loop: other parts of the process resolve names and call functions in threads."""

    async def work() -> None:
        calling = sender(timeout=30)
        calls = [
            asyncio.create_task(calling.send(delivery(f"http://{number}.slow.example/"))) for number in range(MANY)
        ]
        async with asyncio.timeout(20):
            # Until every lookup has begun, and waits.
            while sum(thread.name.endswith("slow.example") for thread in threading.enumerate()) < MANY:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(lambda: "free") == "free"
            assert await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        hanging.set()
        assert {(await call).error for call in calls} == {"The host's name cannot be resolved."}

    asyncio.run(work())
    hanging.clear()
    uvloop.run(work())


async def test_lookups_are_bounded_and_one_that_was_given_up_counts_until_it_ends(hanging: threading.Event) -> None:
    lookups = NameLookups(limit=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await lookups.getaddrinfo("slow.example", 80)
    waiting = asyncio.create_task(lookups.getaddrinfo("quick.example", 80))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    hanging.set()
    assert await waiting == ADDRESS


def test_process_does_not_wait_for_a_lookup(hanging: threading.Event) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await NameLookups().getaddrinfo("slow.example", 80)

    asyncio.run(give_up())
    [thread] = [thread for thread in threading.enumerate() if thread.name == "lookup slow.example"]
    assert thread.daemon
    # Its loop is closed by now; it ends without an error.
    hanging.set()
    thread.join(10)
    assert not thread.is_alive()

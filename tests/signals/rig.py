"""The signals of several processes, run in the process of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from holdfast.db.connect import Database
from holdfast.settings import Settings, load_settings
from holdfast.signals import Topic
from holdfast.signals.carrier import Carrier
from holdfast.signals.choose import signals_for
from tests.support.waiting import until_true

# The timeout of an echo. Pings are frequent in these tests, and a carrier that is only busy must not count as
# unavailable.
ECHO_TIMEOUT_SECONDS = 5.0
TOPICS: tuple[Topic, ...] = ("work", "cancel", "events")


class Process:
    """The signals of one process, and the hints that it has received."""

    def __init__(self, signals: Carrier) -> None:
        self.signals = signals
        self.received: dict[Topic, list[str | None]] = {topic: [] for topic in TOPICS}
        for topic in TOPICS:
            signals.listen(topic, self.received[topic].append)

    def hints(self, topic: Topic) -> list[str]:
        """The received hints, without the probes of `wait_until_connected`."""
        return [payload for payload in self.received[topic] if payload is not None and not payload.startswith("probe")]

    @property
    def missed(self) -> int:
        """How many times a listener was called with None: hints may have been lost."""
        return self.received["work"].count(None)


def signal_settings(database_url: str, **settings: Any) -> Settings:
    return load_settings({}, **{"database_url": database_url, "signal_ping": 1.0, "pool_max": 2, **settings})


@asynccontextmanager
async def process(settings: Settings, *, wait: bool = True) -> AsyncIterator[Process]:
    """Run the signals of a process during the block. `wait`: first wait until hints arrive."""
    database = Database(settings, "test")
    await database.open()
    one = Process(signals_for(database))
    one.signals._echo_timeout = ECHO_TIMEOUT_SECONDS
    try:
        await one.signals.start()
        if wait:
            await wait_until_connected(one)
        yield one
    finally:
        await one.signals.stop()
        await database.close()
    assert one.signals.failure is None


async def wait_until_connected(one: Process) -> None:
    """Wait until the process receives hints."""
    count, mine = 0, f"probe {uuid4()}"

    def probe_received() -> bool:
        nonlocal count
        count += 1
        one.signals.publish("cancel", f"{mine} {count}")
        return any(hint is not None and hint.startswith(mine) for hint in one.received["cancel"])

    one.received["cancel"].clear()
    await until_true(probe_received, "hints arrive")
    await until_true(lambda: not one.signals.degraded, "the process knows that hints arrive")
    for hints in one.received.values():
        hints.clear()

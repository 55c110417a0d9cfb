"""Signals of several processes, in one; and a network between them and their carrier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from holdfast.db.connect import Database
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.settings import Settings, load_settings
from holdfast.signals import Signals, Topic
from holdfast.signals.choose import signals_for
from tests.support.waiting import until_true

# Seconds an echo may take: pings are frequent here, and yet a carrier that is busy is not one that is away.
PATIENCE = 5.0
TOPICS: tuple[Topic, ...] = ("work", "cancel", "events")


class Process:
    """The signals of one process, and what it has heard."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.heard: dict[Topic, list[str | None]] = {topic: [] for topic in TOPICS}
        for topic in TOPICS:
            signals.listen(topic, self.heard[topic].append)

    def hints(self, topic: Topic) -> list[str]:
        """What it was told, without anybody's probes."""
        return [payload for payload in self.heard[topic] if payload is not None and not payload.startswith("probe")]

    @property
    def missed(self) -> int:
        """How often it was told that hints may have been missed."""
        return self.heard["work"].count(None)


def signal_settings(database_url: str, **settings: Any) -> Settings:
    return load_settings({}, **{"database_url": database_url, "signal_ping": 1.0, "pool_max": 2, **settings})


@asynccontextmanager
async def process(settings: Settings, *, joined: bool = True) -> AsyncIterator[Process]:
    """A process whose signals run for the length of the block; `joined`: and come through when it begins."""
    database = Database(settings, "test")
    await database.open()
    running: asyncio.Task[None] | None = None
    try:
        one = Process(signals_for(database))
        one.signals._patience = PATIENCE  # type: ignore[attr-defined]
        running = asyncio.create_task(one.signals.run(), name="signals")
        if joined:
            await hears_itself(one)
        yield one
    finally:
        if running is not None:
            await cancel_all([running])
        await database.close()
    assert running is not None
    assert running.cancelled(), running.exception()


async def hears_itself(one: Process) -> None:
    """Wait until hints come through."""
    count, mine = 0, f"probe {uuid4()}"

    def heard() -> bool:
        nonlocal count
        count += 1
        one.signals.publish("cancel", f"{mine} {count}")
        return any(hint is not None and hint.startswith(mine) for hint in one.heard["cancel"])

    one.heard["cancel"].clear()
    await until_true(heard, "hints come through")
    await until_true(lambda: not one.signals.degraded, "the process knows that they do")
    for hints in one.heard.values():
        hints.clear()

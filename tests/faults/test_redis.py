"""Redis that goes away, comes back, forgets everything or was never there, while runs stream to watchers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.fleet import Fleet, until
from tests.support.redis_server import RedisServer
from tests.support.servers import free_port
from tests.support.watching import WatchedRun, Watcher

RUNS = 10
EVENTS = 250
# Polls that would not make up for a signal that does not work; and more patience for the echo than one stall needs.
SLOW_POLLS = {"POSTGRES_POLL_INTERVAL_SECONDS": "30", "SIGNAL_PING_SECONDS": "5"}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def watch_all(fleet: Fleet, runs: list[WatchedRun]) -> list[tuple[Watcher, asyncio.Task[None]]]:
    """Every run watched on every web process."""
    return [fleet.watch(run, [url]) for run in runs for url in fleet.urls]


async def seen(watching: list[tuple[Watcher, asyncio.Task[None]]], events: int) -> None:
    async def far_enough() -> bool:
        return all(len(watcher.saw("custom")) >= events for watcher, _ in watching)

    await until(far_enough, f"every watcher has seen {events} events")


async def prove_all(fleet: Fleet, runs: list[WatchedRun], watching: list[tuple[Watcher, asyncio.Task[None]]]) -> None:
    """No error, no gap, no duplicate, and no connection that broke."""
    await asyncio.gather(*(task for _, task in watching))
    webs = len(fleet.urls)
    for number, (watcher, _) in enumerate(watching):
        run = runs[number // webs]
        assert [data["number"] for data in watcher.saw("custom")] == list(range(1, EVENTS + 1))
        await fleet.prove(run, watcher, attempts=[1])
        assert (watcher.broken, watcher.ended_early) == (0, 0)


async def test_streams_go_on_while_redis_is_killed_restarted_and_flushed(fleet: Fleet, redis: RedisServer) -> None:
    await fleet.start(webs=2, workers=2, environ={**SLOW_POLLS, "REDIS_URL": redis.url})
    runs = [await fleet.post("chatter", {"events": EVENTS, "seconds": 0.02}) for _ in range(RUNS)]
    watching = await watch_all(fleet, runs)
    await seen(watching, 10)
    redis.kill()
    await seen(watching, 60)
    redis.start()

    async def restored() -> bool:
        return all(member.logged("signals.restored") for member in fleet.members)

    await until(restored, "every process has found Redis again")
    redis.command("FLUSHALL")
    await prove_all(fleet, runs, watching)
    for member in fleet.members:
        assert len(member.logged("signals.degraded")) == 1, "an outage is said once"
        assert len(member.logged("signals.restored")) == 1, "and its end"

    async def two_each() -> bool:
        return redis.connections() == 2 * len(fleet.members)

    await until(two_each, "each process has one connection to send and one to receive")


async def test_a_fleet_whose_redis_never_existed_polls(fleet: Fleet) -> None:
    nowhere = f"redis://:secret@127.0.0.1:{free_port()}/0"
    await fleet.start(webs=2, workers=1, environ={**SLOW_POLLS, "REDIS_URL": nowhere})
    runs = [await fleet.post("chatter", {"events": EVENTS, "seconds": 0.005}) for _ in range(RUNS)]
    watching = await watch_all(fleet, runs)
    await prove_all(fleet, runs, watching)
    for member in fleet.members:
        [line] = member.logged("signals.degraded")
        assert "secret" not in str(line)
        assert not member.logged("signals.restored")

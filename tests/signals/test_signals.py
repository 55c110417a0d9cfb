"""Behaviour of signals on both carriers, Postgres and Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.settings import Settings
from holdfast.signals import Topic
from holdfast.signals.choose import signals_for
from tests.signals.rig import Process, process, signal_settings, wait_until_connected
from tests.support.postgres_proxy import PostgresProxy
from tests.support.proxy import Proxy
from tests.support.redis_server import RedisProxy, RedisServer
from tests.support.waiting import until_true

CARRIERS = ["postgres", "redis"]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=CARRIERS)
async def network(request: pytest.FixtureRequest, database_url: str, redis: RedisServer) -> AsyncIterator[Proxy]:
    """A proxy between the processes and the carrier's server."""
    chosen = PostgresProxy(database_url) if request.param == "postgres" else RedisProxy(redis)
    async with chosen as proxy:
        yield proxy


@pytest.fixture
def settings(network: Proxy, database_url: str) -> Settings:
    if isinstance(network, PostgresProxy):
        return signal_settings(database_url, direct_database_url=network.url)
    return signal_settings(database_url, redis_url=network.url)


def count_events(logs: list[Any], event: str) -> int:
    return sum(entry["event"] == event for entry in logs)


async def test_hint_reaches_all_processes(settings: Settings) -> None:
    async with process(settings) as one, process(settings) as other:
        one.signals.publish("work", "something to do")
        other.signals.publish("cancel", "stop")
        await until_true(
            lambda: all(receiver.hints("work") == ["something to do"] for receiver in (one, other)), "the hint is there"
        )
        await until_true(
            lambda: all(receiver.hints("cancel") == ["stop"] for receiver in (one, other)), "the other one too"
        )
        assert one.hints("events") == other.hints("events") == []


async def test_failing_listener_loses_only_that_hint(settings: Settings) -> None:
    def refuse(payload: str | None) -> None:
        if payload == "strange":
            raise ArithmeticError

    database = Database(settings, "test")
    signals = signals_for(database)
    received_hints: list[str | None] = []
    signals.listen("work", refuse)
    signals.listen("work", received_hints.append)
    async with process(settings) as other:
        await database.open()
        await signals.start()
        try:
            await until_true(lambda: None in received_hints, "the process has joined")
            for hint in ("strange", "usual"):
                other.signals.publish("work", hint)
            await until_true(lambda: "usual" in received_hints, "the next hint is there")
            assert not signals.degraded
            assert signals.failure is None
        finally:
            await signals.stop()
            await database.close()


async def test_follower_receives_hints_of_thread(settings: Settings) -> None:
    thread, other_thread = uuid4(), uuid4()
    async with process(settings) as one, process(settings) as other:
        joined: list[str] = []
        one.signals.follow(thread, lambda: joined.append("thread"))
        if settings.redis_url is not None:
            await until_true(lambda: joined == ["thread"], "the callback reports the subscription")
        other.signals.publish("events", "here", thread_id=thread)
        other.signals.publish("events", "elsewhere", thread_id=other_thread)
        other.signals.publish("events", "for all")
        await until_true(lambda: {"here", "for all"} <= set(one.hints("events")), "the hints are there")
        if settings.redis_url is not None:
            assert "elsewhere" not in one.hints("events"), "a process receives only what it follows"
        one.signals.unfollow(thread)
        one.signals.follow(thread, lambda: joined.append("again"))
        one.signals.unfollow(thread)
        one.signals.follow(other_thread, lambda: joined.append("other"))
        if settings.redis_url is not None:
            await until_true(lambda: "other" in joined, "the callback reports the subscription to the other thread")
        other.signals.publish("events", "now here", thread_id=other_thread)
        await until_true(lambda: "now here" in one.hints("events"), "they come")


async def test_listeners_learn_of_hints_lost_during_outage(settings: Settings, network: Proxy) -> None:
    with capture_logs() as logs:
        async with process(settings) as one, process(settings) as other:
            network.cut()
            await until_true(lambda: one.signals.degraded and other.signals.degraded, "both notice")
            assert one.missed >= 1, "listeners are told that hints may be lost"
            one.signals.publish("work", "lost")
            missed = one.missed
            network.restore()
            await until_true(lambda: not one.signals.degraded and not other.signals.degraded, "both recover")
            assert one.missed > missed
            await wait_until_connected(one)
            one.signals.publish("work", "found")
            await until_true(lambda: other.hints("work")[-1:] == ["found"], "hints come again")
    assert (count_events(logs, "signals.degraded"), count_events(logs, "signals.restored")) == (2, 2), (
        "each process logs each event once"
    )


async def test_missing_echo_reveals_silent_connection(settings: Settings, network: Proxy) -> None:
    with capture_logs() as logs:
        async with process(settings) as one:
            network.fall_silent()
            await until_true(lambda: one.signals.degraded, "the silence is noticed")
            missed = one.missed
            network.restore()
            await until_true(lambda: not one.signals.degraded, "it recovers by itself")
            assert one.missed > missed
            one.signals.publish("work", "after")
            await until_true(lambda: one.hints("work")[-1:] == ["after"], "hints come again")
    assert (count_events(logs, "signals.degraded"), count_events(logs, "signals.restored")) == (1, 1)


async def test_healthy_signals_log_nothing(settings: Settings) -> None:
    with capture_logs() as logs:
        async with process(settings) as one:
            echoes = 0
            received = one.signals._received

            def counting(topic: Topic | None, payload: str | bytes) -> None:
                nonlocal echoes
                echoes += topic is None
                received(topic, payload)

            one.signals._received = counting  # type: ignore[method-assign]
            await until_true(lambda: echoes >= 2, "pings come back")
            assert not one.signals.degraded
    assert not [entry for entry in logs if entry["event"].startswith("signals.")]


async def test_hint_of_max_payload_arrives_and_larger_one_is_dropped(settings: Settings) -> None:
    async with process(settings) as one:
        largest = "é" * (one.signals.max_payload // 2)
        one.signals.publish("work", largest + "é")
        one.signals.publish("work", largest)
        one.signals.publish("work", "small")
        await until_true(lambda: "small" in one.hints("work"), "the carrier goes on")
        assert sorted(one.hints("work"), key=len) == ["small", largest]
        assert not one.signals.degraded


async def test_many_hints_at_once_arrive(settings: Settings) -> None:
    """The order is not guaranteed."""
    async with process(settings) as one, process(settings) as other:
        sent = {f"hint {number}" for number in range(3000)}
        for hint in sent:
            one.signals.publish("events", hint)
        await until_true(lambda: set(other.hints("events")) == sent, "all are there")


async def test_delayed_hint_is_sent_with_next_one_or_after_delay(settings: Settings) -> None:
    async with process(settings) as one:
        one.signals.publish("work", "delayed", max_delay=0.05)
        await until_true(lambda: one.hints("work") == ["delayed"], "it is sent after its delay")
        one.signals.publish("work", "more delayed", max_delay=3600)
        one.signals.publish("work", "urgent")
        await until_true(lambda: sorted(one.hints("work")[1:]) == ["more delayed", "urgent"], "it went along")


async def test_signals_recover_with_full_queue_of_hints(settings: Settings, network: Proxy) -> None:
    async with process(settings) as one:
        network.cut()
        await until_true(lambda: one.signals.degraded, "it notices")
        for number in range(25_000):
            one.signals.publish("work", f"hint {number}")
        network.restore()
        await until_true(lambda: not one.signals.degraded, "it recovers")


async def test_signals_can_be_stopped_at_any_moment(settings: Settings) -> None:
    database = Database(settings, "test")
    await database.open()
    for milliseconds in range(0, 40, 2):
        one = Process(signals_for(database))
        await one.signals.start()
        one.signals.publish("work", "hint")
        await asyncio.sleep(milliseconds / 1000)
        async with asyncio.timeout(60):
            await one.signals.stop()
    await database.close()

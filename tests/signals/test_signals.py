"""What both carriers of hints promise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.lifecycle.cancelling import cancel_all
from holdfast.settings import Settings
from holdfast.signals.choose import signals_for
from tests.signals.rig import Process, hears_itself, process, signal_settings
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
    """What is between the processes and the carrier."""
    chosen = PostgresProxy(database_url) if request.param == "postgres" else RedisProxy(redis)
    async with chosen as proxy:
        yield proxy


@pytest.fixture
def settings(network: Proxy, database_url: str) -> Settings:
    if isinstance(network, PostgresProxy):
        return signal_settings(database_url, direct_database_url=network.url)
    return signal_settings(database_url, redis_url=network.url)


def said(logs: list[Any], event: str) -> int:
    return sum(entry["event"] == event for entry in logs)


async def test_a_hint_reaches_every_process(settings: Settings) -> None:
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


async def test_hint_that_a_listener_cannot_use_is_lost_and_no_other(settings: Settings) -> None:
    def refuse(payload: str | None) -> None:
        if payload == "strange":
            raise ArithmeticError

    database = Database(settings, "test")
    signals = signals_for(database)
    heard: list[str | None] = []
    signals.listen("work", refuse)
    signals.listen("work", heard.append)
    async with process(settings) as other:
        await database.open()
        running = asyncio.create_task(signals.run())
        try:
            await until_true(lambda: None in heard, "the process has joined")
            for hint in ("strange", "usual"):
                other.signals.publish("work", hint)
            await until_true(lambda: "usual" in heard, "the next hint is there")
            assert not signals.degraded
            assert not running.done()
        finally:
            await cancel_all([running])
            await database.close()


async def test_whoever_follows_a_thread_has_its_hints(settings: Settings) -> None:
    thread, other_thread = uuid4(), uuid4()
    async with process(settings) as one, process(settings) as other:
        joined: list[str] = []
        one.signals.follow(thread, lambda: joined.append("thread"))
        if settings.redis_url is not None:
            await until_true(lambda: joined == ["thread"], "it is told from when on hints come")
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
            await until_true(lambda: "other" in joined, "it is told from when on hints of the other come")
        other.signals.publish("events", "now here", thread_id=other_thread)
        await until_true(lambda: "now here" in one.hints("events"), "they come")


async def test_hints_from_before_a_connection_are_announced_as_missed(settings: Settings, network: Proxy) -> None:
    with capture_logs() as logs:
        async with process(settings) as one, process(settings) as other:
            network.cut()
            await until_true(lambda: one.signals.degraded and other.signals.degraded, "both notice")
            assert one.missed >= 1, "it is told to look for itself"
            one.signals.publish("work", "lost")
            missed = one.missed
            network.restore()
            await until_true(lambda: not one.signals.degraded and not other.signals.degraded, "both recover")
            assert one.missed > missed
            await hears_itself(one)
            one.signals.publish("work", "found")
            await until_true(lambda: other.hints("work")[-1:] == ["found"], "hints come again")
    assert (said(logs, "signals.degraded"), said(logs, "signals.restored")) == (2, 2), "each says it once"


async def test_a_connection_that_falls_silent_is_noticed_by_the_missing_echo(
    settings: Settings, network: Proxy
) -> None:
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
    assert (said(logs, "signals.degraded"), said(logs, "signals.restored")) == (1, 1)


async def test_nothing_is_said_while_all_is_well(settings: Settings) -> None:
    with capture_logs() as logs:
        async with process(settings) as one:
            echoes = 0
            received = one.signals._received  # type: ignore[attr-defined]

            def counting(topic: str | None, payload: str) -> None:
                nonlocal echoes
                echoes += topic is None
                received(topic, payload)

            one.signals._received = counting  # type: ignore[attr-defined]
            await until_true(lambda: echoes >= 2, "pings come back")
            assert not one.signals.degraded
    assert not [entry for entry in logs if entry["event"].startswith("signals.")]


async def test_the_largest_hint_arrives_and_a_larger_one_is_lost(settings: Settings) -> None:
    async with process(settings) as one:
        largest = "é" * (one.signals.max_payload // 2)
        one.signals.publish("work", largest + "é")
        one.signals.publish("work", largest)
        one.signals.publish("work", "small")
        await until_true(lambda: "small" in one.hints("work"), "the carrier goes on")
        assert sorted(one.hints("work"), key=len) == ["small", largest]
        assert not one.signals.degraded


async def test_many_hints_at_once_all_arrive(settings: Settings) -> None:
    """In whatever order: none is promised."""
    async with process(settings) as one, process(settings) as other:
        sent = {f"hint {number}" for number in range(3000)}
        for hint in sent:
            one.signals.publish("events", hint)
        await until_true(lambda: set(other.hints("events")) == sent, "all are there")


async def test_a_patient_hint_is_sent_with_the_next_one_or_by_itself(settings: Settings) -> None:
    async with process(settings) as one:
        one.signals.publish("work", "patient", patience=0.05)
        await until_true(lambda: one.hints("work") == ["patient"], "it does not wait for ever")
        one.signals.publish("work", "more patient", patience=3600)
        one.signals.publish("work", "urgent")
        await until_true(lambda: sorted(one.hints("work")[1:]) == ["more patient", "urgent"], "it went along")


async def test_more_hints_than_can_wait_do_not_keep_it_from_recovering(settings: Settings, network: Proxy) -> None:
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
        running = asyncio.create_task(one.signals.run())
        one.signals.publish("work", "hint")
        await asyncio.sleep(milliseconds / 1000)
        async with asyncio.timeout(60):
            await cancel_all([running])
    await database.close()

"""Signals over Redis: URLs, outages, subscriptions, Sentinel and Cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from uuid import uuid4

import pytest
from redis.crc import key_slot
from structlog.testing import capture_logs

from holdfast.db.connect import Database
from holdfast.errors import SettingsError
from holdfast.signals.choose import signals_for
from holdfast.signals.redis_url import parse_redis_url
from tests.signals.rig import Process, process, signal_settings, wait_until_connected
from tests.support.redis_server import RedisCluster, RedisSentinel, RedisServer, newer_redis
from tests.support.servers import free_port
from tests.support.waiting import until_true


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def wait_for_hint(sender: Process, receiver: Process, hint: str) -> None:
    sender.signals.publish("work", hint)
    await until_true(lambda: hint in receiver.hints("work"), f"{hint} comes through")


@pytest.mark.parametrize("how", ["kill", "pause", "flush"])
async def test_signals_recover_from_redis_outage(redis: RedisServer, database_url: str, how: str) -> None:
    settings = signal_settings(database_url, redis_url=redis.url)
    thread = uuid4()
    with capture_logs() as logs:
        async with process(settings) as one, process(settings) as other:
            other.signals.follow(thread, lambda: None)
            if how == "flush":
                redis.command("FLUSHALL")
            else:
                redis.kill() if how == "kill" else redis.pause()
                await until_true(lambda: one.signals.degraded and other.signals.degraded, "both notice")
                redis.start() if how == "kill" else redis.go_on()
                await until_true(lambda: not one.signals.degraded and not other.signals.degraded, "both recover")
            await wait_for_hint(one, other, "after")
            one.signals.publish("events", "still followed", thread_id=thread)
            await until_true(lambda: "still followed" in other.hints("events"), "subscriptions have survived")
    events = [entry["event"] for entry in logs if entry["event"].startswith("signals.")]
    assert sorted(events) == ([] if how == "flush" else ["signals.degraded"] * 2 + ["signals.restored"] * 2)


async def test_signals_wait_for_redis_to_start(database_url: str) -> None:
    server = RedisServer()
    with capture_logs() as logs:
        async with process(signal_settings(database_url, redis_url=server.url), wait=False) as one:
            await until_true(lambda: one.signals.degraded, "it is missed")
            with server:
                await until_true(lambda: not one.signals.degraded, "it is found")
                await wait_for_hint(one, one, "now")
    degraded, *_ = [entry for entry in logs if entry["event"] == "signals.degraded"]
    assert degraded["redis"] == server.url
    assert [entry["event"] for entry in logs].count("signals.restored") == 1


async def test_process_uses_two_connections_and_one_channel_for_each_thread(
    redis: RedisServer, database_url: str
) -> None:
    async with process(signal_settings(database_url, redis_url=redis.url)) as one:
        threads = [uuid4() for _ in range(1200)]
        joined: list[int] = []
        for number, thread in enumerate(threads):
            one.signals.follow(thread, lambda number=number: joined.append(number))  # type: ignore[misc]
        await until_true(lambda: sorted(joined) == list(range(1200)), "all are subscribed to")
        assert redis.connections() == 2
        assert len(redis.command("PUBSUB", "CHANNELS", "*:events:*")) == 1200
        for thread in threads:
            one.signals.unfollow(thread)
        await until_true(lambda: not redis.command("PUBSUB", "CHANNELS", "*:events:*"), "nothing is left behind")
    await until_true(lambda: redis.connections() == 0, "the connections are closed")


async def test_installations_on_one_redis_are_separate(redis: RedisServer, database_url: str, server_url: str) -> None:
    here = signal_settings(database_url, redis_url=redis.url)
    there = signal_settings(server_url, redis_url=redis.url)
    elsewhere = signal_settings(database_url, redis_url=redis.url, db_schema="other")
    async with process(here) as one, process(there) as two, process(elsewhere) as three:
        for receiver in (one, two, three):
            receiver.signals.publish("work", "mine")
        await until_true(
            lambda: all("mine" in receiver.hints("work") for receiver in (one, two, three)), "each has its own"
        )
        one.signals.publish("work", "not yours")
        await wait_for_hint(one, one, "last")
        for receiver in (two, three):
            await wait_for_hint(receiver, receiver, "own last")
            assert "not yours" not in receiver.hints("work")


async def test_signals_follow_master_of_sentinel_after_fail_over(database_url: str) -> None:
    with ExitStack() as servers:
        master = servers.enter_context(RedisServer())
        replica = servers.enter_context(RedisServer("--replicaof", "127.0.0.1", str(master.port)))
        sentinel = servers.enter_context(RedisSentinel(master, "fleet"))
        await until_true(
            lambda: len(sentinel.command("SENTINEL", "REPLICAS", "fleet")) == 1, "the sentinel knows the replica"
        )
        unused = free_port()
        url = f"redis+sentinel://127.0.0.1:{unused},127.0.0.1:{sentinel.port}/fleet/0"
        async with process(signal_settings(database_url, redis_url=url)) as one:
            assert master.connections() >= 2
            master.kill()
            await until_true(lambda: one.signals.degraded, "the master is missed")
            # After a pause of the machine, a sentinel does nothing for half a minute.
            await until_true(lambda: not one.signals.degraded, "the new one is found", patience=150)
            await wait_for_hint(one, one, "on the replica that was")
            assert replica.command("ROLE")[0] in (b"master", "master")


async def test_signals_over_cluster_before_redis_7(database_url: str) -> None:
    with RedisCluster() as cluster:
        settings = signal_settings(database_url, redis_url=cluster.url)
        async with process(settings) as one, process(settings) as other:
            await wait_for_hint(one, other, "hint")


async def test_signals_follow_slot_to_another_shard(database_url: str) -> None:
    with RedisCluster(newer_redis(7)) as cluster:
        settings = signal_settings(database_url, redis_url=cluster.url)
        async with process(settings) as one, process(settings) as other:
            thread = uuid4()
            other.signals.follow(thread, lambda: None)
            await wait_for_hint(one, other, "hint")
            sharded = {node: node.command("PUBSUB", "SHARDCHANNELS") for node in cluster.nodes}
            [owner] = [node for node, channels in sharded.items() if channels]
            assert not any(node.command("PUBSUB", "CHANNELS", "*holdfast*") for node in cluster.nodes)
            slot = key_slot(sharded[owner][0])
            target = next(node for node in cluster.nodes if node is not owner)
            identity = target.command("CLUSTER", "MYID")
            for node in cluster.nodes:
                node.command("CLUSTER", "SETSLOT", slot, "NODE", identity)
            await until_true(lambda: bool(target.command("PUBSUB", "SHARDCHANNELS")), "the channels have moved")
            await wait_until_connected(one)
            await wait_until_connected(other)
            await wait_for_hint(one, other, "on the other shard")
            one.signals.publish("events", "still followed", thread_id=thread)
            await until_true(lambda: "still followed" in other.hints("events"), "the thread has moved along")


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://host", "the scheme is none of these"),
        ("redis://host:port", "a host with a port is missing"),
        ("redis://host:99999", "99999 is not a port"),
        ("redis://host/zero", "the database is not a number"),
        ("redis://host/0/1", "there is no use for what comes after the database"),
        ("redis://one,two", "several hosts need"),
        ("redis://", "a host with a port is missing"),
        ("unix://", "the path is missing"),
        ("redis+sentinel://host", "the name of the master is missing"),
        ("redis+cluster://host/3", "a Cluster has only database 0"),
        ("redis://host?retry=1", "retry is not understood"),
        ("redis://user:se@cret:word@host:port", "percent-encode"),
        ("redis+sentinel://host?sentinel_password=secret", "the name of the master is missing"),
    ],
)
async def test_invalid_redis_url_is_refused(url: str, complaint: str) -> None:
    database = Database(signal_settings("postgresql://host/database", redis_url=url), "test")
    with pytest.raises(SettingsError) as refused:
        signals_for(database)
    message = str(refused.value)
    assert message.startswith("REDIS_URL=")
    assert complaint in message
    assert "redis+sentinel://host:26379" in message, "the rule"
    assert "cret" not in message, "passwords are not logged"


def test_parse_redis_url_reads_all_parts() -> None:
    place = parse_redis_url("rediss+sentinel://me:p%40ss@a,[::1]:7000/fleet/3?sentinel_password=x&ssl_ca_certs=/ca.pem")
    assert (place.mode, place.tls, place.master, place.database) == ("sentinel", True, "fleet", 3)
    assert place.addresses == (("a", 26379), ("::1", 7000))
    assert (place.username, place.password, place.sentinel_password) == ("me", "p@ss", "x")
    assert place.tls_options == {"ssl_ca_certs": "/ca.pem"}
    assert "p%40ss" not in place.shown
    socket = parse_redis_url("unix:///run/redis.sock?db=2")
    assert (socket.mode, socket.path, socket.database) == ("socket", "/run/redis.sock", 2)
    assert parse_redis_url("redis+cluster://a,b:7001").addresses == (("a", 6379), ("b", 7001))


@pytest.mark.parametrize("closed", ["sender", "all"])
async def test_hint_is_sent_again_on_closed_connection(redis: RedisServer, database_url: str, closed: str) -> None:
    """A sender that finds its connection closed sends again on a new one, without an outage. A receiver whose
    connection was closed reports that hints may be lost."""
    # No ping is sent in between: the sender detects the closed connection when it sends the hint.
    settings = signal_settings(database_url, redis_url=redis.url, signal_ping=300.0)
    with capture_logs() as logs:
        async with process(settings) as one, process(settings) as other:
            await wait_for_hint(one, other, "before")
            for receiver in (one, other):
                receiver.received["work"].clear()
            redis.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            if closed == "all":
                redis.command("CLIENT", "KILL", "TYPE", "pubsub")
                await until_true(lambda: bool(one.missed and other.missed), "both report that hints may be lost")
                await until_true(lambda: not one.signals.degraded and not other.signals.degraded, "both recover")
            one.signals.publish("work", "after")
            await until_true(lambda: "after" in other.hints("work"), "it arrives")
            assert other.hints("work") == ["after"]
    events = Counter(entry["event"] for entry in logs if entry["event"].startswith("signals."))
    once = {"signals.degraded": 2, "signals.restored": 2}
    assert events == ({} if closed == "sender" else once), "each process logs each event once"


async def test_invalid_utf8_payload_is_dropped(redis: RedisServer, database_url: str) -> None:
    """Everyone who can reach the Redis server can publish any bytes."""
    async with process(signal_settings(database_url, redis_url=redis.url)) as one:
        for channel in redis.command("PUBSUB", "CHANNELS"):
            redis.command("PUBLISH", channel, b"\xff\xfe")
        one.signals.publish("work", "usual")
        await until_true(lambda: one.hints("work") == ["usual"], "the hint is there")
        assert not one.signals.degraded

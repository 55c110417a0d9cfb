"""Signals and Redis: a round trip, and what is in its way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from holdfast.insight.doctor.findings import Verdict
from holdfast.insight.doctor.hints import check_redis, check_signals, redis_finding
from holdfast.insight.doctor.installation import Installation
from tests.support.redis_server import RedisCluster, RedisServer


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def over(installation: Installation, url: str) -> Installation:
    return replace(installation, settings=installation.settings.model_copy(update={"redis_url": url}))


async def test_a_round_trip_over_postgres(installation: Installation) -> None:
    finding = await check_signals(installation)
    assert finding.verdict is Verdict.PASS
    assert "over Postgres came back" in finding.found
    assert (await check_redis(installation)).verdict is Verdict.PASS


async def test_doctor_warns_of_pgbouncer_without_direct_connection(installation: Installation) -> None:
    behind = replace(installation, settings=installation.settings.model_copy(update={"pgbouncer": True}))
    finding = await check_signals(behind)
    assert finding.verdict is Verdict.WARN
    assert "HOLDFAST_DIRECT_DATABASE_URL" in finding.fix


async def test_the_way_past_pgbouncer_leads_nowhere(installation: Installation) -> None:
    update = {"pgbouncer": True, "direct_database_url": "postgresql://127.0.0.1:9/nowhere"}
    finding = await check_signals(replace(installation, settings=installation.settings.model_copy(update=update)))
    assert finding.verdict is Verdict.FAIL
    assert "HOLDFAST_DIRECT_DATABASE_URL" in finding.fix


async def test_a_round_trip_over_redis(installation: Installation, redis: RedisServer) -> None:
    finding = await check_signals(over(installation, redis.url))
    assert finding.verdict is Verdict.PASS, finding
    assert "over Redis" in finding.found
    policy = await check_redis(over(installation, redis.url))
    assert policy.verdict is Verdict.PASS, policy
    assert "noeviction" in policy.found


async def test_a_round_trip_over_a_cluster(installation: Installation) -> None:
    with RedisCluster() as cluster:
        finding = await check_signals(over(installation, cluster.url))
    assert finding.verdict is Verdict.PASS, finding


async def test_a_redis_that_evicts_is_an_error(installation: Installation, redis: RedisServer) -> None:
    redis.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        finding = await check_redis(over(installation, redis.url))
    finally:
        redis.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert finding.verdict is Verdict.FAIL
    assert "allkeys-lru" in finding.found
    assert "noeviction" in finding.fix


async def test_doctor_skips_redis_for_a_user_without_info(installation: Installation, redis: RedisServer) -> None:
    redis.command("ACL", "SETUSER", "shy", "on", ">secret", "+publish", "+subscribe", "resetchannels", "&{holdfast:*")
    shy = over(installation, redis.url.replace("redis://", "redis://shy:secret@"))
    assert (await check_signals(shy)).verdict is Verdict.PASS
    finding = await check_redis(shy)
    assert finding.verdict is Verdict.SKIP
    assert "secret" not in finding.found + finding.fix


async def test_a_redis_that_is_not_there(installation: Installation) -> None:
    gone = over(installation, "redis://:secret@127.0.0.1:9/0")
    for finding in (await check_signals(gone), await check_redis(gone)):
        assert finding.verdict is Verdict.FAIL
        assert "secret" not in finding.found


def test_an_old_redis() -> None:
    old = redis_finding("here", {"redis_version": "5.0.1", "maxmemory_policy": "noeviction"})
    assert old.verdict is Verdict.FAIL

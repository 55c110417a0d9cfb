"""Checks that a hint makes the round trip over Postgres or Redis, and that Redis is configured for it."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from holdfast.insight.doctor.findings import Finding, Problem, Verdict, failed, passed, skipped, summed_up, warned
from holdfast.insight.doctor.installation import Installation, brief
from holdfast.signals.redis import IDENTIFY, IDENTIFY_BY_NAME, channel_prefix
from holdfast.signals.redis_nodes import open_connection
from holdfast.signals.redis_url import RedisTarget, parse_redis_url

MINIMUM_REDIS = 6
POLLING_MEANWHILE = "Processes poll until it is back: nothing is lost, everything is slower."


async def check_signals(installation: Installation) -> Finding:
    """Send a hint on a channel of this check's own and wait for it."""
    if installation.settings.redis_url is None:
        return await _check_over_postgres(installation)
    target = parse_redis_url(installation.settings.redis_url)
    try:
        return await _check_over_redis(installation, target)
    except (RedisError, OSError) as error:
        return failed(
            f"no round trip over Redis ({target.shown}): {brief(error)}",
            f"Start it or correct REDIS_URL; its user needs the channels {{holdfast:*. {POLLING_MEANWHILE}",
        )


async def _check_over_postgres(installation: Installation) -> Finding:
    settings = installation.settings
    if settings.session_url is None:
        return warned(
            "none: behind PgBouncer nobody can listen, and processes poll",
            "Set HOLDFAST_DIRECT_DATABASE_URL to a way past PgBouncer, or REDIS_URL.",
        )
    channel = f"{settings.db_schema}_doctor_{uuid4().hex}"
    try:
        async with await installation.connect(session=True) as listening, await installation.connect() as sending:
            await listening.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
            began = time.monotonic()
            await sending.execute("SELECT pg_notify(%s, '')", (channel,))
            async for _ in listening.notifies(timeout=installation.check_timeout_seconds, stop_after=1):
                return passed(f"a hint over Postgres came back in {_milliseconds(began)}")
    except psycopg.OperationalError as error:
        return failed(
            f"no round trip over Postgres: {brief(error)}",
            f"Correct HOLDFAST_DIRECT_DATABASE_URL, or DATABASE_URL. {POLLING_MEANWHILE}",
        )
    return failed(
        f"a hint over Postgres did not come back within {installation.check_timeout_seconds:g} seconds",
        "If a pooler in transaction mode is in between, set HOLDFAST_PGBOUNCER and HOLDFAST_DIRECT_DATABASE_URL.",
    )


async def _check_over_redis(installation: Installation, target: RedisTarget) -> Finding:
    prefix = await _prefix(installation)
    channel = f"{prefix}doctor:{uuid4().hex}"
    listening = await open_connection(target, prefix)
    try:
        sending = await open_connection(target, prefix)
        try:
            for sharded in (True, False) if target.mode == "cluster" else (False,):
                try:
                    began = await _send_and_receive(listening, sending, channel, sharded=sharded)
                except ResponseError as error:
                    if sharded and "unknown command" in str(error).lower():
                        continue  # A Cluster before Redis 7.
                    raise
                return passed(f"a hint over Redis ({target.shown}) came back in {_milliseconds(began)}")
        finally:
            await sending.disconnect(nowait=True)
    finally:
        await listening.disconnect(nowait=True)
    raise AssertionError("one of the two ways was tried last")


async def _send_and_receive(
    listening: AbstractConnection, sending: AbstractConnection, channel: str, *, sharded: bool
) -> float:
    """Send a hint and wait until it arrives. Returns when it was sent. The caller bounds the wait."""
    kind = "S" if sharded else ""
    await listening.send_command(f"{kind}SUBSCRIBE", channel)
    await listening.read_response()
    began = time.monotonic()
    await sending.send_command(f"{kind}PUBLISH", channel, "")
    await sending.read_response()
    while (await listening.read_response(timeout=math.inf))[0] not in (b"message", b"smessage"):
        pass
    return began


async def _prefix(installation: Installation) -> str:
    """The prefix of the channels that the processes use. On a Redis Cluster the prefix decides which node has them."""
    async with installation.reading() as connection:
        try:
            async with connection.transaction():
                row = await (await connection.execute(IDENTIFY)).fetchone()
        except psycopg.errors.InsufficientPrivilege:
            row = await (await connection.execute(IDENTIFY_BY_NAME)).fetchone()
    assert row is not None
    return channel_prefix(installation.settings.db_schema, str(row["identity"]))


def _milliseconds(began: float) -> str:
    return f"{(time.monotonic() - began) * 1000:.1f} ms"


async def check_redis(installation: Installation) -> Finding:
    """Whether Redis is recent enough, and does not evict keys."""
    if installation.settings.redis_url is None:
        return passed("not used: signals travel over Postgres")
    target = parse_redis_url(installation.settings.redis_url)
    try:
        async with asyncio.timeout(installation.check_timeout_seconds):
            connection = await open_connection(target, "{holdfast:")
            try:
                about = {**await _info(connection, "server"), **await _info(connection, "memory")}
            finally:
                await connection.disconnect(nowait=True)
    except ResponseError as error:
        return skipped(f"cannot be checked: {brief(error)}", "Its user may not use INFO; ask whoever runs it.")
    except (RedisError, OSError) as error:
        return failed(
            f"{target.shown} does not answer: {brief(error)}", f"Start it or correct REDIS_URL. {POLLING_MEANWHILE}"
        )
    return redis_finding(target.shown, about)


def redis_finding(where: str, about: dict[str, str]) -> Finding:
    """The finding about a server with this answer to INFO."""
    version = about.get("redis_version", "")
    policy = about.get("maxmemory_policy", "")
    problems = []
    major = version.split(".", 1)[0]
    if not major.isdecimal() or int(major) < MINIMUM_REDIS:
        problems.append(
            Problem(Verdict.FAIL, f"Redis {version or 'of no known version'}", f"Use Redis {MINIMUM_REDIS} or later.")
        )
    if policy not in ("noeviction", ""):
        found = f"maxmemory-policy is {policy}: when memory is short it deletes keys that somebody relies on"
        fix = "CONFIG SET maxmemory-policy noeviction (and in redis.conf), or use a Redis that is no cache."
        problems.append(Problem(Verdict.FAIL, found, fix))
    if not policy:
        found = "its maxmemory-policy is not told"
        problems.append(Problem(Verdict.WARN, found, "Ask whoever runs it: it must be noeviction."))
    return summed_up(problems, f"Redis {version} at {where}, {policy}")


async def _info(connection: AbstractConnection, section: str) -> dict[str, str]:
    await connection.send_command("INFO", section)
    answer: Any = await connection.read_response()
    text = answer.decode() if isinstance(answer, bytes) else str(answer)
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, value in pairs}

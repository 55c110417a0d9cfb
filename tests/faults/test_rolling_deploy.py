"""A deploy: a newer version migrates and joins, every process is replaced, and then all of it is taken back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from holdfast.db.migrate import Migration, migrations
from tests.support.fleet import Fleet, Member, until
from tests.support.older_version import unpack_older_version

# Whatever a version that is still running may use. Without an index it works, but may read a whole table each time.
CONTRACTS = re.compile(
    r"\b(DROP\s+(TABLE|COLUMN|INDEX)|RENAME\s|ALTER\s+COLUMN\s+\w+\s+(TYPE|SET\s+NOT\s+NULL|DROP\s+DEFAULT))", re.I
)
# An event for Holdfast's own use, which web processes of the older version show to clients. SDKs pass over it.
UNKNOWN = ("released",)
# What migrations drop all the same, and why they may.
DROPPED = {
    # Long applied: it is part of every version that can be running.
    "0012_retention": ["DROP INDEX"],
    # No released version claims by it. The one that these tests deploy from stays right, and reads the whole queue for
    # each claim meanwhile: 34 ms instead of 1 with 100,000 runs queued (2026-11-19).
    "0027_run_turn": ["DROP INDEX"],
}
ADDS_REQUIRED = re.compile(r"ADD\s+COLUMN(?![^,;]*\bDEFAULT\b)[^,;]*\bNOT\s+NULL\b", re.I)


@pytest.fixture
async def installed(server_url: str, tmp_path: Path) -> AsyncIterator[tuple[Fleet, dict[str, str]]]:
    """A fleet on a database that the older version has made, and the environment that makes a process the older
    version."""
    older = unpack_older_version(tmp_path / "older")
    name = f"test_{uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}".encode())
        async with Fleet(make_conninfo(server_url, dbname=name), tmp_path) as fleet:
            migrate(fleet, older)
            fleet.steps.create()
            yield fleet, older
        server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def migrate(fleet: Fleet, environ: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "holdfast", "migrate"],
        env={**os.environ, "DATABASE_URL": fleet.database_url, **environ},
        check=True,
        timeout=60,
    )


# uvicorn logs this for each stream that a web process of the older version ends when it stops.
@pytest.mark.expects_errors("ASGI callable returned without completing response.")
async def test_two_versions_serve_one_database_and_no_run_is_lost(installed: tuple[Fleet, dict[str, str]]) -> None:
    """A deploy, and the way back: the older version goes on under the newer schema."""
    fleet, older = installed
    [old_web], old_workers = await fleet.start(webs=1, workers=2, environ=older)
    runs = [await fleet.post("steps", {"hold": "s3"}) for _ in range(6)]
    for run in runs:
        await fleet.held(run, "s3")
    before = await numbers(fleet)
    migrate(fleet, {})
    assert await numbers(fleet) > before, "the newer version has migrations of its own"

    # Both versions at once: either takes requests, and either executes them.
    [new_web], new_workers = await fleet.start(webs=1, workers=2)
    urls = [old_web.url, new_web.url]
    watching = [fleet.watch(run, urls) for run in runs]
    # More than the workers of one version can hold, so that the others have to take some.
    crowd = [await fleet.post("steps", {"hold": "s1"}, url=urls[number % 2]) for number in range(30)]
    watching += [fleet.watch(run, urls[::-1]) for run in crowd]
    runs += crowd

    async def executed_by_both() -> bool:
        pids = {mark.pid for run in crowd for mark in fleet.steps.marks(run.run_id)}
        return all(pids & {worker.pid for worker in workers} for workers in (old_workers, new_workers))

    await until(executed_by_both, "the workers of either version execute runs, under the newer schema")
    for run in crowd:
        fleet.steps.open_gate(run.thread_id)
    await asyncio.gather(*(task for _, task in watching[6:]))

    # The older ones are drained: their runs go on at the newer ones.
    await stop(*old_workers)
    for run in runs[:3]:
        fleet.steps.open_gate(run.thread_id)
    await stop(old_web)
    await asyncio.gather(*(task for _, task in watching[:3]))

    # And back again, with runs under way that the newer version has begun or taken over.
    held = [await fleet.post("steps", {"hold": "s3"}, url=new_web.url) for _ in range(3)]
    for run in held:
        await fleet.held(run, "s3")
    [back], _ = await fleet.start(webs=1, workers=1, environ=older)
    await stop(*new_workers)
    urls.append(back.url)
    watching += [fleet.watch(run, urls) for run in held]
    await stop(new_web)
    last = await fleet.post("steps", {}, url=back.url)
    watching.append(fleet.watch(last, urls))
    for run in runs[3:6] + held:
        fleet.steps.open_gate(run.thread_id)
    runs += [*held, last]
    await asyncio.gather(*(task for _, task in watching))
    for run, (watcher, _) in zip(runs, watching, strict=True):
        row = await fleet.row(run)
        assert (row["crashes"], row["retries"]) == (0, 0), "a deploy is nobody's crash"
        await fleet.prove_finished(run, watcher, attempts=None, unknown=UNKNOWN)


async def numbers(fleet: Fleet) -> list[int]:
    return [row["number"] for row in await fleet.query("SELECT number FROM holdfast_migration ORDER BY number")]


async def stop(*members: Member) -> None:
    """Gone in good order, and by that signal."""
    for member in members:
        member.signal(signal.SIGTERM)
    for member in members:
        assert await member.ended() in (0, -signal.SIGTERM)


@pytest.mark.parametrize("migration", migrations()[1:], ids=lambda migration: migration.name)
def test_a_migration_takes_nothing_from_the_version_before(migration: Migration) -> None:
    """Contracting is for the release after the one that stopped using it; it is then listed here, with the reason."""
    statements = migration.statements
    found = [match.group() for pattern in (CONTRACTS, ADDS_REQUIRED) for match in pattern.finditer(statements)]
    assert found == DROPPED.get(migration.name, [])

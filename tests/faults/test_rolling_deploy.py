"""A deploy: the schema grows under the old version, then every process is replaced, one after the other."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import LiteralString

import psycopg
import pytest

from holdfast.db.migrate import migrations
from tests.support.fleet import Fleet

# What a next version might add. It expands: the version that runs knows nothing of it and is not disturbed.
# Each by itself: a change that holds one table and waits for the next may be in a deadlock with whoever uses both.
NEXT: tuple[LiteralString, ...] = (
    "SET search_path TO holdfast",
    "ALTER TABLE run ADD COLUMN next_version_says text NOT NULL DEFAULT 'something'",
    "ALTER TABLE thread ADD COLUMN next_version_says text",
    "ALTER TABLE event ADD COLUMN next_version_says text",
    "ALTER TABLE worker ADD COLUMN next_version_says integer NOT NULL DEFAULT 0",
    "CREATE TABLE next_version (number integer PRIMARY KEY)",
    "INSERT INTO holdfast_migration (number, name) VALUES (9999, '9999_next')",
)

# Whatever a version that is still running may use.
CONTRACTS = re.compile(
    r"\b(DROP\s+(TABLE|COLUMN)|RENAME\s|ALTER\s+COLUMN\s+\w+\s+(TYPE|SET\s+NOT\s+NULL|DROP\s+DEFAULT))", re.I
)
ADDS_REQUIRED = re.compile(r"ADD\s+COLUMN(?![^,;]*\bDEFAULT\b)[^,;]*\bNOT\s+NULL\b", re.I)


async def test_runs_and_their_watchers_outlive_a_rolling_deploy(fleet: Fleet) -> None:
    webs, workers = await fleet.start(webs=2, workers=2)
    runs = [await fleet.post("steps", {"hold": "s3"}) for _ in range(10)]
    for run in runs:
        await fleet.held(run, "s3")
    with psycopg.connect(fleet.database_url, autocommit=True) as connection:
        for statement in NEXT:
            connection.execute(statement)
    fresh = [await fleet.start_web() for _ in webs]
    watching = [fleet.watch(run, [web.url for web in (*webs, *fresh)]) for run in runs]
    for old in workers:
        await fleet.start_worker()
        old.signal(signal.SIGTERM)
        assert await old.ended() == 0
    for run in runs:
        fleet.steps.open_gate(run.thread_id)
    for old in webs:
        old.signal(signal.SIGTERM)
        # Gone in good order, and by that signal.
        assert await old.ended() in (0, -signal.SIGTERM)
    runs.append(await fleet.post("steps", {}))
    watching.append(fleet.watch(runs[-1]))
    await asyncio.gather(*(task for _, task in watching))
    for run, (watcher, _) in zip(runs, watching, strict=True):
        row = await fleet.row(run)
        assert (row["crashes"], row["retries"]) == (0, 0), "a deploy is nobody's crash"
        await fleet.prove_finished(run, watcher, attempts=None)


@pytest.mark.parametrize("migration", migrations()[1:], ids=lambda migration: migration.name)
def test_a_migration_takes_nothing_from_the_version_before(migration: object) -> None:
    """Contracting is for the release after the one that stopped using it; it is then listed here, with the reason."""
    statements = getattr(migration, "statements")  # noqa: B009
    found = [match.group() for pattern in (CONTRACTS, ADDS_REQUIRED) for match in pattern.finditer(statements)]
    assert found == []

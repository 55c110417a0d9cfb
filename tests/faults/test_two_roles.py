"""Web processes and workers that connect as different roles, none of them a superuser."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from holdfast.insight.doctor.connections import check_connections
from holdfast.insight.doctor.database import check_migrations, check_rights
from holdfast.insight.doctor.findings import Verdict
from holdfast.insight.doctor.installation import Installation
from holdfast.insight.doctor.work import check_leases, check_workers
from holdfast.settings import load_settings
from tests.support.fleet import INTERVALS, Fleet, until
from tests.support.roles import create_role


@pytest.fixture
def roles(database_url: str) -> Iterator[tuple[str, str]]:
    """The same database as two roles that own nothing."""
    suffix = uuid4().hex[:8]
    names = (f"holdfast_web_{suffix}", f"holdfast_worker_{suffix}")
    for name in names:
        create_role(database_url, name)
    yield make_conninfo(database_url, user=names[0]), make_conninfo(database_url, user=names[1])
    with psycopg.connect(database_url, autocommit=True) as connection:
        for name in names:
            connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
            connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


# Long enough for a busy machine: a worker that is declared lost was not seen, and has not lost its lease.
LEASE = {"LEASE_DURATION_SECONDS": "30"}
# Ten times as long as a worker without a session stays online.
WATCHED_SECONDS = 10 * float(INTERVALS["SESSION_GRACE_SECONDS"])


async def test_workers_of_another_role_stay_online_and_are_taken_over(fleet: Fleet, roles: tuple[str, str]) -> None:
    as_web, as_worker = roles
    # The web process leads: it is the one that watches the sessions of the other role.
    web = await fleet.start_web({**LEASE, "DATABASE_URL": as_web})

    async def leads() -> bool:
        return bool(web.logged("upkeep.leading"))

    await until(leads, "the web process leads")
    await asyncio.gather(*(fleet.start_worker({**LEASE, "DATABASE_URL": as_worker}) for _ in range(2)))
    started = {row["worker_id"]: row["lease_until"] for row in await fleet.workers()}
    run = await fleet.post("steps", {"hold": "s3"})
    watcher, watching = fleet.watch(run)
    await fleet.held(run, "s3")

    async def renewed_for_long() -> bool:
        rows = await fleet.query("SELECT worker_id, status, lease_until FROM worker")
        assert [row["status"] for row in rows] == ["online", "online"], "a living worker was declared lost"
        return all((row["lease_until"] - started[row["worker_id"]]).total_seconds() > WATCHED_SECONDS for row in rows)

    await until(renewed_for_long, "both workers have renewed their leases over and over")
    for url in roles:
        seen = Installation(load_settings({}, database_url=url))
        for check in (check_rights, check_migrations, check_workers, check_leases):
            finding = await check(seen)
            assert finding.verdict is Verdict.PASS, finding
        # Sessions of the other role are counted, too: two workers with four each, and the web process. The verdict
        # depends on what else uses the server.
        finding = await check_connections(seen)
        assert int(finding.found.rsplit("of which ", 1)[1].split()[0]) >= 10
    (await fleet.owner(run)).kill()
    await fleet.taken_over(run)
    fleet.steps.open_gate(run.thread_id)
    await watching
    await fleet.prove_finished(run, watcher, attempts=[1, 2], nodes=["s1", "s2", "s3", "s3", "s4", "s5"])
    (lost,) = web.logged("worker.lost")
    assert lost["reason"] != "its lease expired"

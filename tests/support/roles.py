"""Postgres roles without superuser, with exactly the rights that docs/operations.md lists."""

from __future__ import annotations

import psycopg
from psycopg import sql

from holdfast.db.rights import role_grants


def create_role(admin_dsn: str, name: str, password: str | None = None, *, schema: str = "holdfast") -> None:
    """Create a login role that may use a migrated schema, and nothing else. `admin_dsn` connects to the schema's
    database as a superuser. A role that exists keeps its rights and gets these as well."""
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        exists = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (name,)).fetchone()
        statement = sql.SQL("{} ROLE {} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE").format(
            sql.SQL("ALTER" if exists else "CREATE"), sql.Identifier(name)
        )
        if password is not None:
            statement += sql.SQL(" PASSWORD {}").format(sql.Literal(password))
        connection.execute(statement)
        found = connection.execute(
            "SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = %s", (schema,)
        ).fetchone()
        assert found is not None, f"the schema {schema} has not been migrated"
        for grant in role_grants(schema, name, owner=found[0]):
            connection.execute(grant.encode())


def drop_role(admin_dsn: str, name: str) -> None:
    """Drop a role that nobody uses any more, with its rights in the database that `admin_dsn` leads to."""
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        for statement in ("DROP OWNED BY {} CASCADE", "DROP ROLE {}"):
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))

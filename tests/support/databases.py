"""Migrated databases for tests, on the shared server.

Creating and dropping a database costs more than most tests. So a database is used again for a later test of the same
process once it is empty, if the last test left its schema, its settings and its statistics as they were. Otherwise it
is dropped.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from holdfast.db.migrate import migrate
from holdfast.settings import load_settings

Row = tuple[Any, ...]
Table = tuple[str, str]

TEMPLATE = "holdfast_template"
# Larger ones are dropped: their emptied catalogs and indexes are not what a new database has.
REUSED_AT_MOST_BYTES = 20_000_000

CLOSE_SESSIONS = """
SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()
"""
COUNT_SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
# Tables of the migrations' own book-keeping keep their rows.
TABLES = """
SELECT n.nspname, c.relname, pg_relation_size(c.oid) AS bytes
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname = 'holdfast' AND c.relname !~ 'migration'
"""
# Deleting the rows of a small table is much faster than truncating it: its indexes stay. Of a larger one, the pages
# that are left over would show in the plans and the sizes that a test looks at.
DELETED_FROM_UP_TO_BYTES = 65_536
# Everything of a database that makes a difference to the next test, besides the rows that are deleted. Databases of
# one template agree in all of it, the ids of transactions included.
DESCRIBE = """
SELECT md5(string_agg(part, ' ' ORDER BY part)) FROM (
  SELECT concat_ws('|', 'class', oid, relname, relnamespace, relowner, relacl, reloptions, relpersistence,
                   relrowsecurity, CASE relkind WHEN 'r' THEN reltuples END) AS part
  FROM pg_class WHERE oid >= 16384 AND relnamespace <> 'pg_toast'::regnamespace
  UNION ALL SELECT concat_ws('|', 'attribute', attrelid, attnum, xmin) FROM pg_attribute WHERE attrelid >= 16384
  UNION ALL SELECT concat_ws('|', 'default', oid, xmin) FROM pg_attrdef
  UNION ALL SELECT concat_ws('|', 'function', oid, xmin) FROM pg_proc WHERE oid >= 16384 OR proacl IS NOT NULL
  UNION ALL SELECT concat_ws('|', 'constraint', oid, xmin) FROM pg_constraint WHERE oid >= 16384
  UNION ALL SELECT concat_ws('|', 'index', indexrelid, xmin) FROM pg_index WHERE indexrelid >= 16384
  UNION ALL SELECT concat_ws('|', 'trigger', oid, xmin) FROM pg_trigger
  UNION ALL SELECT concat_ws('|', 'event trigger', oid, xmin) FROM pg_event_trigger
  UNION ALL SELECT concat_ws('|', 'rule', oid, xmin) FROM pg_rewrite WHERE oid >= 16384
  UNION ALL SELECT concat_ws('|', 'policy', oid, xmin) FROM pg_policy
  UNION ALL SELECT concat_ws('|', 'type', oid, xmin) FROM pg_type WHERE oid >= 16384
  UNION ALL SELECT concat_ws('|', 'schema', oid, xmin) FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp'
  UNION ALL SELECT concat_ws('|', 'extension', oid, xmin) FROM pg_extension
  UNION ALL SELECT concat_ws('|', 'publication', oid, xmin) FROM pg_publication
  UNION ALL SELECT concat_ws('|', 'default right', oid, xmin) FROM pg_default_acl
  UNION ALL SELECT concat_ws('|', 'large object', oid, xmin) FROM pg_largeobject_metadata
  UNION ALL SELECT concat_ws('|', 'statistics', starelid, staattnum) FROM pg_statistic WHERE starelid >= 16384
  UNION ALL SELECT concat_ws('|', 'extended statistics', oid, xmin) FROM pg_statistic_ext
  UNION ALL SELECT concat_ws('|', 'sequence', schemaname, sequencename, last_value) FROM pg_sequences
  UNION ALL SELECT concat_ws('|', 'setting', setrole, setconfig) FROM pg_db_role_setting
    WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
  UNION ALL SELECT concat_ws('|', 'database', datdba, datacl, datconnlimit, datallowconn) FROM pg_database
    WHERE datname = current_database()
  UNION ALL SELECT concat_ws('|', 'migration', m.xmin, m.ctid) FROM holdfast.holdfast_migration m
  UNION ALL SELECT concat_ws('|', 'migration', m.xmin, m.ctid) FROM holdfast.checkpoint_migrations m
  UNION ALL SELECT concat_ws('|', 'migration', m.xmin, m.ctid) FROM holdfast.store_migrations m
) AS parts
"""


def create_template(server_url: str) -> None:
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {TEMPLATE}")
    url = make_conninfo(server_url, dbname=TEMPLATE)
    migrate(load_settings({}, database_url=url))
    with psycopg.connect(url, autocommit=True) as connection:
        # Building an index has set what the planner believes of some tables.
        _truncate(connection, [(schema, table) for schema, table, _ in connection.execute(TABLES).fetchall()])


class Databases:
    """The databases of one process of tests on the shared server."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._server = psycopg.connect(server_url, autocommit=True)
        atexit.register(self._server.close)
        self._free: list[str] = []
        self._like_new = ""

    def take(self) -> str:
        """The name of a migrated, empty database."""
        while self._free:
            name = self._free.pop(0)
            # Some process of an earlier test may still run, and have connected again.
            [connected] = self._server.execute(COUNT_SESSIONS, (name,)).fetchone() or (0,)
            if not connected:
                return name
            self._drop(name)
        name = f"test_{uuid4().hex[:12]}"
        self._server.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}".encode())
        if not self._like_new:
            with self._connect(name) as connection:
                self._like_new = _description(connection)
        return name

    def give_back(self, name: str) -> None:
        self._server.execute(CLOSE_SESSIONS, (name,))
        if self._empty(name):
            self._free.append(name)
        else:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def _empty(self, name: str) -> bool:
        """Empty a database; false if it is not like a new one then."""
        try:
            with self._connect(name) as connection:
                [size] = connection.execute("SELECT pg_database_size(current_database())").fetchone() or (0,)
                if size > REUSED_AT_MOST_BYTES:
                    return False
                tables = connection.execute(TABLES).fetchall()
                _truncate(
                    connection, [(schema, table) for schema, table, size in tables if size > DELETED_FROM_UP_TO_BYTES]
                )
                _delete(
                    connection,
                    [(schema, table) for schema, table, size in tables if 0 < size <= DELETED_FROM_UP_TO_BYTES],
                )
                if _description(connection) != self._like_new:
                    return False
                connection.execute("SELECT pg_stat_reset()")
        except psycopg.Error:
            return False  # The test has done something to it that keeps us out.
        return True

    def _connect(self, name: str) -> psycopg.Connection[Row]:
        return psycopg.connect(
            make_conninfo(self._server_url, dbname=name), autocommit=True, options="-c lock_timeout=5s"
        )


@contextmanager
def own_database(server_url: str) -> Iterator[str]:
    """The URL of a migrated database, for as long as the block lasts."""
    databases = _databases(server_url)
    name = databases.take()
    try:
        yield make_conninfo(server_url, dbname=name)
    finally:
        databases.give_back(name)


@cache
def _databases(server_url: str) -> Databases:
    return Databases(server_url)


def _description(connection: psycopg.Connection[Row]) -> str:
    [found] = connection.execute(DESCRIBE.encode()).fetchone() or ("",)
    return str(found)


def _truncate(connection: psycopg.Connection[Row], tables: Sequence[Table]) -> None:
    if tables:
        names = sql.SQL(", ").join(sql.Identifier(*table) for table in tables)
        connection.execute(sql.SQL("TRUNCATE {} CASCADE").format(names))


def _delete(connection: psycopg.Connection[Row], tables: Sequence[Table]) -> None:
    if tables:
        # Without triggers and foreign keys.
        statements = [sql.SQL("DELETE FROM {}").format(sql.Identifier(*table)) for table in tables]
        connection.execute(sql.SQL("; ").join([sql.SQL("SET session_replication_role = replica"), *statements]))

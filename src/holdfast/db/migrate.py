"""Applies the migrations: numbered SQL files, each applied once, also when many processes start at the same time.

Each migration runs in one transaction, which also records it. A file named `NNNN_name.concurrently.sql` contains one
CREATE INDEX CONCURRENTLY, which cannot run in a transaction. While it builds the index, writes to the table go on.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any, TypeVar

import psycopg
import structlog
from psycopg import Connection, sql
from psycopg.rows import dict_row

from holdfast.db import rights
from holdfast.db.connect import ANSWER_TIMEOUT_SHARE, check_server, connection_parameters
from holdfast.db.database_identity import SAME_DATABASE_RULE, difference, read_database_identity
from holdfast.db.long_statements import LongStatementConnection
from holdfast.db.outages import is_outage
from holdfast.db.session_options import no_transaction_timeout
from holdfast.errors import DatabaseError, DatabaseUnavailable
from holdfast.settings import Settings

log = structlog.get_logger(__name__)

# The advisory lock of each transaction that changes the schema. Earlier versions use this key only.
TRANSACTION_KEY = "hashtextextended('holdfast migrate ' || %s, 0)"
# The advisory lock that one process holds from its first migration to its last. It differs from TRANSACTION_KEY because
# processes of earlier versions wait for that key inside a statement, with a snapshot, and the build of an index waits
# for all snapshots: a build that held their key would deadlock. For the same reason, this version polls for its locks.
SESSION_KEY = "hashtextextended('holdfast migrations of ' || %s, 0)"
TRY_LOCK = f"SELECT pg_try_advisory_xact_lock({TRANSACTION_KEY})"
TRY_SESSION_LOCK = f"SELECT pg_try_advisory_lock({SESSION_KEY})"
# Both keys, for a process without a session. It must not migrate while another process holds SESSION_KEY.
TRY_BOTH_LOCKS = f"SELECT pg_try_advisory_xact_lock({SESSION_KEY}) AND pg_try_advisory_xact_lock({TRANSACTION_KEY})"
UNLOCK_SESSION = f"SELECT pg_advisory_unlock({SESSION_KEY})"
# How often a process that waits for another one polls for the lock.
LOCK_POLL_SECONDS = 0.2
# Log the wait for another process after this time. Usually it is shorter.
REPORT_WAIT_AFTER_SECONDS = 3.0

# While a migration waits for a table's lock, all later statements on the table queue behind it. So it waits for a short
# time only, rolls back, and tries again after a pause.
LOCK_TIMEOUT_SECONDS = 2.0
MAX_LOCK_RETRY_PAUSE_SECONDS = 5.0
# A migration that cannot lock its tables within this time fails.
LOCKING_TIMEOUT_SECONDS = 300.0
# How many times to begin the build of an index that deadlocks end. Each attempt may take hours.
BUILD_ATTEMPTS = 5

# Timeouts of the role or the connection must not end a migration.
TRANSACTION_LIMITS = (
    f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_SECONDS:g}s'; SET LOCAL statement_timeout = 0; "
    "SET LOCAL idle_in_transaction_session_timeout = 0"
)

BUILDS_INDEX = re.compile(r"\b(CREATE\s+(?:UNIQUE\s+)?INDEX)\s+CONCURRENTLY\s+(?:IF\s+NOT\s+EXISTS\s+)?(?P<name>\w+)")
IS_VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)"

TTL_TYPE = """
SELECT atttypid::regtype::text FROM pg_attribute WHERE attrelid = to_regclass('store') AND attname = 'ttl_minutes'
"""

# The tables that record the applied migrations.
RECORD_TABLES = {
    "holdfast_migration": (
        "(number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
    ),
    "checkpoint_migrations": "(v integer PRIMARY KEY)",
    "store_migrations": "(v integer PRIMARY KEY)",
}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    statements: str
    concurrently: bool = False


def migrations() -> list[Migration]:
    """All migrations of this version, in order."""
    found = [
        Migration(int(match[1]), f"{match[1]}_{match[2]}", file.read_text("utf-8"), concurrently=match[3] is not None)
        for file in resources.files("holdfast.db").joinpath("migrations").iterdir()
        if (match := re.fullmatch(r"(\d{4})_(\w+)(\.concurrently)?\.sql", file.name))
    ]
    return sorted(found, key=lambda migration: migration.number)


def migrate(settings: Settings) -> list[str]:
    """Bring the schema up to date and return the names of the migrations that were applied.

    Processes that start together apply each migration once: advisory locks exclude the others. If a migration fails,
    the earlier ones stay applied, and the message names the one that failed. If there is nothing to do, takes no lock.

    Uses DIRECT_DATABASE_URL if it is set. With PgBouncer alone, indexes are built in transactions.

    A migration may take hours, and so may the wait for another process that migrates. If the server hangs meanwhile,
    raises DatabaseUnavailable within three times DATABASE_TIMEOUT.
    """
    pooled = None
    if settings.direct_database_url is not None:
        with _connected(settings, "DATABASE_URL", session=False) as connection:
            check_server(connection, "DATABASE_URL")
            pooled = read_database_identity(connection)
    direct = settings.session_url is not None
    name = "DATABASE_URL" if settings.direct_database_url is None else "DIRECT_DATABASE_URL"
    with _connected(settings, name, session=direct) as connection:
        check_server(connection, name)
        if pooled is not None and (problem := difference(pooled, read_database_identity(connection))) is not None:
            raise DatabaseError(f"{problem}. {SAME_DATABASE_RULE}.")
        try:
            return _Schema(connection, settings.db_schema, has_session=direct).bring_up_to_date()
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
            raise _missing_rights(connection, settings.db_schema, error) from None


@contextmanager
def _connected(settings: Settings, name: str, *, session: bool) -> Iterator[Connection]:
    """A connection for the block. Raises DatabaseUnavailable if it is lost in the block."""
    try:
        connection = LongStatementConnection.connect(
            connection_parameters(settings, "migrate", session=session),
            check_seconds=ANSWER_TIMEOUT_SHARE * settings.database_timeout,
            has_session=session,
            autocommit=True,
            prepare_threshold=None,
        )
    except psycopg.OperationalError as error:
        raise DatabaseError(f"{name} cannot be connected to: {str(error).strip()}") from None
    with connection:
        try:
            yield connection
        except psycopg.Error as error:
            if not is_outage(error):
                raise
            raise DatabaseUnavailable(f"{name} was lost during migrations: {_first_line(error)}.") from error


def _missing_rights(connection: Connection, schema: str, error: psycopg.Error) -> DatabaseError:
    """An error that names the missing rights and the statements that grant them."""
    role = connection.info.user
    with connection.cursor(row_factory=dict_row) as cursor:
        found = cursor.execute(rights.SCHEMA_RIGHTS, rights.parameters(schema)).fetchone()
        tables = cursor.execute(rights.TABLE_RIGHTS, rights.parameters(schema)).fetchall()
    problems, grants = [], []
    if found is None:
        problems.append(f"The schema {schema} (DATABASE_SCHEMA) does not exist, and the role {role} may not create it.")
        grants.append(rights.create_schema(schema, role))
    elif found["lacking"]:
        problems.append(f"The role {role} lacks {' and '.join(found['lacking'])} on the schema {schema}.")
        grants.append(rights.schema_grant(schema, role))
    if lacking := rights.lacking_on_tables(tables):
        problems.append(f"The role {role} lacks rights on tables of the schema {schema}: {lacking}.")
        grants.append(rights.table_grant(schema, role))
    if grants:
        return DatabaseError(f"{' '.join(problems)} Run as the owner of the database: {' '.join(grants)}")
    if (owner := rights.other_owner(tables)) is not None:
        problem = f"The schema {schema} needs migrations, and the role {role} does not own its tables."
        return DatabaseError(f"{problem} {rights.owner_remedy(owner, role)}")
    return DatabaseError(f"The role {role} may not migrate the schema {schema}: {error.diag.message_primary}.")


class _Schema:
    """Migrates the schema of one installation over one connection."""

    def __init__(self, connection: Connection, name: str, *, has_session: bool) -> None:
        """`has_session`: the connection leads to the same server process in each transaction."""
        self._connection = connection
        self._name = name
        self._has_session = has_session

    def bring_up_to_date(self) -> list[str]:
        from langgraph.checkpoint.postgres.base import BasePostgresSaver
        from langgraph.store.postgres.base import BasePostgresStore

        stock = {"checkpoint": BasePostgresSaver.MIGRATIONS, "store": BasePostgresStore.MIGRATIONS}
        with self._connection.transaction():
            self._set_limits()
            _require_table_rights(self._connection, self._name)
            if self._is_current({table: len(steps) for table, steps in stock.items()}):
                return []
        # With a session, one process applies all migrations. Behind PgBouncer, processes may alternate.
        with self._session_lock() if self._has_session else nullcontext():
            return self._bring_up_to_date(stock)

    def _bring_up_to_date(self, stock: Mapping[str, Sequence[str]]) -> list[str]:
        self._transact("The schema", self._create)
        done = self._transact("The schema", self._done)
        applied = [one.name for one in migrations() if one.number not in done and self._apply(one)]
        applied += self._apply_stock("checkpoint", stock["checkpoint"], "langgraph checkpoints")
        applied += self._apply_stock("store", stock["store"], "langgraph store")
        self._transact("The table store", self._widen_ttl)
        return applied

    # --- locks ------------------------------------------------------------------------------------

    def _transact(self, what: str, work: Callable[[], Result]) -> Result:
        """Do `work` in one transaction that holds the advisory lock. If a table is locked, roll back and try again.
        Raises DatabaseError naming `what`."""
        deadline, pause = time.monotonic() + LOCKING_TIMEOUT_SECONDS, LOCK_POLL_SECONDS
        wait = _WaitReport(what)
        while True:
            try:
                with _named(what), self._connection.transaction():
                    self._set_limits()
                    if self._lock():
                        return work()
                wait.report_if_long()
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                if time.monotonic() > deadline:
                    raise DatabaseError(
                        f"{what} could not lock its tables within {LOCKING_TIMEOUT_SECONDS:g} seconds: "
                        "long transactions use them. Find these in pg_stat_activity by xact_start, end them, and start "
                        "again. What came before it is applied."
                    ) from None
                if pause == LOCK_POLL_SECONDS:
                    log.warning("migration.waiting", migration=what, reason="long transactions use its tables")
                pause = min(2 * pause, MAX_LOCK_RETRY_PAUSE_SECONDS)
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311

    def _lock(self) -> bool:
        """Try to take the advisory lock until the end of the current transaction. Returns whether this has
        succeeded."""
        if self._has_session:
            return bool(self._one(TRY_LOCK, self._name))
        return bool(self._one(TRY_BOTH_LOCKS, self._name, self._name))

    @contextmanager
    def _session_lock(self) -> Iterator[None]:
        """Hold the advisory lock of the session, which also covers statements outside transactions."""
        wait = _WaitReport("All")
        while not self._one(TRY_SESSION_LOCK, self._name):
            wait.report_if_long()
            time.sleep(LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            with suppress(psycopg.Error):  # A lost connection holds no locks.
                self._one(UNLOCK_SESSION, self._name)

    def _set_limits(self) -> None:
        """Set the timeouts and the search_path of the current transaction."""
        self._connection.execute(TRANSACTION_LIMITS)
        self._end_transaction_timeout(local=True)
        self._connection.execute(sql.SQL("SET LOCAL search_path TO {}").format(sql.Identifier(self._name)))

    def _end_transaction_timeout(self, *, local: bool) -> None:
        statement = no_transaction_timeout(self._connection.info.server_version, local=local)
        if statement is not None:
            self._connection.execute(statement)

    # --- current state ----------------------------------------------------------------------------

    def _is_current(self, stock: Mapping[str, int]) -> bool:
        """Whether all migrations are applied."""
        if not all(self._exists(table) for table in ("holdfast_migration", *map("{}_migrations".format, stock))):
            return False
        return (
            self._done().issuperset(one.number for one in migrations())
            and all(self._stock_version(table) >= steps for table, steps in stock.items())
            and self._one(TTL_TYPE) != "integer"
        )

    def _done(self) -> set[int]:
        return {row[0] for row in self._connection.execute("SELECT number FROM holdfast_migration")}

    def _stock_version(self, table: str) -> int:
        """The number of LangGraph's own migrations of its tables that are applied."""
        return int(self._one(f"SELECT coalesce(max(v) + 1, 0) FROM {table}_migrations"))

    def _exists(self, table: str) -> bool:
        return bool(self._one("SELECT to_regclass(%s) IS NOT NULL", table))

    def _one(self, statement: str, *parameters: object) -> Any:
        row = self._connection.execute(statement.encode(), parameters or None).fetchone()
        return None if row is None else row[0]

    # --- changes ----------------------------------------------------------------------------------

    def _create(self) -> None:
        # CREATE ... IF NOT EXISTS needs the right to create even if the object exists. These checks let a role without
        # that right use a schema that was created for it, and start a server when there is nothing to migrate.
        if not self._one("SELECT to_regnamespace(%s) IS NOT NULL", self._name):
            self._connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._name)))
        for table, columns in RECORD_TABLES.items():
            if not self._exists(table):
                self._connection.execute(f"CREATE TABLE {table} {columns}".encode())

    def _apply(self, migration: Migration) -> bool:
        """Apply a migration, unless another process has done so meanwhile. Returns whether it was applied here."""
        record = "INSERT INTO holdfast_migration (number, name) VALUES (%s, %s)"

        def transaction() -> bool:
            if migration.number in self._done():
                return False
            self._execute_in_transaction(migration.statements)
            self._connection.execute(record, (migration.number, migration.name))
            return True

        what = f"Migration {migration.name}"
        if not (migration.concurrently and self._has_session):
            self._drop_invalid_indexes(what, [migration.statements])
            return self._transact(what, transaction)
        with _named(what):
            if migration.number in self._done():
                return False
            self._build_index(what, migration.statements)
            self._connection.execute(record, (migration.number, migration.name))
        return True

    def _apply_stock(self, table: str, steps: Sequence[str], label: str) -> list[str]:
        """Apply LangGraph's own migrations of its tables. They are recorded in LangGraph's own tables, so that its
        saver recognises them.

        New tables are created in one transaction. On existing tables, an index that LangGraph builds CONCURRENTLY is
        built so here, too. The tables of semantic search depend on the project's configuration: the processes that load
        it create them.
        """
        what = f"Migration of {label}"
        record = f"INSERT INTO {table}_migrations (v) VALUES (%s)".encode()
        first = self._transact(what, lambda: self._stock_version(table))

        def transaction(through: int) -> None:
            start = self._stock_version(table)
            for number, step in enumerate(steps[start:through], start=start):
                self._execute_in_transaction(step)
                self._connection.execute(record, (number,))

        applied = [f"{label} {first} to {len(steps) - 1}"] if first < len(steps) else []
        if first == 0 or not self._has_session:
            self._drop_invalid_indexes(what, steps[first:])
            self._transact(what, lambda: transaction(len(steps)))
            return applied
        for number, step in enumerate(steps[first:], start=first):
            if BUILDS_INDEX.search(step) is None:
                self._transact(what, partial(transaction, number + 1))
                continue
            with _named(what):
                self._build_index(what, step)
                # A process of an earlier version, which does not use SESSION_KEY, may have recorded it meanwhile.
                self._connection.execute(record + b" ON CONFLICT DO NOTHING", (number,))
        return applied

    def _drop_invalid_indexes(self, what: str, statements: Sequence[str]) -> None:
        """Drop invalid indexes that interrupted builds of these statements have left behind.

        Each drop is a separate transaction: DROP INDEX locks the table against reading, too, which must not last as
        long as a build.
        """

        def drop(index: str) -> None:
            if self._one(IS_VALID, index) is False:
                self._connection.execute(f"DROP INDEX {index}".encode())

        for statement in statements:
            if found := BUILDS_INDEX.search(statement):
                self._transact(what, partial(drop, found["name"]))

    def _execute_in_transaction(self, statement: str) -> None:
        """Execute a statement without CONCURRENTLY, which a transaction may not contain: for new tables, and without a
        session."""
        found = BUILDS_INDEX.search(statement)
        if found is None:
            self._connection.execute(statement.replace(" CONCURRENTLY", "").encode())
        elif not self._one(IS_VALID, found["name"]):
            # IF NOT EXISTS would accept an invalid index, so it is removed.
            self._connection.execute(BUILDS_INDEX.sub(r"\1 \g<name>", statement).encode())

    def _build_index(self, what: str, statement: str) -> None:
        """Build an index without locking its table against writes.

        A build waits for other transactions. If one of them waits for this process, Postgres detects a deadlock and
        ends one of the two. If it ends the build, the build is repeated. Raises DatabaseError naming `what` after
        BUILD_ATTEMPTS deadlocks.
        """
        pause = LOCK_POLL_SECONDS
        for attempt in range(1, BUILD_ATTEMPTS + 1):
            try:
                self._try_to_build_index(statement)
            except psycopg.errors.DeadlockDetected as error:
                if attempt == BUILD_ATTEMPTS:
                    raise DatabaseError(
                        f"{what} failed: {_first_line(error)} in each of {BUILD_ATTEMPTS} attempts to build an index. "
                        "What came before it is applied. Start again when other processes do not change the schema."
                    ) from error
                log.warning("migration.waiting", migration=what, reason="a deadlock ended the build of an index")
            else:
                return
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(2 * pause, MAX_LOCK_RETRY_PAUSE_SECONDS)

    def _try_to_build_index(self, statement: str) -> None:
        """Build the index once. First drop an invalid one that an interrupted build has left behind."""
        found = BUILDS_INDEX.search(statement)
        assert found is not None, statement
        is_valid = self._one(IS_VALID, found["name"])
        if is_valid:
            return
        # SET instead of SET LOCAL: these statements cannot run in a transaction.
        self._connection.execute("SET statement_timeout = 0; SET lock_timeout = 0")
        self._end_transaction_timeout(local=False)
        if is_valid is False:
            self._connection.execute(f"DROP INDEX CONCURRENTLY {found['name']}".encode())
        self._connection.execute(statement.encode())

    def _widen_ttl(self) -> None:
        if self._one(TTL_TYPE) == "integer":
            # LangGraph's store accepts fractions of minutes. An integer column would round half a minute to 0.
            self._connection.execute("ALTER TABLE store ALTER COLUMN ttl_minutes TYPE double precision")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Raise database errors as a DatabaseError that names `what`. The caller handles missing rights and locks."""
    try:
        yield
    except (
        psycopg.errors.DeadlockDetected,
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.InvalidSchemaName,
        psycopg.errors.LockNotAvailable,
    ):
        raise
    except psycopg.Error as error:
        kind = DatabaseUnavailable if is_outage(error) else DatabaseError
        raise kind(f"{what} failed: {_first_line(error)}. What came before it is applied.") from error


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0]


class _WaitReport:
    """Logs a long wait for another process that migrates, once."""

    def __init__(self, migration: str) -> None:
        self._migration = migration
        self._since = time.monotonic()
        self._reported = False

    def report_if_long(self) -> None:
        if not self._reported and time.monotonic() - self._since >= REPORT_WAIT_AFTER_SECONDS:
            self._reported = True
            log.warning("migration.waiting", migration=self._migration, reason="another process migrates")


def _require_table_rights(connection: Connection, schema: str) -> None:
    """Raise InsufficientPrivilege if the role may not use an existing table. Every process and every command migrates
    first, so no later statement fails for this reason."""
    with connection.cursor(row_factory=dict_row) as cursor:
        tables = cursor.execute(rights.TABLE_RIGHTS, rights.parameters(schema)).fetchall()
    if lacking := rights.lacking_on_tables(tables):
        raise psycopg.errors.InsufficientPrivilege(lacking)

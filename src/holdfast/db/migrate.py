"""Migrations: numbered SQL files, applied once each, safe when many processes start at once.

Each is a transaction of its own, which also records it. A file named `NNNN_name.concurrently.sql` holds one
CREATE INDEX CONCURRENTLY, which no transaction may contain: writes to a large table go on while it is built.
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

# Held to the end of each transaction that changes the schema. Earlier versions have this key only.
TRANSACTION_KEY = "hashtextextended('holdfast migrate ' || %s, 0)"
# Held by one process from its first migration to its last. A key of its own: processes of earlier versions wait for the
# other one inside a statement, so they have a snapshot, and the build of an index waits for all snapshots. A build that
# held their key would end in a deadlock. For the same reason this version asks for locks again and again.
SESSION_KEY = "hashtextextended('holdfast migrations of ' || %s, 0)"
TRY_LOCK = f"SELECT pg_try_advisory_xact_lock({TRANSACTION_KEY})"
TRY_SESSION_LOCK = f"SELECT pg_try_advisory_lock({SESSION_KEY})"
# Both keys, for a process that has no session: it must not migrate while another one holds the key of a session.
TRY_BOTH_LOCKS = f"SELECT pg_try_advisory_xact_lock({SESSION_KEY}) AND pg_try_advisory_xact_lock({TRANSACTION_KEY})"
UNLOCK_SESSION = f"SELECT pg_advisory_unlock({SESSION_KEY})"
TURN_SECONDS = 0.2
# After which a process that waits for its turn says so. Most turns are over sooner.
UNUSUAL_TURN_SECONDS = 3.0

# A statement that waits for a table's lock makes all later statements on the table wait behind it. So it waits for a
# short time, gives way, and tries again.
LOCK_TIMEOUT_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 5.0
# After which a migration that cannot lock its tables fails.
LOCKING_SECONDS = 300.0
# How often the build of an index is begun, if deadlocks end it. Each may have taken hours.
BUILD_ATTEMPTS = 5

# Nothing that the role or the connection sets may end a migration in the middle.
LIMITS = (
    f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_SECONDS:g}s'; SET LOCAL statement_timeout = 0; "
    "SET LOCAL idle_in_transaction_session_timeout = 0"
)

BUILDS_INDEX = re.compile(r"\b(CREATE\s+(?:UNIQUE\s+)?INDEX)\s+CONCURRENTLY\s+(?:IF\s+NOT\s+EXISTS\s+)?(?P<name>\w+)")
IS_VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)"

TTL_TYPE = """
SELECT atttypid::regtype::text FROM pg_attribute WHERE attrelid = to_regclass('store') AND attname = 'ttl_minutes'
"""

# The tables that say what is applied.
RECORDS = {
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
    """Bring the schema up to date and return the names of what was applied.

    Ten processes that start together apply each migration once, under one advisory lock. A failure leaves applied what
    came before it, and the message says which migration failed. When there is nothing to do nothing is locked.

    Goes to DIRECT_DATABASE_URL if that is set. Behind PgBouncer alone, indexes are built in transactions.

    A migration may take hours, and so may the wait for another process that migrates. A server that hangs meanwhile is
    noticed within three times DATABASE_TIMEOUT: DatabaseUnavailable.
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
    """A connection for the length of the block. Raises DatabaseUnavailable if it is lost there."""
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
            raise DatabaseUnavailable(f"{name} was lost during migrations: {_in_a_line(error)}.") from error


def _missing_rights(connection: Connection, schema: str, error: psycopg.Error) -> DatabaseError:
    """What the role may not do, and the statement that allows it."""
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
    """The schema of one installation, changed over one connection."""

    def __init__(self, connection: Connection, name: str, *, has_session: bool) -> None:
        """`has_session`: the connection is the same server process from one transaction to the next."""
        self._connection = connection
        self._name = name
        self._has_session = has_session

    def bring_up_to_date(self) -> list[str]:
        from langgraph.checkpoint.postgres.base import BasePostgresSaver
        from langgraph.store.postgres.base import BasePostgresStore

        stock = {"checkpoint": BasePostgresSaver.MIGRATIONS, "store": BasePostgresStore.MIGRATIONS}
        with self._connection.transaction():
            self._limit()
            _require_table_rights(self._connection, self._name)
            if self._is_current({table: len(steps) for table, steps in stock.items()}):
                return []
        # One process does it all, if it can. Behind PgBouncer they may take turns, migration by migration.
        with self._turn() if self._has_session else nullcontext():
            return self._bring_up_to_date(stock)

    def _bring_up_to_date(self, stock: Mapping[str, Sequence[str]]) -> list[str]:
        self._transact("The schema", self._create)
        done = self._transact("The schema", self._done)
        applied = [one.name for one in migrations() if one.number not in done and self._apply(one)]
        applied += self._apply_stock("checkpoint", stock["checkpoint"], "langgraph checkpoints")
        applied += self._apply_stock("store", stock["store"], "langgraph store")
        self._transact("The table store", self._widen_ttl)
        return applied

    # --- turns and locks --------------------------------------------------------------------------

    def _transact(self, what: str, work: Callable[[], Result]) -> Result:
        """Do something in a transaction of its own, in the process's turn. When a table is locked, give way and try
        again. Raises DatabaseError naming `what`."""
        deadline, pause = time.monotonic() + LOCKING_SECONDS, TURN_SECONDS
        turn = _Waiting(what)
        while True:
            try:
                with _named(what), self._connection.transaction():
                    self._limit()
                    if self._lock():
                        return work()
                turn.goes_on()
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                if time.monotonic() > deadline:
                    raise DatabaseError(
                        f"{what} could not lock its tables within {LOCKING_SECONDS:g} seconds: long transactions use "
                        "them. Find these in pg_stat_activity by xact_start, end them, and start again. What came "
                        "before it is applied."
                    ) from None
                if pause == TURN_SECONDS:
                    log.warning("migration.waiting", migration=what, reason="long transactions use its tables")
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311

    def _lock(self) -> bool:
        """Whether the transaction that has begun is this process's turn. To its end no other process has one."""
        if self._has_session:
            return bool(self._one(TRY_LOCK, self._name))
        return bool(self._one(TRY_BOTH_LOCKS, self._name, self._name))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """This process's turn, outside of transactions."""
        turn = _Waiting("All")
        while not self._one(TRY_SESSION_LOCK, self._name):
            turn.goes_on()
            time.sleep(TURN_SECONDS)
        try:
            yield
        finally:
            with suppress(psycopg.Error):  # A connection that is lost has no locks.
                self._one(UNLOCK_SESSION, self._name)

    def _limit(self) -> None:
        """For the transaction that has begun."""
        self._connection.execute(LIMITS)
        self._end_transaction_timeout(local=True)
        self._connection.execute(sql.SQL("SET LOCAL search_path TO {}").format(sql.Identifier(self._name)))

    def _end_transaction_timeout(self, *, local: bool) -> None:
        statement = no_transaction_timeout(self._connection.info.server_version, local=local)
        if statement is not None:
            self._connection.execute(statement)

    # --- what is there ----------------------------------------------------------------------------

    def _is_current(self, stock: Mapping[str, int]) -> bool:
        """Whether nothing is left to do."""
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
        """How many of LangGraph's own migrations of its tables are applied."""
        return int(self._one(f"SELECT coalesce(max(v) + 1, 0) FROM {table}_migrations"))

    def _exists(self, table: str) -> bool:
        return bool(self._one("SELECT to_regclass(%s) IS NOT NULL", table))

    def _one(self, statement: str, *parameters: object) -> Any:
        row = self._connection.execute(statement.encode(), parameters or None).fetchone()
        return None if row is None else row[0]

    # --- changes ----------------------------------------------------------------------------------

    def _create(self) -> None:
        # A role that may not create schemas can still use one made for it. IF NOT EXISTS would need the right to create
        # in any case, and a role that only uses the tables may start a server when there is nothing to migrate.
        if not self._one("SELECT to_regnamespace(%s) IS NOT NULL", self._name):
            self._connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._name)))
        for table, columns in RECORDS.items():
            if not self._exists(table):
                self._connection.execute(f"CREATE TABLE {table} {columns}".encode())

    def _apply(self, migration: Migration) -> bool:
        """Apply a migration, unless another process has done so meanwhile."""
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
        """LangGraph's own migrations of its tables, recorded where it does so itself, so that it can use them, too.

        Tables that are new are made in one transaction. Later, an index that LangGraph builds CONCURRENTLY is built so.
        The tables of semantic search depend on the project, and are made by the processes that know it.
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
                # An earlier version, which does not use the key of the session, may have recorded it meanwhile.
                self._connection.execute(record + b" ON CONFLICT DO NOTHING", (number,))
        return applied

    def _drop_invalid_indexes(self, what: str, statements: Sequence[str]) -> None:
        """Drop what interrupted builds of the indexes that the statements build have left behind.

        In transactions of their own: to drop an index locks its table against reading, too, which should not last as
        long as a build.
        """

        def drop(index: str) -> None:
            if self._one(IS_VALID, index) is False:
                self._connection.execute(f"DROP INDEX {index}".encode())

        for statement in statements:
            if found := BUILDS_INDEX.search(statement):
                self._transact(what, partial(drop, found["name"]))

    def _execute_in_transaction(self, statement: str) -> None:
        """For tables that are new, and where there is no session. Nothing can be done concurrently in a transaction."""
        found = BUILDS_INDEX.search(statement)
        if found is None:
            self._connection.execute(statement.replace(" CONCURRENTLY", "").encode())
        elif not self._one(IS_VALID, found["name"]):
            # Without IF NOT EXISTS, which would accept an invalid index.
            self._connection.execute(BUILDS_INDEX.sub(r"\1 \g<name>", statement).encode())

    def _build_index(self, what: str, statement: str) -> None:
        """Build an index without locking its table.

        A build waits for other transactions. If one of these waits for the build, Postgres ends one of both. A build
        that was ended is repeated. Raises DatabaseError naming `what` when all attempts have ended so.
        """
        pause = TURN_SECONDS
        for attempt in range(1, BUILD_ATTEMPTS + 1):
            try:
                self._try_to_build_index(statement)
            except psycopg.errors.DeadlockDetected as error:
                if attempt == BUILD_ATTEMPTS:
                    raise DatabaseError(
                        f"{what} failed: {_in_a_line(error)} in each of {BUILD_ATTEMPTS} attempts to build an index. "
                        "What came before it is applied. Start again when other processes do not change the schema."
                    ) from error
                log.warning("migration.waiting", migration=what, reason="a deadlock ended the build of an index")
            else:
                return
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _try_to_build_index(self, statement: str) -> None:
        """One that an interrupted build has left behind is useless, and is built anew."""
        found = BUILDS_INDEX.search(statement)
        assert found is not None, statement
        is_valid = self._one(IS_VALID, found["name"])
        if is_valid:
            return
        # Not the limits of a transaction: none of these statements may be in one.
        self._connection.execute("SET statement_timeout = 0; SET lock_timeout = 0")
        self._end_transaction_timeout(local=False)
        if is_valid is False:
            self._connection.execute(f"DROP INDEX CONCURRENTLY {found['name']}".encode())
        self._connection.execute(statement.encode())

    def _widen_ttl(self) -> None:
        if self._one(TTL_TYPE) == "integer":
            # The stock store takes fractions of minutes, which are rounded here: half a minute would be over at once.
            self._connection.execute("ALTER TABLE store ALTER COLUMN ttl_minutes TYPE double precision")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say what has failed. Rights that are missing are explained elsewhere, and locks are waited for."""
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
        raise kind(f"{what} failed: {_in_a_line(error)}. What came before it is applied.") from error


def _in_a_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0]


class _Waiting:
    """The wait for another process that migrates. Reported once, if it is long."""

    def __init__(self, migration: str) -> None:
        self._migration = migration
        self._since = time.monotonic()
        self._reported = False

    def goes_on(self) -> None:
        if not self._reported and time.monotonic() - self._since >= UNUSUAL_TURN_SECONDS:
            self._reported = True
            log.warning("migration.waiting", migration=self._migration, reason="another process migrates")


def _require_table_rights(connection: Connection, schema: str) -> None:
    """Raise InsufficientPrivilege if a table exists that the role may not use. Every command and every process migrates
    first, so none of them meets such a table later."""
    with connection.cursor(row_factory=dict_row) as cursor:
        tables = cursor.execute(rights.TABLE_RIGHTS, rights.parameters(schema)).fetchall()
    if lacking := rights.lacking_on_tables(tables):
        raise psycopg.errors.InsufficientPrivilege(lacking)

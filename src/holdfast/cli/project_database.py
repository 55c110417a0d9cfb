"""Opens the project's database for commands that work on it directly: `migrate`, `sweep`, `keys`, `tenants`, …"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.cli.console import say
from holdfast.cli.exit_codes import CommandError
from holdfast.cli.project import read_settings
from holdfast.errors import DatabaseError, DataDirectoryInUse, RequestError, SettingsError
from holdfast.graphs.config import GRAPHS_VARIABLE
from holdfast.settings import Settings

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg.rows import DictRow

T = TypeVar("T")

STARTING_TIMEOUT_SECONDS = 15.0
"""How long a server that uses the data directory may take until its Postgres answers."""
PROBE_INTERVAL_SECONDS = 0.2


def on_database(config: Path, work: Callable[[AsyncConnection[DictRow]], Awaitable[T]]) -> T:
    """Migrate the project's database, then call `work` in a transaction. Raises OperatorError, and CommandError for a
    RequestError of `work`."""
    from holdfast.db.migrate import migrate

    with project_database(config) as settings:
        migrate(settings)
        try:
            return in_transaction(settings, work)
        except RequestError as error:
            raise CommandError(str(error)) from None


def in_transaction(settings: Settings, work: Callable[[AsyncConnection[DictRow]], Awaitable[T]]) -> T:
    """Call `work` in a transaction on the database of the settings."""
    from holdfast.db.connect import Database

    async def connected() -> T:
        database = Database(settings, "cli", long_statements=True)
        await database.open()
        try:
            async with database.transaction() as connection:
                return await work(connection)
        finally:
            await database.close()

    return asyncio.run(connected())


@contextmanager
def project_database(config: Path) -> Iterator[Settings]:
    """The project's settings, with the URL of DATABASE_URL or of the running embedded Postgres.

    An embedded Postgres is created only in a project's directory; in any other the command was probably started in the
    wrong place. Raises OperatorError, also if the connection is lost during the command.
    """
    import psycopg

    # One connection is enough for a command.
    settings = read_settings(config, pool_min=1)
    try:
        if settings.database_url is not None:
            yield settings
            return
        data_dir = settings.data_dir.expanduser().absolute()
        _require_project(config, data_dir)
        with embedded_url(data_dir) as url:
            yield with_embedded(settings, url)
    except psycopg.OperationalError as error:
        reason = " ".join(str(error).split())
        raise DatabaseError(f"The database did not carry out the command: {reason}") from None


@contextmanager
def embedded_url(data_dir: Path) -> Iterator[str]:
    """The URL of the embedded Postgres that `dev` or `serve` runs, or else of one started for this command. Raises
    DatabaseError.

    If another command runs one, this waits until that command has ended, because its Postgres ends with it.
    """
    from holdfast.db.embedded import EmbeddedPostgres

    deadline = time.monotonic() + STARTING_TIMEOUT_SECONDS
    url = None
    with EmbeddedPostgres(data_dir, say=say, for_command=True) as postgres:
        while url is None:
            try:
                postgres.claim()
                url = postgres.start()
            except DataDirectoryInUse as error:
                # If a server uses the directory and its Postgres does not answer, it is starting or stopping.
                url = None if error.by_command else _running(data_dir)
                if url is None:
                    if error.by_command or time.monotonic() > deadline:
                        raise
                    time.sleep(PROBE_INTERVAL_SECONDS)
        yield url


def with_embedded(settings: Settings, url: str) -> Settings:
    # The settings about PgBouncer and a direct connection apply to the database of DATABASE_URL only.
    return settings.model_copy(update={"database_url": url, "direct_database_url": None, "pgbouncer": False})


def _require_project(config: Path, data_dir: Path) -> None:
    if config.exists() or os.environ.get(GRAPHS_VARIABLE) or (data_dir / "postgres").exists():
        return
    raise SettingsError(
        f"There is no database to work on: DATABASE_URL is not set, {config.absolute()} does not exist, and "
        f"HOLDFAST_DATA_DIR={data_dir} holds none. Set DATABASE_URL, name the project's langgraph.json with --config "
        "FILE, or start the command in the project's directory."
    )


def _running(data_dir: Path) -> str | None:
    """The URL of the Postgres that runs on a data directory, if it takes connections."""
    import psycopg

    from holdfast.db.embedded_server import running_url

    url = running_url(data_dir)
    if url is None:
        return None
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return None
    return url

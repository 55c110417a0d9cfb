"""What `keys` and `tenants` do first: find the database, which they change themselves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.cli.console import say
from holdfast.cli.exit_codes import CommandError
from holdfast.errors import RequestError
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg.rows import DictRow

T = TypeVar("T")


def on_database(config: Path, work: Callable[[AsyncConnection[DictRow]], Awaitable[T]]) -> T:
    """Do something in a transaction on the project's database, brought up to date first. Raises OperatorError, and
    CommandError for what was refused."""
    from holdfast.db.migrate import migrate

    project_env = load_config(config, os.environ).env if config.exists() else {}
    with _reachable(load_settings({**project_env, **os.environ}, pool_min=1)) as settings:
        migrate(settings)
        try:
            return in_transaction(settings, work)
        except RequestError as error:
            raise CommandError(str(error)) from None


def in_transaction(settings: Settings, work: Callable[[AsyncConnection[DictRow]], Awaitable[T]]) -> T:
    """Do something in a transaction on the database of the settings."""
    from holdfast.db.connect import Database

    async def connected() -> T:
        database = Database(settings, "cli")
        await database.open()
        try:
            async with database.transaction() as connection:
                return await work(connection)
        finally:
            await database.close()

    return asyncio.run(connected())


@contextmanager
def _reachable(settings: Settings) -> Iterator[Settings]:
    """The settings with a database: that of DATABASE_URL, or the private one, whether somebody runs it or not."""
    if settings.database_url is not None:
        yield settings
        return
    import psycopg

    from holdfast.db.embedded import EmbeddedPostgres
    from holdfast.db.embedded_server import Server

    running = Server(settings.data_dir.expanduser().absolute(), lambda: True).url
    try:
        psycopg.connect(running, connect_timeout=5).close()
    except psycopg.OperationalError:
        with EmbeddedPostgres(settings.data_dir, say=say) as postgres:
            yield settings.model_copy(update={"database_url": postgres.start()})
    else:
        yield settings.model_copy(update={"database_url": running})

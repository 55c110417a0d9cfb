"""`holdfast migrate`: bring the schema up to date."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Annotated

import typer

from holdfast.cli.console import out, say
from holdfast.cli.options import DEFAULT_CONFIG, Config, examples
from holdfast.db.embedded import EmbeddedPostgres
from holdfast.graphs.config import load_config
from holdfast.settings import load_settings

EPILOG = examples("holdfast migrate", "DATABASE_URL=postgresql://db/holdfast holdfast migrate")


def migrate(
    config: Config = DEFAULT_CONFIG,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing when there is nothing to do.")] = False,
) -> None:
    """Apply the migrations that are missing, and say which. Safe to run from many places at once.

    `dev`, `serve`, `web` and `worker` do this when they start.
    """
    project_env = load_config(config, os.environ).env if config.exists() else {}
    settings = load_settings({**project_env, **os.environ})
    from holdfast.db.migrate import migrate as apply

    with ExitStack() as stack:
        if settings.database_url is None:
            postgres = stack.enter_context(EmbeddedPostgres(settings.data_dir, say=say))
            settings = settings.model_copy(update={"database_url": postgres.start()})
        applied = apply(settings)
    for name in applied:
        out.print(f"applied {name}", markup=False)
    if not applied and not quiet:
        out.print("Nothing to do: the schema is up to date.")

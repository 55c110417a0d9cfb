"""`holdfast migrate`: bring the schema up to date."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.console import out
from holdfast.cli.options import DEFAULT_CONFIG, Config, examples
from holdfast.cli.project_database import project_database

EPILOG = examples("holdfast migrate", "DATABASE_URL=postgresql://db/holdfast holdfast migrate")


def migrate(
    config: Config = DEFAULT_CONFIG,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing when there is nothing to do.")] = False,
) -> None:
    """Apply the migrations that are missing, and say which. Safe to run from many places at once.

    `dev`, `serve`, `web` and `worker` do this when they start.
    """
    from holdfast.db.migrate import migrate as apply

    with project_database(config) as settings:
        applied = apply(settings)
    for name in applied:
        out.print(f"applied {name}", markup=False)
    if not applied and not quiet:
        out.print("Nothing to do: the schema is up to date.")

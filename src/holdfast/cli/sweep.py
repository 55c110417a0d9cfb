"""`holdfast sweep`: remove now what has passed its time to live."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from holdfast.cli.console import out
from holdfast.cli.options import DEFAULT_CONFIG, AsJson, Config, examples
from holdfast.cli.project_database import project_database
from holdfast.settings import Settings
from holdfast.telemetry.metrics import Metrics

EPILOG = examples(
    "holdfast sweep --dry-run",
    "CHECKPOINT_TTL_SECONDS=604800 holdfast sweep",
    "DATABASE_URL=postgresql://db/holdfast holdfast sweep --json",
)


def sweep(
    config: Config = DEFAULT_CONFIG,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count what would go, and change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all rows that have passed their time to live, and print how many.

    The servers of a fleet do this all the time. The command is safe beside them, and may be stopped at any time: it
    removes rows in small batches.
    """
    from holdfast.db.migrate import migrate

    with project_database(config) as settings:
        migrate(settings)
        swept = asyncio.run(_sweep(settings, dry_run=dry_run))
    if as_json:
        print(json.dumps({"dry_run": dry_run, "swept": swept}))
        return
    verb = "would remove" if dry_run else "removed"
    for what, number in swept.items():
        if number:
            out.print(f"{verb} {what}: {number:,}", markup=False)
    if not any(swept.values()):
        out.print("Nothing to do: nothing has passed its time to live.")


async def _sweep(settings: Settings, *, dry_run: bool) -> dict[str, int]:
    from holdfast.db.connect import Database
    from holdfast.upkeep.sweeper import Sweeper

    database = Database(settings, "sweep", long_statements=True)
    await database.open()
    try:
        sweeper = Sweeper(database, Metrics(enabled=False))
        return dict(await sweeper.count() if dry_run else await sweeper.finish())
    finally:
        await database.close()

"""`holdfast tenants`: show the limits and the usage of tenants, and set the limits."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from holdfast.cli.console import out, say, show_table
from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.options import DEFAULT_CONFIG, AsJson, Config, examples
from holdfast.cli.project_database import on_database
from holdfast.insight.doctor.findings import counted

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg.rows import DictRow

app = typer.Typer(
    help="See what tenants use, limit it, and weigh their turns.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples(
        "holdfast tenants list",
        "holdfast tenants set acme --max-running 20 --max-queued 5000",
        "holdfast tenants set acme --weight 2",
        "holdfast tenants adopt default",
    ),
)

DEFAULT, NONE = "default", "none"
LIMIT = "a number, 'none' for no limit, or 'default' for what the settings say"

Name = Annotated[str, typer.Argument(metavar="TENANT")]


@app.command("list", epilog=examples("holdfast tenants list", "holdfast tenants list --json"))
def list_all(as_json: AsJson = False, config: Config = DEFAULT_CONFIG) -> None:
    """List tenants: what each has queued, runs and has spent today, of how much. '-' is what the settings say."""
    from holdfast.resources.tenants import list_tenants

    async def found(connection: AsyncConnection[DictRow]) -> list[DictRow]:
        return await list_tenants(connection)

    rows = on_database(config, found)
    if as_json:
        for row in rows:
            print(json.dumps(_plain(row)))
        return
    if not rows:
        say("No tenants. `holdfast keys create --tenant NAME` makes one.")
        return
    shown = [
        (
            row["tenant_id"],
            str(row["keys"]),
            str(row["weight"]),
            f"{row['queued']} of {_shown(row['max_queued'])}",
            f"{row['running']} of {_shown(row['max_running'])}",
            str(_shown(row["requests_per_second"])),
            f"{row['spent_today_usd']:.2f} of {_shown(row['spend_per_day_usd'])}",
        )
        for row in rows
    ]
    titles = ("tenant", "keys", "weight", "queued", "running", "requests/s", "spent today, $")
    show_table(titles, shown, right=titles[1:])


@app.command("set", epilog=examples("holdfast tenants set acme --max-running 20 --spend-per-day-usd 100"))
def set_limits(
    tenant: Name,
    max_queued: Annotated[str | None, typer.Option(metavar="N", help=f"Runs queued: {LIMIT}.")] = None,
    max_running: Annotated[str | None, typer.Option(metavar="N", help="Runs executed at once, likewise.")] = None,
    requests_per_second: Annotated[
        str | None, typer.Option(metavar="N", help="Requests a second to each web process, likewise.")
    ] = None,
    spend_per_day_usd: Annotated[
        str | None, typer.Option(metavar="N", help="US dollars a day (UTC) from which on runs are refused, likewise.")
    ] = None,
    weight: Annotated[
        str | None, typer.Option(metavar="N", help="Runs that are started in each of its turns: 1 to 1,000.")
    ] = None,
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Set a tenant's limits and its weight; what is not given stays. Limits are noticed within
    HOLDFAST_KEY_REFRESH_SECONDS, the weight by the next claim of each worker."""
    from holdfast.resources import tenants

    given = {
        "max_queued": max_queued,
        "max_running": max_running,
        "requests_per_second": requests_per_second,
        "spend_per_day_usd": spend_per_day_usd,
    }
    limits = {name: _limit(name, value) for name, value in given.items() if value not in (None, DEFAULT)}
    cleared = [name for name, value in given.items() if value == DEFAULT]
    new_weight = None if weight is None else _weight(weight)
    if not limits and not cleared and new_weight is None:
        raise CommandError("Nothing to set: give at least one limit, or --weight.", ExitCode.USAGE)

    async def changed(connection: AsyncConnection[DictRow]) -> DictRow:
        return await tenants.set_limits(connection, tenant, limits, cleared, new_weight)

    row = on_database(config, changed)
    out.print(", ".join(f"{name} {_shown(row[name])}" for name in (*given, "weight")), markup=False)


@app.command(epilog=examples("holdfast tenants adopt default"))
def adopt(tenant: Name, config: Config = DEFAULT_CONFIG) -> None:
    """Give a tenant everything that is nobody's: threads, runs, assistants, crons and items from before there were
    tenants, which no key can see, and LangGraph's checkpoints from before there was Holdfast."""
    from holdfast.resources import tenants

    try:
        tenants.checked_name(tenant)
    except ValueError as error:
        raise CommandError(f"{tenant}: {error}", ExitCode.USAGE) from None

    async def moved(connection: AsyncConnection[DictRow]) -> dict[str, int]:
        return await tenants.adopt(connection, tenant)

    counts = on_database(config, moved)
    out.print(", ".join(f"{count} {what}" for what, count in counts.items()), markup=False)


@app.command(
    "adopt-checkpoints",
    epilog=examples(
        "holdfast tenants adopt-checkpoints --tenant acme",
        """holdfast tenants adopt-checkpoints 6f3c…  --metadata '{"owner": "ann", "graph_id": "agent"}'""",
    ),
)
def adopt_checkpoints(
    threads: Annotated[list[str] | None, typer.Argument(metavar="[THREAD_ID]...", help="Only of these.")] = None,
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Whose the threads are. Without it: nobody's.")] = "",
    metadata: Annotated[str, typer.Option(metavar="JSON", help="The threads' metadata.")] = "{}",
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Make threads of LangGraph's checkpoints that have none, so that runs can continue them. With keys or custom auth
    nobody else can: it is not known whose they are."""
    from holdfast.resources import tenants

    try:
        thread_ids = [UUID(thread) for thread in threads] if threads else None
        given = json.loads(metadata)
        if tenant:
            tenants.checked_name(tenant)
    except ValueError as error:
        raise CommandError(f"{error}", ExitCode.USAGE) from None
    if not isinstance(given, dict):
        raise CommandError(f"--metadata {metadata}: must be a JSON object", ExitCode.USAGE)

    async def made(connection: AsyncConnection[DictRow]) -> int:
        if tenant:
            await tenants.ensure_tenant(connection, tenant)
        return await tenants.adopt_checkpoints(connection, tenant, given, thread_ids)

    out.print(counted(on_database(config, made), "thread"), markup=False)


def _limit(name: str, given: str | None) -> float:
    from holdfast.resources.tenants import UNLIMITED

    whole = name in ("max_queued", "max_running")
    flag = f"--{name.replace('_', '-')} {given}"
    if given == NONE:
        return UNLIMITED if whole else math.inf
    try:
        value = int(given or "") if whole else float(given or "")
    except ValueError:
        raise CommandError(f"{flag}: must be {LIMIT}", ExitCode.USAGE) from None
    least = 1e-6 if name == "requests_per_second" else 0
    if not least <= value < UNLIMITED:
        raise CommandError(f"{flag}: must be {LIMIT}, and not below {least:g}", ExitCode.USAGE)
    return value


def _weight(given: str) -> int:
    from holdfast.resources.tenants import MAX_WEIGHT

    if given == DEFAULT:
        return 1
    if not given.isdecimal() or not 1 <= int(given) <= MAX_WEIGHT:
        raise CommandError(
            f"--weight {given}: must be a number from 1 to {MAX_WEIGHT:,}, or '{DEFAULT}' for 1", ExitCode.USAGE
        )
    return int(given)


def _shown(limit: float | None) -> str:
    from holdfast.resources.tenants import UNLIMITED

    if limit is None:
        return "-"
    if limit in (math.inf, UNLIMITED):
        return NONE
    return str(int(limit)) if limit == int(limit) else f"{limit:g}"


def _plain(row: DictRow) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else _shown(value) if value == math.inf else value
        for name, value in row.items()
    }

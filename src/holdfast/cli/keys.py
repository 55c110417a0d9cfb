"""`holdfast keys`: create, list and revoke API keys."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.console import out, say, show_table
from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.options import DEFAULT_CONFIG, AsJson, Config, examples
from holdfast.cli.project_database import on_database

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg.rows import DictRow

app = typer.Typer(
    help="Make API keys, and revoke them. With the first one, every request needs one.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples(
        "holdfast keys create --tenant acme --name ci --expires 90d",
        "holdfast keys list",
        "holdfast keys revoke hf_x7Qp2a",
    ),
)

DEFAULT_TENANT = "default"
DEFAULT_SCOPES = "read,write"
UNIT_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
MAX_EXPIRY_SECONDS = 100 * 366 * UNIT_SECONDS["d"]

Tenant = Annotated[str | None, typer.Option(metavar="TENANT", help="Only those of this tenant.")]


@app.command(
    epilog=examples(
        "holdfast keys create --tenant acme --name ci",
        "holdfast keys create --name autoscaler --scopes admin --expires 52w",
        "KEY=$(holdfast keys create --tenant acme --name ci --json | jq -r .key)",
    )
)
def create(
    tenant: Annotated[
        str, typer.Option(metavar="TENANT", help="Whose it is; made if there is no such tenant.")
    ] = DEFAULT_TENANT,
    name: Annotated[str, typer.Option(metavar="NAME", help="What it is for, to recognise it by.")] = "",
    scopes: Annotated[
        str, typer.Option(metavar="SCOPES", help="Any of read, write and admin, separated by commas.")
    ] = DEFAULT_SCOPES,
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="For how long it opens: 30m, 12h, 90d, 52w. For ever if not given."),
    ] = None,
    as_json: AsJson = False,
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Make a key. It is shown now and never again: only its hash is kept."""
    from holdfast.resources.api_keys import create_key
    from holdfast.resources.tenants import checked_name

    try:
        checked_name(tenant)
    except ValueError as error:
        raise CommandError(f"--tenant {tenant}: {error}", ExitCode.USAGE) from None
    wanted, seconds = _scopes(scopes), _seconds(expires)
    if "\0" in name or len(name) > 200:
        raise CommandError("--name: at most 200 characters, none of them NUL", ExitCode.USAGE)

    async def made(connection: AsyncConnection[DictRow]) -> tuple[str, DictRow]:
        return await create_key(connection, tenant, name, wanted, seconds)

    key, row = on_database(config, made)
    if as_json:
        print(json.dumps({"key": key, **_plain(row)}))
        return
    out.print(key, markup=False)
    say(f"Tenant {tenant}, scopes {', '.join(row['scopes'])}, id {row['key_id']}. It is not shown again.")
    say("Send it as `x-api-key` or `Authorization: Bearer`. Where there is a key, every request needs one.")


@app.command("list", epilog=examples("holdfast keys list", "holdfast keys list --tenant acme --json"))
def list_all(tenant: Tenant = None, as_json: AsJson = False, config: Config = DEFAULT_CONFIG) -> None:
    """List all keys, also revoked and expired ones."""
    from holdfast.resources.api_keys import list_keys

    async def found(connection: AsyncConnection[DictRow]) -> list[DictRow]:
        return await list_keys(connection, tenant)

    rows = on_database(config, found)
    if as_json:
        for row in rows:
            print(json.dumps(_plain(row), ensure_ascii=False))
        return
    if not rows:
        say("No keys: every request is let in." if tenant is None else f"No keys of tenant {tenant}.")
        return
    shown = [
        (
            str(row["key_id"]),
            row["prefix"],
            row["tenant_id"],
            ",".join(row["scopes"]),
            _when(row["last_used_at"]),
            _when(row["expires_at"]),
            _state(row),
            row["name"],
        )
        for row in rows
    ]
    titles = ("id", "begins", "tenant", "scopes", "last used", "expires", "state", "name")
    show_table(titles, shown, styles=["" if _state(row) == "open" else "dim" for row in rows])


@app.command(epilog=examples("holdfast keys revoke hf_x7Qp2a", "holdfast keys revoke KEY_ID --forget"))
def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its id, or how it begins, as `list` shows it.")],
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Delete it from the list too. With the last one, the server is open again."),
    ] = False,
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Revoke a key. Within HOLDFAST_KEY_REFRESH_SECONDS it is refused everywhere. This cannot be undone."""
    from holdfast.resources.api_keys import revoke_key

    async def revoked(connection: AsyncConnection[DictRow]) -> DictRow:
        return await revoke_key(connection, key, forget=forget)

    row = on_database(config, revoked)
    done = "revoked and forgotten" if forget else "revoked"
    out.print(f"{row['prefix']}… of tenant {row['tenant_id']} is {done}.", markup=False)


def _scopes(given: str) -> list[Any]:
    from holdfast.resources.api_keys import SCOPES

    named = [scope.strip() for scope in given.split(",") if scope.strip()]
    unknown = [scope for scope in named if scope not in SCOPES]
    if unknown or not named:
        problem = f"'{unknown[0]}' is no scope" if unknown else "none is given"
        raise CommandError(f"--scopes {given}: {problem}; there are {', '.join(SCOPES)}", ExitCode.USAGE)
    return named


def _seconds(given: str | None) -> float | None:
    if given is None:
        return None
    match = re.fullmatch(r"(\d{1,9})([mhdw])", given.strip())
    seconds = int(match[1]) * UNIT_SECONDS[match[2]] if match else 0.0
    if not 0 < seconds <= MAX_EXPIRY_SECONDS:
        raise CommandError(f"--expires {given}: say 30m, 12h, 90d or 52w, at most a century", ExitCode.USAGE)
    return seconds


def _state(row: DictRow) -> str:
    if row["revoked_at"] is not None:
        return "revoked"
    return "expired" if row["expired"] else "open"


def _when(moment: datetime | None) -> str:
    return "-" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M")


def _plain(row: DictRow) -> dict[str, Any]:
    shown = {name: value for name, value in row.items() if name != "expired"}
    return {name: value if value is None or isinstance(value, list) else _text(value) for name, value in shown.items()}


def _text(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)

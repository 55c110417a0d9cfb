"""`holdfast webhooks secret`: print or replace the secret that signs a tenant's webhooks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.console import say
from holdfast.cli.exit_codes import CommandError, ExitCode
from holdfast.cli.options import DEFAULT_CONFIG, AsJson, Config
from holdfast.cli.project import read_settings
from holdfast.cli.project_database import on_database

if TYPE_CHECKING:
    from psycopg import AsyncConnection
    from psycopg.rows import DictRow


def secret(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Make a new secret. The one before goes on signing, too.")
    ] = False,
    retire: Annotated[bool, typer.Option("--retire", help="Sign with the newest secret only from now on.")] = False,
    as_json: AsJson = False,
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Print the secrets that sign a tenant's webhooks, one on each line; the first is for its receivers.

    They are computed from HOLDFAST_WEBHOOK_SECRETS, which must be set as it is for the server, and from what the
    database keeps for the tenant.
    """
    from holdfast.settings.signing_secrets import secrets_of_tenant
    from holdfast.webhooks.secrets import read_salts, retire_salt, rotate_salt

    if rotate and retire:
        raise CommandError(
            "--rotate and --retire: give one of them. Rotate first, and retire the secret before when the receivers "
            "have the new one.",
            ExitCode.USAGE,
        )
    operator_secrets = read_settings(config).signing_secrets
    if not operator_secrets:
        raise CommandError(
            "HOLDFAST_WEBHOOK_SECRETS is not set here. Without it webhooks are not signed and tenants have no secrets; "
            "set it as it is set for the server.",
            ExitCode.USAGE,
        )

    async def salts(connection: AsyncConnection[DictRow]) -> list[bytes]:
        change = rotate_salt if rotate else retire_salt if retire else read_salts
        return await change(connection, tenant)

    found = secrets_of_tenant(operator_secrets, tenant, on_database(config, salts))
    if as_json:
        print(json.dumps({"tenant_id": tenant, "secrets": found}))
        return
    for each in found:
        print(each)
    if len(found) > 1:
        say("Deliveries are signed with each of these. Give receivers the first one.")

"""The webhooks of each tenant are signed with secrets of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError
from typer.testing import CliRunner, Result

from holdfast.cli.exit_codes import CommandError
from holdfast.cli.main import app
from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.resources.api_keys import create_key
from holdfast.settings import Settings
from holdfast.settings.signing_secrets import secrets_of_tenant
from tests.support.receiver import Received, Receiver
from tests.support.records import query
from tests.support.serving import serving
from tests.support.waiting import until
from tests.webhooks.conftest import ENVIRON, NEW_SECRET, OLD_SECRET
from tests.webhooks.test_delivery import settled, start

SALT, OTHER_SALT = b"s" * 32, b"t" * 32


async def command(
    settings: Settings, *arguments: str, environ: Mapping[str, str | None] | None = None
) -> tuple[Result, list[str]]:
    """`holdfast webhooks secret`, and the secrets that it prints."""
    given = {**ENVIRON, "DATABASE_URL": settings.database_url, "COLUMNS": "250", "NO_COLOR": "1", **(environ or {})}

    def invoke() -> Result:
        return CliRunner().invoke(app, ["webhooks", "secret", *arguments], env=given)

    result = await asyncio.to_thread(invoke)
    return result, [line for line in result.stdout.splitlines() if line.startswith("whsec_")]


def verifies(secret: str, got: Received) -> bool:
    try:
        Webhook(secret).verify(got.body, got.headers)
    except WebhookVerificationError:
        return False
    return True


@asynccontextmanager
async def tenant_client(database: Database, url: Any, tenant: str) -> AsyncIterator[httpx.AsyncClient]:
    async with database.transaction() as connection:
        key, _ = await create_key(connection, tenant, "test", ("read", "write"), None)
    async with httpx.AsyncClient(base_url=url, headers={"x-api-key": key}, timeout=60) as client:

        async def known() -> bool:
            return (await client.get("/tenant")).is_success

        await until(known, f"the server knows the key of {tenant}")
        yield client


async def test_each_tenant_has_its_own_secret(
    settings: Settings, catalog: GraphCatalog, database: Database, receiver: Receiver
) -> None:
    async with serving(settings, catalog) as anybody:
        before = await start(anybody, "echo", receiver.url)
        await receiver.about(before["run_id"])
        got: dict[str, Received] = {}
        for tenant in ("acme", "bolt"):
            async with tenant_client(database, anybody.base_url, tenant) as client:
                run = await start(client, "echo", receiver.url)
                got[tenant] = await receiver.about(run["run_id"])
                await settled(client, run)
    secrets = {tenant: (await command(settings, tenant))[1] for tenant in ("acme", "bolt")}
    # Each of the operator's two secrets gives the tenant one.
    assert len({*secrets["acme"], *secrets["bolt"], NEW_SECRET, OLD_SECRET}) == 6
    for tenant, other in (("acme", "bolt"), ("bolt", "acme")):
        assert all(verifies(secret, got[tenant]) for secret in secrets[tenant])
        assert not any(verifies(secret, got[tenant]) for secret in [*secrets[other], NEW_SECRET, OLD_SECRET])
    # Without a tenant nothing changes.
    [untenanted] = [one for one in receiver.received if one.json["run_id"] == before["run_id"]]
    assert verifies(NEW_SECRET, untenanted)
    assert verifies(OLD_SECRET, untenanted)


async def test_operator_rotates_the_secret_of_one_tenant(
    settings: Settings, catalog: GraphCatalog, database: Database, receiver: Receiver
) -> None:
    async with serving(settings, catalog) as anybody:

        async def deliver(client: httpx.AsyncClient) -> Received:
            run = await start(client, "echo", receiver.url)
            return await receiver.about(run["run_id"])

        async with (
            tenant_client(database, anybody.base_url, "acme") as acme,
            tenant_client(database, anybody.base_url, "bolt") as bolt,
        ):
            _, first = await command(settings, "acme")
            _, others = await command(settings, "bolt")
            _, both = await command(settings, "acme", "--rotate")
            assert both[2:] == first
            assert not {*both[:2]} & {*first}
            got = await deliver(acme)
            assert all(verifies(secret, got) for secret in both)
            _, newest = await command(settings, "acme", "--retire")
            assert newest == both[:2]
            got = await deliver(acme)
            assert all(verifies(secret, got) for secret in newest)
            assert not any(verifies(secret, got) for secret in first)
            assert (await command(settings, "bolt"))[1] == others
            got = await deliver(bolt)
            assert all(verifies(secret, got) for secret in others)
    # However often it is rotated, two generations sign.
    for _ in range(3):
        _, last = await command(settings, "acme", "--rotate")
    assert len(last) == 4
    shown = json.loads((await command(settings, "acme", "--json"))[0].stdout)
    assert shown == {"tenant_id": "acme", "secrets": last}


async def test_secret_of_nobody_is_not_shown(settings: Settings, database: Database) -> None:
    missing, printed = await command(settings, "nobody")
    assert str(missing.exception) == "Tenant nobody not found."
    assert printed == []
    await query(database, "INSERT INTO tenant (tenant_id) VALUES ('acme') RETURNING 1")
    unsigned, printed = await command(settings, "acme", environ={"WEBHOOK_SECRETS": None})
    assert "HOLDFAST_WEBHOOK_SECRETS is not set" in str(unsigned.exception)
    assert printed == []
    both, printed = await command(settings, "acme", "--rotate", "--retire")
    assert "give one of them" in str(both.exception)
    assert printed == []
    assert isinstance(both.exception, CommandError)


async def test_tenants_of_an_older_version_get_different_salts(database: Database) -> None:
    """Older versions insert tenants without naming the column, and the migration fills it for those that are there."""
    await query(database, "INSERT INTO tenant (tenant_id) VALUES ('a'), ('b') RETURNING 1")
    rows = await query(database, "SELECT webhook_salts FROM tenant")
    assert [len(row["webhook_salts"]) for row in rows] == [1, 1]
    assert len({row["webhook_salts"][0] for row in rows}) == 2
    assert {len(row["webhook_salts"][0]) for row in rows} == {32}


def test_tenant_secret_depends_on_all_that_it_is_computed_from() -> None:
    computed = {
        secrets_of_tenant([secret], tenant, [salt])[0]
        for secret in (NEW_SECRET, OLD_SECRET)
        for tenant in ("acme", "bolt")
        for salt in (SALT, OTHER_SALT)
    }
    assert len(computed) == 8
    assert {len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) for secret in computed} == {32}
    assert secrets_of_tenant([NEW_SECRET], "acme", [SALT]) == secrets_of_tenant([NEW_SECRET], "acme", [SALT])
    assert secrets_of_tenant([NEW_SECRET, OLD_SECRET], "acme", [SALT, OTHER_SALT]) == [
        secrets_of_tenant([secret], "acme", [salt])[0]
        for salt in (SALT, OTHER_SALT)
        for secret in (NEW_SECRET, OLD_SECRET)
    ]
    assert secrets_of_tenant([NEW_SECRET], "acme", []) == []


@pytest.mark.parametrize("error", ["ConnectError: [Errno 111] Connect call failed ('10.0.0.5', 80)", None])
async def test_migration_removes_addresses_from_stored_errors(database: Database, error: str | None) -> None:
    from holdfast.db.migrate import migrations

    [migration] = [one for one in migrations() if one.name == "0016_webhook_secrets"]
    [statement] = re.findall(r"UPDATE webhook_delivery[^;]*;", migration.statements)
    for status, stored in ((None, error), (None, "No answer within 10 seconds."), (500, "The answer was 500.")):
        await query(
            database,
            "INSERT INTO webhook_delivery (run_id, thread_id, url, run, last_status, last_error) "
            "VALUES (gen_random_uuid(), gen_random_uuid(), 'https://example.com', '{}', %s, %s) RETURNING 1",
            status,
            stored,
        )
    async with database.transaction() as connection:
        await connection.execute(statement.encode())
    left = {row["last_error"] for row in await query(database, "SELECT last_error FROM webhook_delivery")}
    hidden = None if error is None else "The try failed, for a reason that is in the server's log."
    assert left == {hidden, "No answer within 10 seconds.", "The answer was 500."}

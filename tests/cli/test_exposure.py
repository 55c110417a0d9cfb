"""A server that other machines reach does not start without a login, and does not lose it while it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.auth.exposure import refuse_open_server
from holdfast.auth.known_keys import KnownKeys
from holdfast.cli.exit_codes import ExitCode
from holdfast.db.connect import Database
from holdfast.errors import SettingsError
from holdfast.graphs.config import load_config
from holdfast.resources.api_keys import create_key, revoke_key
from holdfast.settings import Settings, load_settings
from tests.cli.processes import holdfast
from tests.support.http_project import project
from tests.support.servers import free_port
from tests.support.smoke import EXAMPLES

AUTH = {"path": "./auth.py:auth"}
EVERYWHERE = "0.0.0.0"


@pytest.mark.parametrize("command", ["web", "serve", "dev"])
def test_open_server_does_not_start_where_other_machines_reach_it(database_url: str, command: str) -> None:
    environ = {**os.environ, "DATABASE_URL": database_url}
    program = holdfast(command, "--config", EXAMPLES, "--host", EVERYWHERE, "--port", str(free_port()))
    ended = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=120)
    assert ended.returncode == ExitCode.CONFIG, ended.stderr
    for part in (f"HOLDFAST_HOST={EVERYWHERE}", "no API keys", "holdfast keys create", "HOLDFAST_ALLOW_KEYLESS=true"):
        assert part in ended.stderr, ended.stderr
    assert "another starts" not in ended.stderr


@pytest.mark.parametrize(
    ("host", "given", "refused"),
    [
        (EVERYWHERE, {}, "no API keys"),
        ("::", {}, "no API keys"),
        ("", {}, "no API keys"),
        ("192.0.2.1", {}, "no API keys"),
        ("no-such-host.invalid", {}, "no API keys"),
        ("127.0.0.1", {}, None),
        ("127.1.2.3", {}, None),
        ("::1", {}, None),
        ("localhost", {}, None),
        (EVERYWHERE, {"keys": True}, None),
        (EVERYWHERE, {"auth": AUTH}, None),
        (EVERYWHERE, {"auth": {}}, "no API keys"),
        (EVERYWHERE, {"auth": AUTH, "studio": True}, "HOLDFAST_STUDIO_AUTH=false"),
        (EVERYWHERE, {"auth": AUTH, "studio": True, "keys": True}, "HOLDFAST_STUDIO_AUTH=false"),
        (EVERYWHERE, {"auth": {**AUTH, "disable_studio_auth": True}, "studio": True}, None),
        (EVERYWHERE, {"environ": {"ALLOW_KEYLESS": "true"}}, None),
        (EVERYWHERE, {"environ": {"HOLDFAST_ALLOW_KEYLESS": "true"}}, None),
    ],
)
def test_login_is_needed_beyond_loopback(host: str, given: dict[str, Any], refused: str | None) -> None:
    config = project(auth=given["auth"]) if "auth" in given else load_config(Path(EXAMPLES))
    settings = load_settings(given.get("environ", {}), host=host, studio_auth=given.get("studio", False))
    if refused is None:
        refuse_open_server(settings, config, keys=given.get("keys", False))
    else:
        with pytest.raises(SettingsError, match=refused):
            refuse_open_server(settings, config, keys=given.get("keys", False))


@pytest.mark.parametrize(
    ("host", "environ", "open_again"),
    [("127.0.0.1", {}, True), (EVERYWHERE, {}, False), (EVERYWHERE, {"ALLOW_KEYLESS": "true"}, True)],
)
async def test_server_that_other_machines_reach_stays_closed_when_its_last_key_is_deleted(
    settings: Settings, host: str, environ: dict[str, str], open_again: bool
) -> None:
    database = Database(load_settings(environ, database_url=settings.database_url, host=host), "test")
    await database.open()
    try:
        async with database.transaction() as connection:
            key, _ = await create_key(connection, "acme", "test", ["read"])
        known_keys = KnownKeys(database)
        await known_keys.read()
        assert (known_keys.guarded, known_keys.has_keys) == (True, True)
        async with database.transaction() as connection:
            await revoke_key(connection, key[:9], forget=True)
        await known_keys.read()
        assert (known_keys.guarded, known_keys.has_keys) == (not open_again, False)
    finally:
        await database.close()

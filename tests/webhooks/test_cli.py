"""`holdfast webhooks`, against a server whose receiver has refused once."""

from __future__ import annotations

import asyncio
import json

import httpx
from typer.testing import CliRunner, Result

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.main import app
from tests.support.receiver import Receiver
from tests.webhooks.test_delivery import settled, start


async def command(client: httpx.AsyncClient, *arguments: str) -> Result:
    environ = {"HOLDFAST_URL": str(client.base_url), "COLUMNS": "250", "NO_COLOR": "1"}

    def invoke() -> Result:
        return CliRunner().invoke(app, ["webhooks", *arguments], env=environ)

    return await asyncio.to_thread(invoke)


async def test_failed_delivery_is_listed_and_sent_again(client: httpx.AsyncClient, receiver: Receiver) -> None:
    assert "No deliveries." in (await command(client, "list")).output
    receiver.answer = lambda _: 410
    run = await start(client, "echo", receiver.url)
    seen = await settled(client, run, "failed")
    listed = (await command(client, "list", "--state", "failed")).output
    assert all(text in listed for text in (seen["delivery_id"], "410", receiver.url))
    receiver.answer = lambda _: 200
    assert (await command(client, "redeliver", seen["delivery_id"])).exit_code == ExitCode.OK
    await settled(client, run)
    [delivery] = (await command(client, "list", "--run", run["run_id"], "--json")).output.splitlines()
    assert json.loads(delivery)["state"] == "delivered"
    refused = await command(client, "redeliver", run["run_id"])
    assert refused.exit_code != ExitCode.OK

"""The receiver of the examples, as a reader would run it."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

from tests.cli.processes import Program
from tests.webhooks.conftest import NEW_SECRET, OLD_SECRET
from tests.webhooks.test_delivery import settled, start

EXAMPLE = Path(__file__).parents[2] / "examples" / "webhook_receiver.py"


async def test_example_receiver_accepts_only_signed_deliveries(client: httpx.AsyncClient) -> None:
    with Program([sys.executable, str(EXAMPLE), OLD_SECRET, "0"], environ={}) as program:
        url = program.expect(r"Receiving at (http://\S+)", 30)[1]
        run = await start(client, "echo", url)
        assert (await settled(client, run))["last_status"] == 204
        program.expect(rf"run {run['run_id']} of thread {run['thread_id']}: success", 30)
        async with httpx.AsyncClient() as stranger:
            headers = {"webhook-id": "1", "webhook-timestamp": "1", "webhook-signature": f"v1,{NEW_SECRET}"}
            assert (await stranger.post(url, json={}, headers=headers)).status_code == 400

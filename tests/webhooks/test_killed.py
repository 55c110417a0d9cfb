"""The process that sends a webhook is killed before it could note that: it is sent again, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from psycopg.rows import DictRow

from tests.support.fleet import Fleet, Member, until
from tests.support.receiver import Receiver

ENVIRON = {"WEBHOOK_ALLOW_PRIVATE": "true", "WEBHOOK_TIMEOUT_SECONDS": "8"}


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(database_url, tmp_path) as fleet:
        fleet.steps.create()
        yield fleet


async def leader(fleet: Fleet) -> Member:
    async def leading() -> Member | None:
        return next((member for member in fleet.members if member.logged("upkeep.leading")), None)

    found = await until(leading, "somebody leads")
    assert found is not None
    return found


async def test_the_sender_is_killed_between_sending_and_noting(fleet: Fleet, receiver: Receiver) -> None:
    # The first leads. It has nothing to do with the run itself.
    sender = await fleet.start_web(ENVIRON)
    assert await leader(fleet) is sender
    await fleet.start(webs=1, workers=1, environ=ENVIRON)
    receiver.hold = asyncio.Event()
    run = await fleet.post("steps", {}, webhook=receiver.url)
    await receiver.get()
    # It has arrived, and is not answered before the sender is gone.
    sender.kill()
    receiver.hold.set()

    async def delivered() -> list[DictRow]:
        return await fleet.query("SELECT * FROM webhook_delivery WHERE state = 'delivered'")

    [row] = await until(delivered, "the webhook is delivered")
    assert row["run_id"] == run.run_id
    assert row["attempts"] == 2
    first, second = receiver.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"] == str(row["delivery_id"])
    assert first.json["run_id"] == second.json["run_id"] == str(run.run_id)
    assert second.json["status"] == "success"

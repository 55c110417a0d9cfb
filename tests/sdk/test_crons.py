"""The Python SDK's crons, asynchronous and not, from creation to the runs they make."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import httpx
import pytest
from langgraph_sdk.errors import BadRequestError, NotFoundError, UnprocessableEntityError

from holdfast.settings import Settings
from tests.support.sdk import Sdk
from tests.support.waiting import until

QUICK = {"seconds": 0}


@pytest.fixture(params=["async", "sync"])
async def sdk(request: pytest.FixtureRequest, client: httpx.AsyncClient, settings: Settings) -> AsyncIterator[Sdk]:
    opened = Sdk(f"http://127.0.0.1:{settings.port}", blocking=request.param == "sync")
    yield opened
    await opened.close()


async def test_C61_the_life_of_a_cron(sdk: Sdk) -> None:
    end = datetime.now(UTC) + timedelta(days=400)
    cron = await sdk(
        "crons.create",
        "steps",
        schedule="0 9 * * MON",
        timezone=ZoneInfo("Europe/Berlin"),
        input=QUICK,
        metadata={"team": "a"},
        end_time=end,
        on_run_completed="keep",
        multitask_strategy="enqueue",
        durability="sync",
    )
    assert (cron["schedule"], cron["timezone"], cron["on_run_completed"]) == ("0 9 * * MON", "Europe/Berlin", "keep")
    assert datetime.fromisoformat(cron["end_time"]) == end
    due = datetime.fromisoformat(cron["next_run_date"]).astimezone(ZoneInfo("Europe/Berlin"))
    assert (due.weekday(), due.hour, due.minute) == (0, 9, 0)
    identity = cron["cron_id"]

    with pytest.raises(BadRequestError):
        await sdk("crons.update", identity)
    updated = await sdk("crons.update", identity, schedule="30 9 * * MON", end_time=None, metadata={"b": 1})
    assert (updated["end_time"], updated["metadata"]) == (None, {"team": "a", "b": 1})
    assert updated["next_run_date"] != cron["next_run_date"]
    assert (await sdk("crons.update", identity, enabled=False))["enabled"] is False

    thread_id = (await sdk("threads.create"))["thread_id"]
    other = await sdk("crons.create_for_thread", thread_id, "steps", schedule="@daily", input=QUICK, enabled=False)
    assert (other["thread_id"], other["on_run_completed"]) == (thread_id, None)

    async def found(**asked: Any) -> list[str]:
        return [one["cron_id"] for one in await sdk("crons.search", **asked)]

    assert await found() == [other["cron_id"], identity]
    assert await found(assistant_id="steps", thread_id=thread_id) == [other["cron_id"]]
    assert await found(metadata={"team": "a"}, enabled=False) == [identity]
    assert await found(sort_by="created_at", sort_order="asc", limit=1, offset=1) == [other["cron_id"]]
    assert await sdk("crons.search", select=["schedule"], limit=1) == [{"schedule": "@daily"}]
    assert await sdk("crons.count", assistant_id=cron["assistant_id"]) == 2
    assert await sdk("crons.count", thread_id=thread_id) == 1
    await sdk("crons.delete", identity)
    with pytest.raises(NotFoundError):
        await sdk("crons.delete", identity)
    await sdk("threads.delete", thread_id)
    assert await sdk("crons.count") == 0

    with pytest.raises(UnprocessableEntityError):
        await sdk("crons.create", "steps", schedule="whenever")
    with pytest.raises(UnprocessableEntityError):
        await sdk("crons.create", "steps", schedule="@daily", timezone="Mars/Olympus")
    with pytest.raises(NotFoundError):
        await sdk("crons.create_for_thread", str(uuid4()), "steps", schedule="@daily")
    with pytest.raises(NotFoundError):
        await sdk("crons.create", str(uuid4()), schedule="@daily")


async def test_the_runs_of_a_cron(sdk: Sdk) -> None:
    thread_id = (await sdk("threads.create"))["thread_id"]
    cron = await sdk(
        "crons.create_for_thread",
        thread_id,
        "steps",
        schedule="* * * * * *",
        input=QUICK,
        metadata={"team": "a"},
        config={"configurable": {"model": "m"}},
    )

    async def done() -> Any:
        return [run for run in await sdk("runs.list", thread_id) if run["status"] == "success"]

    run = (await until(done, "a run of the cron"))[0]
    await sdk("crons.update", cron["cron_id"], enabled=False)
    assert run["metadata"]["cron_id"] == cron["cron_id"]
    assert run["metadata"]["team"] == "a"
    configurable = run["kwargs"]["config"]["configurable"]
    assert (configurable["cron_id"], configurable["model"]) == (cron["cron_id"], "m")
    assert (await sdk("threads.get", thread_id))["values"]["done"][:5] == ["s1", "s2", "s3", "s4", "s5"]

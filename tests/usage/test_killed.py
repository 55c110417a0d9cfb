"""kill -9 of a worker in the middle of a run that spends: the next attempt goes on counting, and stays within the
budget of both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet import Fleet, until
from tests.support.watching import WatchedRun


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(database_url, tmp_path) as fleet:
        fleet.steps.create()
        yield fleet


async def usage_of(fleet: Fleet, run: WatchedRun) -> dict[str, Any]:
    answer = await fleet.client.get(f"{fleet.urls[0]}/threads/{run.thread_id}/runs/{run.run_id}/usage")
    answer.raise_for_status()
    return dict(answer.json())


async def test_two_attempts_are_one_count(fleet: Fleet) -> None:
    await fleet.start()
    unlimited = await fleet.post("spending", {"hold": "s3"})
    limited = await fleet.post("spending", {"hold": "s3"}, max_tokens=450, max_steps=5)
    runs = [unlimited, limited]
    watched = [fleet.watch(run)[1] for run in runs]
    for run in runs:
        await fleet.held(run, "s3")

        async def counted(run: WatchedRun = run) -> bool:
            return bool((await usage_of(fleet, run))["calls"] == 3)

        # Seen by everybody while the run is under way.
        await until(counted, "the three calls are durable")
    for member in {await fleet.owner(run) for run in runs}:
        member.kill()
    if not any(member.url == "" and member.process.poll() is None for member in fleet.members):
        await fleet.start_worker()
    for run in runs:
        await fleet.taken_over(run)
        fleet.steps.open_gate(run.thread_id)
    for watching in watched:
        await watching

    row = await fleet.row(unlimited)
    assert (row["status"], row["attempt"]) == ("success", 2)
    used = await usage_of(fleet, unlimited)
    # The call of the step that was under way was made twice, and paid for twice; the step counts once.
    assert (used["calls"], used["total_tokens"], used["steps"]) == (6, 600, 5)
    assert used["models"]["openai:gpt-4o"]["calls"] == 6

    row = await fleet.row(limited)
    assert (row["status"], row["error"]["error"]) == ("error", "BudgetExceeded")
    assert "max_tokens=450 reached, 500 tokens used" in row["error"]["message"]
    used = await usage_of(fleet, limited)
    assert (used["calls"], used["total_tokens"], used["steps"]) == (5, 500, 4)
    assert used["budget"] == {"max_tokens": 450, "max_steps": 5}
    assert used["remaining"] == {"max_tokens": 0, "max_steps": 1}
    for run in runs:
        mine = await usage_of(fleet, run)
        whole = (await fleet.client.get(f"{fleet.urls[0]}/threads/{run.thread_id}/usage")).json()
        assert {key: whole[key] for key in ("calls", "total_tokens", "cost_usd", "steps", "models")} == {
            key: mine[key] for key in ("calls", "total_tokens", "cost_usd", "steps", "models")
        }
    state = await fleet.client.get(f"{fleet.urls[0]}/threads/{limited.thread_id}/state")
    assert state.json()["values"]["done"] == ["s1", "s2", "s3"]
    assert await goes_on(fleet, limited) == ["s1", "s2", "s3", "s4", "s5"]


async def goes_on(fleet: Fleet, run: WatchedRun) -> Any:
    answer: httpx.Response = await fleet.client.post(
        f"{fleet.urls[0]}/threads/{run.thread_id}/runs/wait", json={"assistant_id": "spending", "input": None}
    )
    return answer.json()["done"]

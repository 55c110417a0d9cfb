"""Processes are killed around a question: it is answered once, and its deadline is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from psycopg.rows import DictRow

from tests.interrupts.asking import PROJECT
from tests.support.fleet import Fleet, until
from tests.support.watching import WatchedRun


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Fleet(database_url, tmp_path, PROJECT) as fleet:
        yield fleet


async def question(fleet: Fleet) -> DictRow:
    """The only question there is, once it is asked."""

    async def asked() -> list[DictRow]:
        return await fleet.query("SELECT * FROM interrupt WHERE asked_at IS NOT NULL")

    [row] = await until(asked, "somebody asks")
    return row


async def result(fleet: Fleet, run: WatchedRun) -> Any:
    response = await fleet.client.get(f"{fleet.urls[0]}/threads/{run.thread_id}/runs/{run.run_id}/join")
    return response.json()


async def test_the_first_web_process_is_killed_and_then_the_worker(fleet: Fleet) -> None:
    (first, second), (worker,) = await fleet.start(webs=2, workers=1)
    asking = await fleet.post("gate", {"seconds": 6})
    asked = await question(fleet)
    path = f"/threads/{asking.thread_id}/runs"
    body = {"assistant_id": "gate", "command": {"resume": {asked["interrupt_id"]: "yes"}}}
    seen: list[str] = []

    async def follow() -> None:
        """As a client does: from one process to the next, after what it has seen."""
        last = "-1"
        for url in (first.url, second.url):
            place = f"{url}{path}/{asking.run_id}/stream"
            try:
                async with fleet.client.stream(
                    "GET", place, params={"follow": "true"}, headers={"last-event-id": last}
                ) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("id:"):
                            last = line.removeprefix("id:").strip()
                            seen.append(last)
                    return
            except httpx.TransportError:
                assert url == first.url

    following = asyncio.create_task(follow())

    async def watching() -> bool:
        return bool(seen)

    await until(watching, "the stream has begun")
    answers = await asyncio.gather(*(fleet.client.post(f"{url}{path}", json=body) for url in (first.url, second.url)))
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    [accepted] = [answer.json()["run_id"] for answer in answers if answer.status_code == 200]
    first.kill()
    again = await fleet.client.post(f"{second.url}{path}", json=body)
    assert (again.status_code, again.json()["run_id"]) == (409, accepted)
    answering = WatchedRun(UUID(accepted), asking.thread_id)
    assert await fleet.owner(answering) is worker
    worker.kill()
    await fleet.start_worker()
    done = await result(fleet, answering)
    assert (done["answer"], done["done"]) == ("yes", ["review", "work"])
    await asyncio.wait_for(following, 60)
    assert [int(one) for one in seen] == sorted({int(one) for one in seen}), "nothing was shown twice"
    late = await fleet.client.post(f"{second.url}{path}", json=body)
    assert (late.status_code, late.json()["run_id"]) == (409, accepted)
    [row] = await fleet.query("SELECT answered_by, settled_at IS NOT NULL AS settled FROM interrupt")
    assert (row["answered_by"], row["settled"]) == (answering.run_id, True)


async def test_an_answer_that_kills_its_workers_gives_way_to_the_next(fleet: Fleet) -> None:
    once = {"HOLDFAST_MAX_CRASHES": "1"}
    await fleet.start(webs=1, workers=1, environ=once)
    asking = await fleet.post("decision", {})
    asked = await question(fleet)
    path = f"{fleet.urls[0]}/threads/{asking.thread_id}/runs"
    body = {"assistant_id": "decision", "command": {"resume": "exit"}}
    poison = WatchedRun(UUID((await fleet.client.post(path, json=body)).json()["run_id"]), asking.thread_id)
    await fleet.start_worker(once)

    async def poisoned() -> bool:
        return bool((await fleet.row(poison))["dead_letter"] == "poison")

    await until(poisoned, "the answering run is a poison run")
    assert (await question(fleet))["answered_by"] is None
    body = {"assistant_id": "decision", "command": {"resume": {asked["interrupt_id"]: "no"}}}
    second = WatchedRun(UUID((await fleet.client.post(path, json=body)).json()["run_id"]), asking.thread_id)
    assert (await result(fleet, second))["decisions"] == ["no"]
    assert await fleet.query("SELECT 1 FROM checkpoint_writes WHERE channel = '__resume__'") == []


async def test_a_deadline_that_passes_while_nobody_is_there(fleet: Fleet) -> None:
    await fleet.start(webs=1, workers=1)
    await fleet.post("gate", {"terms": {"deadline": 3600, "default": "nobody"}})
    asked = await question(fleet)
    for member in fleet.members:
        member.kill()
    # The hour passes.
    await fleet.query("UPDATE interrupt SET due_at = due_at - interval '2 hours' RETURNING 1")
    await fleet.start(webs=1, workers=2)

    async def answered() -> list[DictRow]:
        return await fleet.query("SELECT * FROM interrupt WHERE settled_at IS NOT NULL")

    [row] = await until(answered, "the default is given")
    assert row["defaulted"] is True
    done = await result(fleet, WatchedRun(row["answered_by"], asked["thread_id"]))
    assert done["answer"] == "nobody"
    assert len(await fleet.query("SELECT FROM run")) == 2

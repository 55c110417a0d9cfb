"""A letter is retried once, and a request with a key creates once, whoever is killed in the middle."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import httpx

from tests.support.fleet import Fleet, until
from tests.support.watching import WatchedRun

STEPS = ["s1", "s2", "s3", "s4", "s5"]


async def test_poison_runs_are_retried_from_their_last_checkpoint(fleet: Fleet) -> None:
    (web, other), _ = await fleet.start(webs=2, workers=3, environ={"HOLDFAST_MAX_CRASHES": "1"})

    async def killed_in_s3(run: WatchedRun) -> dict[str, Any]:
        """The letter that a run becomes when its worker dies of it."""

        async def inside() -> bool:
            return "s3" in fleet.steps.nodes(run.run_id)

        async def given_up() -> bool:
            return bool((await fleet.row(run))["dead_letter"] == "poison")

        await until(inside, "the run is in s3")
        (await fleet.owner(run)).kill()
        await until(given_up, "the run is a letter")
        shown: dict[str, Any] = (await fleet.client.get(f"{other.url}/dead-letters/{run.run_id}")).json()
        return shown

    letter = await fleet.post("steps", {"hold": "s3"})
    await fleet.held(letter, "s3")
    shown = await killed_in_s3(letter)
    assert (shown["reason"], shown["crashes"], shown["attempts"], shown["state"]) == ("poison", 1, 1, "open")
    assert shown["checkpoint_id"] is not None

    # The process that answers is killed as soon as the retry is there, which the client may never hear of.
    posting = asyncio.create_task(fleet.client.post(f"{web.url}/dead-letters/{letter.run_id}/retry", json={}))

    async def retried_by() -> UUID | None:
        found: UUID | None = (await fleet.row(letter))["retried_by"]
        return found

    retried = await until(retried_by, "the letter is retried")
    web.kill()
    await asyncio.gather(posting, return_exceptions=True)
    again = await fleet.client.post(f"{other.url}/dead-letters/{letter.run_id}/retry", json={})
    assert again.status_code == 409
    assert str(retried) in again.json()["detail"]

    # It dies of the same step, before it has written anything of its own.
    assert retried is not None
    second = WatchedRun(retried, letter.thread_id)
    assert (await killed_in_s3(second))["checkpoint_id"] == shown["checkpoint_id"]
    fleet.steps.open_gate(letter.thread_id)
    answer = await fleet.client.post(f"{other.url}/dead-letters/{second.run_id}/retry", json={})
    last = WatchedRun(UUID(answer.json()["run_id"]), letter.thread_id)
    watcher, watching = fleet.watch(last)
    await watching
    assert (await fleet.row(last))["status"] == "success"
    assert watcher.saw("values")[-1]["done"] == STEPS
    executed = [fleet.steps.nodes(run.run_id) for run in (letter, second, last)]
    assert executed == [["s1", "s2", "s3"], ["s3"], ["s3", "s4", "s5"]]
    assert len(await fleet.query("SELECT run_id FROM run")) == 3


async def test_a_request_with_a_key_creates_once_when_its_process_is_killed(fleet: Fleet) -> None:
    first, second = await asyncio.gather(fleet.start_web(), fleet.start_web())
    headers = {"Idempotency-Key": "order-17"}
    thread_id = uuid4()
    body = {"assistant_id": "steps", "input": {}, "if_not_exists": "create"}

    async def post(url: str) -> httpx.Response:
        return await fleet.client.post(f"{url}/threads/{thread_id}/runs/wait", json=body, headers=headers)

    # Nobody executes it, so there is no answer yet when the process dies.
    posting = asyncio.create_task(post(first.url))

    async def created() -> bool:
        return bool(await fleet.query("SELECT run_id FROM idempotency_key"))

    await until(created, "the run is there")
    first.kill()
    assert isinstance((await asyncio.gather(posting, return_exceptions=True))[0], httpx.TransportError)
    (kept,) = await fleet.query("SELECT run_id FROM run")
    repeating = asyncio.create_task(post(second.url))
    await fleet.start_worker()
    answer = await repeating
    assert (answer.json()["done"], answer.headers["idempotency-replayed"]) == (STEPS, "true")
    assert answer.headers["content-location"].endswith(str(kept["run_id"]))
    assert fleet.steps.nodes(kept["run_id"]) == STEPS
    assert len(await fleet.query("SELECT run_id FROM run")) == 1


async def test_a_process_that_is_killed_before_it_has_created_leaves_the_key_to_others(fleet: Fleet) -> None:
    first, second = await asyncio.gather(fleet.start_web(), fleet.start_web())
    thread_id = (await fleet.client.post(f"{first.url}/threads", json={})).json()["thread_id"]
    waiting_locks = (
        "SELECT count(*) AS found FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE NOT granted AND locktype = %s AND datname = current_database()"
    )
    headers = {"Idempotency-Key": "order-18"}

    def post(url: str) -> asyncio.Task[httpx.Response]:
        path = f"{url}/threads/{thread_id}/runs"
        body = {"assistant_id": "steps", "input": {}}
        return asyncio.create_task(fleet.client.post(path, json=body, headers=headers))

    async with fleet.holding_thread(UUID(thread_id)):
        lost = post(first.url)

        async def in_the_middle() -> bool:
            return bool((await fleet.query(waiting_locks, ("transactionid",)))[0]["found"])

        await until(in_the_middle, "the first is in the middle of creating")
        repeated = post(second.url)

        async def behind() -> bool:
            return bool((await fleet.query(waiting_locks, ("advisory",)))[0]["found"])

        await until(behind, "the second waits for the first")
        first.kill()
    answer = await repeated
    assert (answer.status_code, "idempotency-replayed" in answer.headers) == (200, False)
    await asyncio.gather(lost, return_exceptions=True)
    assert [str(row["run_id"]) for row in await fleet.query("SELECT run_id FROM run")] == [answer.json()["run_id"]]

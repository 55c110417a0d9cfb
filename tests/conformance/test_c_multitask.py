"""C29, C34 to C42: several runs of one thread, and runs that are called off."""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.conformance.calls import (
    AT_ONCE,
    FOREVER,
    HELLO,
    PATIENCE,
    STEPS,
    history_of,
    names,
    ok,
    refused,
    running,
    start_run,
    status_of,
    stream,
    until_gone,
    until_status,
    wait_run,
)
from tests.support.sse import frames
from tests.support.waiting import until


def id_of(path: str) -> str:
    return path.rsplit("/", 1)[1]


async def test_c29_waiting_runs_with_selected_fields(client: httpx.AsyncClient, thread_id: str) -> None:
    runs = f"/threads/{thread_id}/runs"
    await running(client, thread_id)
    created = await ok(client.post(runs, json={"assistant_id": "slow", "input": AT_ONCE}))
    assert (created["status"], created["kwargs"]["input"]) == ("pending", AT_ONCE)
    assert await ok(client.get(f"{runs}?status=pending&select=run_id")) == [{"run_id": created["run_id"]}]
    assert await ok(client.get(f"{runs}?status=pending&select=run_id&select=status&limit=1000")) == [
        {"run_id": created["run_id"], "status": "pending"}
    ]
    assert len(await ok(client.get(f"{runs}?select=run_id"))) == 2


async def test_c34_reject_creates_nothing(client: httpx.AsyncClient, thread_id: str) -> None:
    first = await running(client, thread_id)
    body = {"assistant_id": "slow", "input": AT_ONCE, "multitask_strategy": "reject"}
    for way in ("", "/wait", "/stream"):
        await refused(client.post(f"/threads/{thread_id}/runs{way}", json=body), 409)
    [only] = await ok(client.get(f"/threads/{thread_id}/runs"))
    assert (only["run_id"], only["status"]) == (id_of(first), "running")


async def test_c35_enqueued_runs_take_turns(client: httpx.AsyncClient, thread_id: str) -> None:
    first = await running(client, thread_id)
    later = []
    for strategy in ({"multitask_strategy": "enqueue"}, {}):
        later.append(await start_run(client, thread_id, "slow", input=AT_ONCE, **strategy))
        assert await status_of(client, later[-1]) == "pending"
    await ok(client.post(f"{first}/cancel?wait=1"))
    for path in later:
        assert (await ok(client.get(f"{path}/join")))["done"]
        assert await status_of(client, path) == "success"
    wrote = [state["metadata"]["run_id"] for state in reversed(await history_of(client, thread_id))]
    # One after the other: none wrote between another's checkpoints.
    assert [run_id for run_id, _ in groupby(wrote)] == [id_of(path) for path in (first, *later)]
    assert (await ok(client.get(f"/threads/{thread_id}")))["values"]["done"] == STEPS * 2


async def interrupted_after_one_step(client: httpx.AsyncClient, thread_id: str) -> tuple[str, set[str]]:
    """A run in its first step on top of an earlier run that stopped after its first; and the earlier checkpoints."""
    await wait_run(client, thread_id, "slow", input=AT_ONCE, interrupt_after=["s1"])
    earlier = {state["checkpoint_id"] for state in await history_of(client, thread_id)}
    return await running(client, thread_id), earlier


async def test_c36_interrupt_keeps_what_was_done(client: httpx.AsyncClient, thread_id: str) -> None:
    old, earlier = await interrupted_after_one_step(client, thread_id)
    of_old = {state["checkpoint_id"] for state in await history_of(client, thread_id)} - earlier
    assert of_old
    watching = asyncio.create_task(stream(client, "GET", f"{old}/stream"))
    values = await wait_run(client, thread_id, "slow", input=AT_ONCE, multitask_strategy="interrupt")
    assert await status_of(client, old) == "interrupted"
    _, events = await watching
    assert "error" not in names(events)
    states = await history_of(client, thread_id)
    assert of_old | earlier <= {state["checkpoint_id"] for state in states}
    # On top: the new run's input has the interrupted run's last checkpoint as its parent, and steps go on counting.
    [new] = [run for run in await ok(client.get(f"/threads/{thread_id}/runs")) if run["status"] == "success"][:1]
    mine = [state for state in states if state["metadata"]["run_id"] == new["run_id"]]
    assert mine[-1]["parent_checkpoint"]["checkpoint_id"] in of_old
    assert mine[-1]["metadata"]["step"] == states[len(mine)]["metadata"]["step"] + 1
    assert values["done"] == ["s1", *STEPS]


async def test_c37_rollback_leaves_no_trace(client: httpx.AsyncClient, thread_id: str) -> None:
    old, earlier = await interrupted_after_one_step(client, thread_id)
    waiting = await start_run(client, thread_id, "slow", input=AT_ONCE)
    values = await wait_run(client, thread_id, "slow", input=AT_ONCE, multitask_strategy="rollback")
    for path in (old, waiting):
        await refused(client.get(path), 404)
    states = await history_of(client, thread_id)
    assert earlier <= {state["checkpoint_id"] for state in states}
    wrote = {state["metadata"]["run_id"] for state in states}
    assert id_of(old) not in wrote
    assert wrote == {run["run_id"] for run in await ok(client.get(f"/threads/{thread_id}/runs"))}
    mine = [state for state in states if state["checkpoint_id"] not in earlier]
    assert mine[-1]["parent_checkpoint"]["checkpoint_id"] == max(earlier)
    assert values["done"] == ["s1", *STEPS]


async def test_c38_cancel_interrupts_a_run(client: httpx.AsyncClient, thread_id: str) -> None:
    body = {"assistant_id": "slow", "input": FOREVER, "stream_mode": ["values", "updates"]}
    seen = []
    async with client.stream("POST", f"/threads/{thread_id}/runs/stream", json=body) as response:
        path = response.headers["content-location"]
        async for frame in frames(response):
            seen.append(frame.event)
            if frame.event == "values":
                answer = await client.post(f"{path}/cancel", params={"action": "interrupt", "wait": 0})
                assert (answer.status_code, answer.content) == (202, b"")
    assert seen == ["metadata", "values"]
    assert await status_of(client, path) == "interrupted"
    thread = await ok(client.get(f"/threads/{thread_id}"))
    assert (thread["status"], thread["error"]["error"]) == ("interrupted", "UserInterrupt")
    assert (await ok(client.get(f"/threads/{thread_id}/state")))["next"] == ["s1"]


@pytest.mark.parametrize("wait", ["1", "true"])
async def test_c39_cancel_and_wait(client: httpx.AsyncClient, thread_id: str, wait: str) -> None:
    path = await running(client, thread_id)
    answer = await client.post(f"{path}/cancel", params={"wait": wait})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/json")
    assert isinstance(answer.json(), dict)
    assert (answer.headers["content-location"], answer.headers["location"]) == (path, f"{path}/join")
    assert await status_of(client, path) == "interrupted"


@pytest.mark.parametrize("wait", ["0", "1"])
async def test_c40_rolling_back_the_only_run(client: httpx.AsyncClient, thread_id: str, wait: str) -> None:
    path = await running(client, thread_id)
    answer = await client.post(f"{path}/cancel", params={"action": "rollback", "wait": wait})
    assert answer.status_code == (200 if wait == "1" else 202)
    await until_gone(client, path)
    assert await history_of(client, thread_id) == []
    assert await status_of(client, f"/threads/{thread_id}") == "idle"
    assert (await wait_run(client, thread_id, "slow", input=AT_ONCE))["done"] == STEPS


async def test_c41_what_has_ended_or_never_was_cannot_be_cancelled(client: httpx.AsyncClient, thread_id: str) -> None:
    await wait_run(client, thread_id, "echo", input=HELLO)
    [run] = await ok(client.get(f"/threads/{thread_id}/runs"))
    for run_id in (run["run_id"], str(uuid4())):
        for action in ("interrupt", "rollback"):
            for wait in (0, 1):
                path = f"/threads/{thread_id}/runs/{run_id}/cancel"
                await refused(client.post(path, params={"action": action, "wait": wait}), 404)
    assert await ok(client.get(f"/threads/{thread_id}/runs")) == [run]


@pytest.mark.parametrize("way", ["stream", "wait"])
@pytest.mark.parametrize(
    ("choice", "seconds", "status"),
    [("cancel", 3600, "interrupted"), ("continue", 0.3, "success"), (None, 0.3, "success")],
)
async def test_c42_a_client_that_leaves(
    client: httpx.AsyncClient, thread_id: str, way: str, choice: str | None, seconds: float, status: str
) -> None:
    body: dict[str, Any] = {"assistant_id": "slow", "input": {"seconds": seconds}}
    if choice is not None:
        body["on_disconnect"] = choice
    async with client.stream("POST", f"/threads/{thread_id}/runs/{way}", json=body) as response:
        path = response.headers["content-location"]

        async def begun() -> bool:
            return await status_of(client, path) != "pending"

        await until(begun, "the run begins", patience=PATIENCE)
    await until_status(client, path, status)

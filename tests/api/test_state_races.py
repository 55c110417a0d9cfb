"""An update of a thread's state and a run of it, at the same time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from uuid import uuid4

import httpx

from holdfast.db.connect import Database
from holdfast.settings import Settings
from tests.support.threads import history, made, ran, state_of
from tests.support.waiting import until

STEPS = ["s1", "s2", "s3", "s4", "s5"]


async def test_an_update_waits_for_a_run_that_is_being_created(web: httpx.AsyncClient, settings: Settings) -> None:
    """The run is not committed yet, so only the thread's lock can tell that it is coming."""
    thread_id = await made(web, metadata={"graph_id": "steps"})
    database = Database(settings, "test")
    await database.open()
    try:
        async with database.transaction() as creating:
            await creating.execute("SELECT 1 FROM thread WHERE thread_id = %s FOR NO KEY UPDATE", (thread_id,))
            await creating.execute(
                "INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, kwargs) "
                "VALUES (%s, %s, %s, 'steps', now(), '{}')",
                (uuid4(), thread_id, uuid4()),
            )
            body = {"values": {"done": ["mine"]}, "as_node": "s1"}
            updating = asyncio.create_task(web.post(f"/threads/{thread_id}/state", json=body))

            async def waits() -> bool:
                if updating.done():
                    return True
                async with database.connection() as connection:
                    cursor = await connection.execute(
                        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                    )
                    return await cursor.fetchone() is not None

            await until(waits, "the update waits for the thread")
        assert (await updating).status_code == 409
        assert await history(web, thread_id) == []
    finally:
        await database.close()


async def test_updates_and_runs_at_once_lose_and_double_nothing(client: httpx.AsyncClient) -> None:
    """Whatever is acknowledged is in the state once, and no run starts from a state that an update then replaces."""
    thread_id = await made(client, metadata={"graph_id": "steps"})
    accepted: list[str] = []
    refused = runs = 0

    async def update(name: str) -> None:
        nonlocal refused
        body = {"values": {"done": [name]}, "as_node": "s5"}
        response = await client.post(f"/threads/{thread_id}/state", json=body)
        assert response.status_code in (200, 409), response.text
        if response.status_code == 200:
            accepted.append(name)
        else:
            refused += 1

    async def run() -> None:
        nonlocal runs
        runs += 1
        await ran(client, thread_id)

    turn = 0
    while turn < 12 or not refused:
        turn += 1
        work = [update(f"u{turn}a"), run(), update(f"u{turn}b"), update(f"u{turn}c")]
        await asyncio.gather(*work[turn % 3 :], *work[: turn % 3])
        await update(f"u{turn}alone")
    done = (await state_of(client, thread_id))["values"]["done"]
    assert sorted(word for word in done if word.startswith("u")) == sorted(accepted)
    assert len(accepted) >= 12
    # Each run's steps, uninterrupted.
    text = " ".join(done)
    assert text.count(" ".join(STEPS)) == runs
    assert len(done) == len(accepted) + runs * len(STEPS)
    states = await history(client, thread_id, limit=1000)
    for newer, older in pairwise(states):
        assert newer["parent_checkpoint_id"] == older["checkpoint_id"]
    assert (await client.get(f"/threads/{thread_id}")).json()["values"]["done"] == done

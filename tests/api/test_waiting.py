"""`wait` and `join` when the database goes away at the last moment, after the headers have been sent."""

from __future__ import annotations

from uuid import UUID

import httpx
import psycopg
import pytest

from holdfast.api import streaming
from holdfast.api.context import WebContext

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def test_a_result_that_cannot_be_read_yet_is_waited_for(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failures = streaming.result, 2

    async def result(web: WebContext, thread_id: UUID, run_id: UUID) -> bytes:
        nonlocal failures
        if failures:
            failures -= 1
            raise psycopg.OperationalError("terminating connection due to administrator command")
        return await read(web, thread_id, run_id)

    monkeypatch.setattr(streaming, "result", result)
    # A run that has told nobody what came of it.
    thread_id = (await client.post("/threads", json={})).json()["thread_id"]
    later = {"assistant_id": "echo", "input": HELLO, "after_seconds": 1000}
    run = (await client.post(f"/threads/{thread_id}/runs", json=later)).json()
    await client.post(f"/threads/{thread_id}/runs/{run['run_id']}/cancel")
    answer = await client.get(f"/threads/{thread_id}/runs/{run['run_id']}/join")
    assert answer.status_code == 200
    assert answer.json() == {}
    assert failures == 0

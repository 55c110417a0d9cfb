"""Threads over HTTP, for tests that need some."""

from __future__ import annotations

from typing import Any

import httpx


async def made(client: httpx.AsyncClient, **body: Any) -> str:
    response = await client.post("/threads", json=body)
    assert response.status_code == 200, response.text
    identity: str = response.json()["thread_id"]
    return identity


async def ran(client: httpx.AsyncClient, thread_id: str, graph: str = "steps", **body: Any) -> dict[str, Any]:
    body = {"assistant_id": graph, "input": {"seconds": 0}, **body}
    response = await client.post(f"/threads/{thread_id}/runs/wait", json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def state_of(client: httpx.AsyncClient, thread_id: str, query: str = "") -> dict[str, Any]:
    response = await client.get(f"/threads/{thread_id}/state{query}")
    assert response.status_code == 200, response.text
    state: dict[str, Any] = response.json()
    return state


async def history(client: httpx.AsyncClient, thread_id: str, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(f"/threads/{thread_id}/history", json={"limit": 100, **body})
    assert response.status_code == 200, response.text
    states: list[dict[str, Any]] = response.json()
    return states

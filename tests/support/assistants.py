"""Asking for assistants, and what they are asked with."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import httpx

# The id of a graph's own assistant follows from the graph's name, on every server.
ECHO = "046b5dc7-2108-582c-9c6c-31d556d138f0"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def ok(response: Awaitable[httpx.Response], status: int = 200) -> Any:
    answered = await response
    assert answered.status_code == status, answered.text
    if status >= 400:
        assert isinstance(answered.json()["detail"], str)
    return answered.json() if answered.content else None


async def make(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    created: dict[str, Any] = await ok(client.post("/assistants", json={"graph_id": "echo", **body}))
    return created

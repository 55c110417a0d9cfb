"""The user's own fields and the headers that a project forwards are for graph code. No client reads them."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

HEADERS = {"x-forwarded": "PRIVATE-HEADER", "cookie": "session=PRIVATE-COOKIE"}
MODES = ["values", "updates", "messages", "messages-tuple", "tasks", "checkpoints", "debug", "custom"]


def private_parts(text: str) -> set[str]:
    return set(re.findall(r"PRIVATE-[A-Za-z-]+", text))


@pytest.mark.parametrize("ask", [False, True])
@pytest.mark.parametrize("subgraphs", [False, True])
@pytest.mark.parametrize("modes", [MODES, ["events"], ["events", *MODES]], ids=["modes", "events", "all"])
async def test_streams_do_not_show_private_fields(
    alice: httpx.AsyncClient, modes: list[str], subgraphs: bool, ask: bool
) -> None:
    thread_id = (await alice.post("/threads", json={})).json()["thread_id"]
    body: dict[str, Any] = {"assistant_id": "chat", "input": {"ask": ask}, "stream_mode": modes}
    body["stream_subgraphs"] = subgraphs
    streamed = await alice.post(f"/threads/{thread_id}/runs/stream", json=body, headers=HEADERS)
    assert "event: error" not in streamed.text
    assert private_parts(streamed.text) == set()
    run_id = (await alice.get(f"/threads/{thread_id}/runs")).json()[0]["run_id"]
    for method, path in (
        ("GET", ""),
        ("GET", "/state?subgraphs=true"),
        ("POST", "/history"),
        ("GET", "/runs"),
        ("GET", f"/runs/{run_id}/stream"),
        ("GET", f"/runs/{run_id}/join"),
    ):
        shown = await alice.request(method, f"/threads/{thread_id}{path}", json={"limit": 100})
        assert shown.status_code == 200, shown.text
        assert private_parts(shown.text) == set(), path

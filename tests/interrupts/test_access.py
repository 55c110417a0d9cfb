"""Who sees a question, and who may answer it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from tests.api.test_auth import PROJECT, client_of
from tests.interrupts.asking import desk_settings
from tests.support.serving import serving


@pytest.fixture
async def people(database_url: str) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    settings = desk_settings(database_url)
    async with serving(settings, GraphCatalog.load(load_config(PROJECT))):
        url = f"http://127.0.0.1:{settings.port}"
        async with client_of(url, "alice") as alice, client_of(url, "bob") as bob:
            yield alice, bob


async def test_other_peoples_questions_do_not_exist(people: tuple[httpx.AsyncClient, httpx.AsyncClient]) -> None:
    alice, bob = people
    thread_id = (await alice.post("/threads", json={})).json()["thread_id"]
    body = {"assistant_id": "ask", "input": {}}
    asked = (await alice.post(f"/threads/{thread_id}/runs/wait", json=body)).json()
    [interrupt] = asked["__interrupt__"]
    [question] = (await alice.get("/interrupts")).json()
    assert question["interrupt_id"] == interrupt["id"]
    assert (await bob.get("/interrupts")).json() == []
    assert (await bob.get("/interrupts", params={"thread_id": thread_id, "state": "all"})).json() == []
    path = f"/threads/{thread_id}/runs/{question['run_id']}/resume"
    assert (await bob.post(path, json={"answer": "x"})).status_code == 404
    answer = {"assistant_id": "ask", "command": {"resume": "x"}}
    assert (await bob.post(f"/threads/{thread_id}/runs", json=answer)).status_code == 404
    assert (await alice.post(path, json={"answer": "x"})).status_code == 200
    # Not even that it is answered.
    assert (await bob.post(f"/threads/{thread_id}/runs", json=answer)).status_code == 404
    assert (await alice.post(f"/threads/{thread_id}/runs", json=answer)).status_code == 409

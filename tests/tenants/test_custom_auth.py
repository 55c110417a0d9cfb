"""A project's own authentication may say whose a user is: then everything is as with keys. And what graph code sees."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings, load_settings
from tests.support.records import query
from tests.support.servers import free_port
from tests.support.serving import serving

PROJECT = Path(__file__).parents[1] / "support" / "tenants_project" / "langgraph.json"


@pytest.fixture
def settings(database_url: str) -> Settings:
    quick = {"POSTGRES_POLL_INTERVAL_SECONDS": "0.5", "KEY_REFRESH_SECONDS": "0.1", "TENANT_MAX_RUNNING": "1"}
    return load_settings(quick, database_url=database_url, port=free_port())


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(settings, GraphCatalog.load(load_config(PROJECT))) as client:
        yield client


def as_user(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def noted(client: httpx.AsyncClient, token: str, note: str) -> dict[str, Any]:
    body = {"assistant_id": "remember", "input": {"note": note}}
    answer = await client.post("/runs/wait", json=body, headers=as_user(token))
    assert answer.status_code == 200, answer.text
    values: dict[str, Any] = answer.json()
    return values


@pytest.mark.expects_errors("auth.bad_answer")
async def test_users_of_tenants(client: httpx.AsyncClient) -> None:
    acme, boss, zeta, root = (as_user(token) for token in ("acme/alice", "acme/boss", "zeta/zoe", "root"))
    thread = (await client.post("/threads", json={}, headers=acme)).json()["thread_id"]
    seen = [(await client.get(f"/threads/{thread}", headers=one)).status_code for one in (acme, boss, zeta, root)]
    assert seen == [200, 200, 404, 200]
    # The fleet is no tenant's. The project has no handler for it: it is for users with the permission `admin`.
    for method, path in (("GET", "/queue"), ("GET", "/workers"), ("GET", "/activity")):
        fleet = [(await client.request(method, path, headers=one)).status_code for one in (acme, boss, zeta, root)]
        assert fleet == [403, 200, 403, 403], path
    drain = f"/workers/{uuid4()}/drain"
    assert [(await client.post(drain, headers=one)).status_code for one in (boss, root)] == [404, 403]
    # What cannot be a tenant is nobody, and not everybody.
    for token in ("a.b/eve", "*/eve", "/eve", "a%00/eve", f"{'x' * 65}/eve"):
        assert (await client.get("/runs", headers=as_user(token))).status_code == 403


async def test_graph_code_sees_the_items_of_its_own_tenant(client: httpx.AsyncClient) -> None:
    assert await noted(client, "acme/alice", "one") == {"note": "one", "notes": ["notes one"], "tenant": "acme"}
    assert await noted(client, "zeta/zoe", "two") == {"note": "two", "notes": ["notes two"], "tenant": "zeta"}
    assert (await noted(client, "acme/boss", "three"))["notes"] == ["notes one", "notes three"]
    # A run that is nobody's sees everything: so does whoever may start one.
    everything = (await noted(client, "root", "four"))["notes"]
    assert everything == ["notes four", "~tenant.acme.notes one", "~tenant.acme.notes three", "~tenant.zeta.notes two"]
    item = await client.get("/store/items?namespace=notes&key=one", headers=as_user("acme/alice"))
    assert item.json()["value"] == {"text": "one"}
    assert (await client.get("/store/items?namespace=notes&key=one", headers=as_user("zeta/zoe"))).json() is None


async def test_checkpoints_that_nobody_owns_are_not_given_to_a_user(
    client: httpx.AsyncClient, database: Database
) -> None:
    """Nor to one without a tenant: it is not known whose they are."""
    thread_id = str(uuid4())
    await query(
        database,
        "INSERT INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, checkpoint, metadata) "
        "VALUES (%s, '', '1', '{}', '{}') RETURNING thread_id",
        thread_id,
    )
    for token in ("acme/alice", "root"):
        answer = await client.post("/threads", json={"thread_id": thread_id}, headers=as_user(token))
        assert answer.status_code == 409
        body = {"assistant_id": "remember", "input": {"note": "x"}, "if_not_exists": "create"}
        answer = await client.post(f"/threads/{thread_id}/runs", json=body, headers=as_user(token))
        assert answer.status_code == 404

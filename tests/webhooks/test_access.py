"""Which webhooks a request may ask for, and who sees what became of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.api.test_auth import PROJECT as AUTH_PROJECT
from tests.support.http_project import calling
from tests.support.receiver import Receiver
from tests.support.records import query
from tests.support.serving import serving
from tests.support.waiting import until
from tests.webhooks.test_delivery import HELLO, deliveries, settled, start

NOBODY = "00000000-0000-4000-8000-000000000000"
ECHO: dict[str, Any] = {"assistant_id": "echo", "input": HELLO}
BAD = ["", "/hook", "ftp://example.com", "http://localhost/hook", "http://127.0.0.1:9/hook", "http://[::1]/", "x\u0000"]


@pytest.fixture
async def careful(settings: Settings, catalog: GraphCatalog) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that calls public addresses only, which is the default."""
    async with serving(settings.model_copy(update={"webhook_allow_private": False}), catalog) as client:
        yield client


async def test_request_with_forbidden_webhook_url_is_refused(careful: httpx.AsyncClient, database: Database) -> None:
    thread_id = (await careful.post("/threads", json={})).json()["thread_id"]
    cron = (await careful.post("/runs/crons", json={**ECHO, "schedule": "0 0 1 1 *"})).json()["cron_id"]
    for webhook in BAD:
        for method, path, more in (
            ("POST", f"/threads/{thread_id}/runs", {}),
            ("POST", f"/threads/{thread_id}/runs/stream", {}),
            ("POST", f"/threads/{thread_id}/runs/wait", {}),
            ("POST", "/runs", {}),
            ("POST", "/runs/crons", {"schedule": "0 0 1 1 *"}),
            ("PATCH", f"/runs/crons/{cron}", {}),
        ):
            answer = await careful.request(method, path, json={**ECHO, "webhook": webhook, **more})
            assert answer.status_code == 422, (path, webhook, answer.text)
            assert answer.json()["detail"].startswith("webhook: ")
    answer = await careful.post("/runs/batch", json=[ECHO, {**ECHO, "webhook": "http://10.0.0.1"}])
    assert answer.status_code == 422
    assert await query(database, "SELECT 1 FROM run") == []
    assert len(await query(database, "SELECT 1 FROM cron")) == 1


async def test_project_can_disable_webhooks() -> None:
    async with calling({"disable_webhooks": True}) as client:
        assert (await client.get("/webhooks/deliveries")).status_code == 404
        answer = await client.post("/runs", json={**ECHO, "webhook": "https://example.com/hook"})
        assert answer.status_code == 422
        assert "disable_webhooks" in answer.json()["detail"]


async def test_webhook_of_a_cron_is_called(client: httpx.AsyncClient, receiver: Receiver, database: Database) -> None:
    body = {**ECHO, "schedule": "0 0 1 1 *", "webhook": receiver.url}
    cron = (await client.post("/runs/crons", json=body)).json()
    assert cron["payload"]["webhook"] == receiver.url
    await query(database, "UPDATE cron SET next_run_date = now() RETURNING 1")
    [got] = await receiver.get()
    assert got.json["metadata"]["cron_id"] == cron["cron_id"]
    assert got.json["status"] == "success"


async def test_deliveries_are_seen_with_their_threads(settings: Settings, receiver: Receiver) -> None:
    async with serving(settings, GraphCatalog.load(load_config(AUTH_PROJECT))) as anybody:
        assert (await anybody.get("/webhooks/deliveries")).status_code == 401
        alice, bob = (
            httpx.AsyncClient(base_url=anybody.base_url, headers={"authorization": f"Bearer {name}"}, timeout=30)
            for name in ("alice", "bob")
        )
        async with alice, bob:
            run = await start(alice, "whoami", receiver.url, input={})

            async def there() -> list[dict[str, Any]]:
                return await deliveries(alice, run_id=run["run_id"])

            [mine] = await until(there, "alice sees it")
            await settled(alice, run)
            assert await deliveries(bob) == []
            assert await deliveries(bob, run_id=run["run_id"]) == []
            path = f"/webhooks/deliveries/{mine['delivery_id']}/redeliver"
            missing = await bob.post(f"/webhooks/deliveries/{NOBODY}/redeliver")
            hidden = await bob.post(path)
            assert (missing.status_code, hidden.status_code) == (404, 404)
            assert (await alice.post(path)).status_code == 202
            assert len(await receiver.get(2)) == 2

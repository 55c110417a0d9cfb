"""What is one tenant's does not exist for another: every operation, with every id that is not one's own."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio

from tests.support.intruder import NOBODY, least_body, operations
from tests.tenants.conftest import House
from tests.tenants.test_keys import becomes

pytestmark = pytest.mark.asyncio(loop_scope="module")

DELIVERY = """
INSERT INTO webhook_delivery (run_id, thread_id, tenant_id, url, run, next_attempt_at)
VALUES (%s, %s, 'acme', 'http://acme.test/secret', '{}', now() + interval '1 hour') RETURNING delivery_id
"""
# All that is acme's, as far as a request can have an influence on it.
TREASURE = """
SELECT md5(string_agg(whole, '' ORDER BY whole)) AS sum, count(*) FROM (
    SELECT t::text AS whole FROM thread t WHERE tenant_id = 'acme'
    UNION ALL SELECT t::text FROM run t WHERE tenant_id = 'acme'
    UNION ALL SELECT t::text FROM assistant t WHERE tenant_id IN ('acme', '*')
    UNION ALL SELECT v::text FROM assistant_version v JOIN assistant USING (assistant_id) WHERE tenant_id = 'acme'
    UNION ALL SELECT t::text FROM cron t WHERE tenant_id = 'acme'
    UNION ALL SELECT t::text FROM webhook_delivery t WHERE tenant_id = 'acme'
    UNION ALL SELECT t::text FROM store t WHERE prefix LIKE '~tenant.acme.%%'
) AS everything
"""


@dataclass
class Estate:
    """What acme has, and somebody of zeta."""

    ids: dict[str, str]
    owner: httpx.AsyncClient
    other: httpx.AsyncClient
    document: dict[str, Any]
    house: House

    @property
    def secrets(self) -> list[str]:
        return [value for value in self.ids.values() if value != "child"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def estate(house: House) -> AsyncIterator[Estate]:
    owner, other = await house.tenant("acme"), await house.tenant("zeta", ("read", "write", "admin"))
    await becomes(owner, 200)
    await becomes(other, 200)
    about = {"metadata": {"graph_id": "echo", "secret": "acme"}}
    thread = (await owner.post("/threads", json=about)).json()
    assistant = (await owner.post("/assistants", json={"graph_id": "echo", "name": "acme's", **about})).json()
    run = {"assistant_id": assistant["assistant_id"], "after_seconds": 3600, "input": {"secret": "acme"}}
    created = (await owner.post(f"/threads/{thread['thread_id']}/runs", json=run)).json()
    stateless = (await owner.post("/runs", json=run)).json()
    cron = (await owner.post("/runs/crons", json={**run, "schedule": "0 0 1 1 *"})).json()
    item = {"namespace": ["notes"], "key": "k", "value": {"text": "acme's"}}
    assert (await owner.put("/store/items", json=item)).status_code == 204
    delivery = (await house.query(DELIVERY, created["run_id"], thread["thread_id"]))[0]["delivery_id"]
    ids = {
        "thread_id": thread["thread_id"],
        "run_id": created["run_id"],
        "cron_id": cron["cron_id"],
        "assistant_id": assistant["assistant_id"],
        "checkpoint_id": str(uuid4()),
        "namespace": "child",
        "delivery_id": str(delivery),
        "stateless": stateless["run_id"],
        "stateless_thread": stateless["thread_id"],
    }
    yield Estate(ids, owner, other, (await owner.get("/openapi.json")).json(), house)


async def said(client: httpx.AsyncClient, method: str, path: str, body: Any) -> tuple[int, str]:
    """Status and text of an answer; of one that does not end, its status."""
    async with client.stream(method, path, json=body) as answer:
        endless = "event-stream" in answer.headers.get("content-type", "") or path.endswith(("/wait", "/join"))
        if endless and answer.status_code == 200:
            return answer.status_code, ""
        return answer.status_code, (await answer.aread()).decode()


def without_ids(text: str) -> str:
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", re.sub(r'"\d{4}-[^"]*"', "TIME", text))


async def test_there_is_something_to_hide(estate: Estate) -> None:
    """The owner sees all of it, or the test below would prove nothing."""
    ids = estate.ids
    for path in (
        f"/threads/{ids['thread_id']}",
        f"/threads/{ids['thread_id']}/runs/{ids['run_id']}",
        f"/runs/{ids['stateless']}",
        f"/assistants/{ids['assistant_id']}",
        f"/runs/crons/{ids['cron_id']}",
    ):
        assert (await estate.owner.get(path)).status_code == 200, path
    assert ids["delivery_id"] in (await estate.owner.get("/webhooks/deliveries")).text
    item = (await estate.owner.get("/store/items", params={"namespace": "notes", "key": "k"})).json()
    assert (item["namespace"], item["value"]) == (["notes"], {"text": "acme's"})
    assert ids["run_id"] in (await estate.owner.get("/runs")).text
    assert (await estate.owner.post("/threads/count", json={})).json() >= 1


async def test_no_operation_tells_or_changes_anything_of_another_tenant(estate: Estate) -> None:
    """Every operation of the API, with all ids that are in its path: the answer is that to an id nobody has. A new
    operation is put to the same question."""
    before = await estate.house.query(TREASURE)
    asked = 0
    for method, template, declared in operations(estate.document):
        body = least_body(estate.document, declared)
        known = template.format_map({**estate.ids, "worker_id": NOBODY})
        unknown = template.format_map(dict.fromkeys([*estate.ids, "worker_id"], NOBODY) | {"namespace": "child"})
        answer = await said(estate.other, method, known, body)
        assert answer[0] < 500, f"{method} {template}: {answer}"
        for secret in estate.secrets:
            assert secret not in answer[1] or secret in known, f"{method} {template}: {answer}"
        assert "acme" not in answer[1], f"{method} {template}: {answer}"
        if known != unknown:
            nobody = await said(estate.other, method, unknown, body)
            assert (answer[0], without_ids(answer[1])) == (nobody[0], without_ids(nobody[1])), f"{method} {template}"
            asked += 1
    assert asked >= 40
    assert await estate.house.query(TREASURE) == before


def bodies(ids: dict[str, str]) -> list[tuple[str, str, Any]]:
    """Requests that name something in their body."""
    thread, run, assistant = ids["thread_id"], ids["run_id"], ids["assistant_id"]
    return [
        ("POST", "/runs", {"assistant_id": assistant}),
        ("POST", "/runs/wait", {"assistant_id": assistant}),
        ("POST", "/runs/stream", {"assistant_id": assistant}),
        ("POST", "/runs/batch", [{"assistant_id": "echo", "after_seconds": 9}, {"assistant_id": assistant}]),
        ("POST", "/runs/crons", {"assistant_id": assistant, "schedule": "0 0 1 1 *"}),
        ("POST", f"/threads/{thread}/runs/crons", {"assistant_id": "echo", "schedule": "0 0 1 1 *"}),
        ("POST", "/runs/cancel", {"thread_id": thread, "run_ids": [run]}),
        ("POST", "/threads/prune", {"thread_ids": [thread], "strategy": "delete"}),
        ("POST", "/threads/search", {"ids": [thread]}),
        ("POST", "/threads/search", {"metadata": {"secret": "acme"}}),
        ("POST", "/threads/count", {"metadata": {"secret": "acme"}}),
        ("POST", "/assistants/search", {"name": "acme"}),
        ("POST", "/assistants/count", {"name": "acme"}),
        ("POST", "/runs/crons/search", {"assistant_id": assistant}),
        ("POST", "/runs/crons/count", {"assistant_id": assistant}),
        ("GET", f"/webhooks/deliveries?run_id={run}", None),
        ("POST", f"/threads/{thread}/commands", {"id": 1, "method": "run.start", "params": {"assistant_id": "echo"}}),
        ("POST", f"/threads/{thread}/commands", {"id": 1, "method": "agent.getTree", "params": {"run_id": run}}),
        ("POST", f"/threads/{thread}/runs", {"assistant_id": "echo", "multitask_strategy": "rollback"}),
        ("POST", "/store/items/search", {"namespace_prefix": ["notes"]}),
        ("POST", "/store/items/search", {"namespace_prefix": ["~tenant", "acme"]}),
        ("POST", "/store/namespaces", {"suffix": ["notes"]}),
        ("GET", "/store/items?namespace=~tenant.acme.notes&key=k", None),
        ("DELETE", "/store/items", {"namespace": ["~tenant", "acme", "notes"], "key": "k"}),
    ]


async def test_no_body_reaches_anything_of_another_tenant(estate: Estate) -> None:
    before = await estate.house.query(TREASURE)
    nobodies = bodies(dict.fromkeys(estate.ids, NOBODY))
    for (method, path, body), (_, nobody_path, nobody_body) in zip(bodies(estate.ids), nobodies, strict=True):
        status, text = await said(estate.other, method, path, body)
        assert status < 500, f"{method} {path} {body}: {text}"
        assert "acme" not in text, f"{method} {path} {body}: {text}"
        if "run.start" not in str(body):  # On a thread that nobody has it makes one.
            nobody = await said(estate.other, method, nobody_path, nobody_body)
            assert (status, without_ids(text)) == (nobody[0], without_ids(nobody[1])), f"{method} {path} {body}"
    assert await estate.house.query(TREASURE) == before


async def test_an_id_that_another_tenant_has_is_taken(estate: Estate) -> None:
    """409 or 404, without a word of what is there."""
    before = await estate.house.query(TREASURE)
    thread, assistant = estate.ids["thread_id"], estate.ids["assistant_id"]
    for method, path, body in (
        ("POST", "/threads", {"thread_id": thread}),
        ("POST", "/threads", {"thread_id": thread, "if_exists": "do_nothing"}),
        ("POST", f"/threads/{thread}/runs", {"assistant_id": "echo", "if_not_exists": "create"}),
        ("POST", "/assistants", {"assistant_id": assistant, "graph_id": "echo"}),
        ("POST", "/assistants", {"assistant_id": assistant, "graph_id": "echo", "if_exists": "do_nothing"}),
    ):
        answer = await estate.other.request(method, path, json=body)
        assert answer.status_code in (404, 409), f"{path} {body}"
        assert "acme" not in answer.text
    assert await estate.house.query(TREASURE) == before


async def test_a_graphs_own_assistant_is_everybodys_and_nobodys_to_change(estate: Estate) -> None:
    for client in (estate.owner, estate.other):
        listed = (await client.post("/assistants/search", json={"graph_id": "echo"})).json()
        assert [one for one in listed if one["metadata"].get("created_by") == "system"]
        own = (await client.get("/assistants/echo")).json()
        assert "tenant_id" not in own
        for method, path, body in (
            ("PATCH", "/assistants/echo", {"name": "mine"}),
            ("DELETE", "/assistants/echo", None),
            ("POST", "/assistants/echo/latest", {"version": 1}),
        ):
            assert (await client.request(method, path, json=body)).status_code == 403
        assert (await client.get("/assistants/echo")).json() == own
        # The id of a graph that is not there yet, or it would be everybody's with this content.
        squatted = {"assistant_id": "5a0d4b4f-6d0e-5c1f-9d5e-0f6b5b8a3d11", "graph_id": "echo"}
        assert (await client.post("/assistants", json=squatted)).status_code == 422


async def test_each_tenant_has_a_store_of_its_own(estate: Estate) -> None:
    for client, text in ((estate.owner, "one"), (estate.other, "two")):
        item = {"namespace": ["same", "place"], "key": "same", "value": {"text": text}}
        assert (await client.put("/store/items", json=item)).status_code == 204
    for client, text in ((estate.owner, "one"), (estate.other, "two")):
        found = (await client.post("/store/items/search", json={"namespace_prefix": ["same"]})).json()["items"]
        assert [(one["namespace"], one["value"]["text"]) for one in found] == [(["same", "place"], text)]
        shown = await client.post("/store/namespaces", json={"prefix": ["same"], "max_depth": 1})
        assert shown.json() == {"namespaces": [["same"]]}
        every = (await client.post("/store/namespaces", json={})).json()["namespaces"]
        assert ["same", "place"] in every
        assert not [one for one in every if one[0].startswith("~")]
    gone = {"namespace": ["same", "place"], "key": "same"}
    assert (await estate.other.request("DELETE", "/store/items", json=gone)).status_code == 204
    kept = await estate.owner.get("/store/items", params={"namespace": "same.place", "key": "same"})
    assert kept.json()["value"] == {"text": "one"}


async def test_a_copy_is_the_owners(estate: Estate) -> None:
    copied = (await estate.owner.post(f"/threads/{estate.ids['thread_id']}/copy")).json()
    assert (await estate.owner.get(f"/threads/{copied['thread_id']}")).status_code == 200
    assert (await estate.other.get(f"/threads/{copied['thread_id']}")).status_code == 404

"""What tenants share, and what each has for itself. test_access_matrix.py has the requests for what is another's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio

from tests.tenants.conftest import House
from tests.tenants.test_keys import becomes

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
    """A thread and an assistant of acme, and somebody of zeta."""

    ids: dict[str, str]
    owner: httpx.AsyncClient
    other: httpx.AsyncClient
    house: House


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def estate(house: House) -> AsyncIterator[Estate]:
    owner, other = await house.tenant("acme"), await house.tenant("zeta")
    await becomes(owner, 200)
    await becomes(other, 200)
    about = {"metadata": {"graph_id": "echo", "secret": "acme"}}
    thread = (await owner.post("/threads", json=about)).json()
    assistant = (await owner.post("/assistants", json={"graph_id": "echo", "name": "acme's", **about})).json()
    ids = {"thread_id": thread["thread_id"], "assistant_id": assistant["assistant_id"]}
    yield Estate(ids, owner, other, house)


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

"""One of everything that a caller can have, on servers that tell callers apart in different ways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx

from holdfast.graphs.config import load_config
from tests.support.intruder import PROJECT
from tests.support.live_worker import running_worker
from tests.support.waiting import until
from tests.tenants.conftest import House, open_house

LATER = {"assistant_id": "echo", "after_seconds": 3600}
GIVE_UP = """
UPDATE run SET status = 'error', ready_at = NULL, finished_at = now(), dead_letter = 'poison',
               error = '{"error": "Killed", "message": "again"}' WHERE run_id = %s RETURNING run_id
"""
DELIVERY = """
INSERT INTO webhook_delivery (run_id, thread_id, tenant_id, url, run, next_attempt_at)
SELECT run_id, thread_id, tenant_id, 'http://hook.test/' || %s, '{}', now() + interval '1 hour'
FROM run WHERE run_id = %s RETURNING delivery_id
"""


@dataclass
class Estate:
    """What one caller has. `ids` by the names that the API has for them."""

    name: str
    client: httpx.AsyncClient
    ids: dict[str, str]


@asynccontextmanager
async def with_keys(server_url: str) -> AsyncIterator[tuple[House, httpx.AsyncClient, httpx.AsyncClient]]:
    """A server with the keys of two tenants."""
    async with open_house(server_url) as house:
        acme, zeta = await house.tenant("acme"), await house.tenant("zeta", ("read", "write", "admin"))
        for client in (acme, zeta):

            async def known(client: httpx.AsyncClient = client) -> bool:
                return (await client.get("/runs")).status_code == 200

            await until(known, "the key is known")
        yield house, acme, zeta


@asynccontextmanager
async def with_filters(server_url: str) -> AsyncIterator[tuple[House, httpx.AsyncClient, httpx.AsyncClient]]:
    """A server whose project lets two users in, and tells what is whose by a filter on metadata."""
    project = load_config(PROJECT)
    project = replace(project, raw={**project.raw, "auth": {"path": "./owners.py:auth"}})
    async with open_house(server_url, project=project) as house:
        acme, zeta = [await house.client(authorization=f"Bearer {name}") for name in ("acme", "zeta")]
        yield house, acme, zeta


SERVERS = {"keys": with_keys, "filters": with_filters}


async def settle(house: House, client: httpx.AsyncClient, name: str) -> Estate:
    """Have one of each. A worker is there until the question is asked; all other runs stay queued."""

    async def made(method: str, path: str, body: Any = None) -> Any:
        answer = await client.request(method, path, json=body)
        assert answer.status_code < 300, f"{path}: {answer.text}"
        return answer.json() if answer.content else None

    about = {"metadata": {"graph_id": "echo", "secret": name}}
    step = {"updates": [{"values": {"value": f"{name}'s"}, "as_node": "say"}]}
    thread = (await made("POST", "/threads", {**about, "supersteps": [step]}))["thread_id"]
    state = await made("GET", f"/threads/{thread}/state")
    assistant = (await made("POST", "/assistants", {"graph_id": "echo", "name": f"{name}'s", **about}))["assistant_id"]
    asking = await made("POST", "/threads", about)
    question = {"assistant_id": "ask", "input": {"value": f"{name}?"}}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_worker(house.settings, house.catalog))
        await made("POST", f"/threads/{asking['thread_id']}/runs/wait", question)
    [asked] = await made("GET", f"/interrupts?thread_id={asking['thread_id']}")
    run = {"assistant_id": assistant, "after_seconds": 3600, "input": {"value": name}}
    created = await made("POST", f"/threads/{thread}/runs", run)
    stateless = await made("POST", "/runs", run)
    letter = await made("POST", "/runs", run)
    await house.query(GIVE_UP, letter["run_id"])
    cron = await made("POST", "/runs/crons", {**run, "schedule": "0 0 1 1 *"})
    await made("PUT", "/store/items", {"namespace": ["notes"], "key": "k", "value": {"text": f"{name}'s"}})
    [delivery] = await house.query(DELIVERY, name, created["run_id"])
    ids = {
        "thread_id": thread,
        "run_id": created["run_id"],
        "assistant_id": assistant,
        "cron_id": cron["cron_id"],
        "delivery_id": str(delivery["delivery_id"]),
        "checkpoint_id": state["checkpoint"]["checkpoint_id"],
        "interrupt_id": asked["interrupt_id"],
        "asking_thread": asking["thread_id"],
        "asking_run": asked["run_id"],
        "letter": letter["run_id"],
        "letter_thread": letter["thread_id"],
        "stateless": stateless["run_id"],
        "stateless_thread": stateless["thread_id"],
    }
    return Estate(name, client, ids)

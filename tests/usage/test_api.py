"""Budgets are asked for, and what was used is read, over HTTP."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import httpx
import pytest

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.api.test_auth import PROJECT as AUTH_PROJECT
from tests.support.live_worker import quick_settings
from tests.support.priced_model import cost_of
from tests.support.receiver import receiving
from tests.support.servers import free_port
from tests.support.serving import answering
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
COST = cost_of(input_tokens=60, output_tokens=40)
NOTHING = {
    "calls": 0,
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "cached_tokens": 0,
    "reasoning_tokens": 0,
    "unpriced_tokens": 0,
    "cost_usd": 0.0,
}


def used(calls: int) -> dict[str, Any]:
    return {
        **NOTHING,
        "calls": calls,
        "input_tokens": 60 * calls,
        "output_tokens": 40 * calls,
        "total_tokens": 100 * calls,
        "cost_usd": pytest.approx(COST * calls, abs=1e-12),
    }


async def thread_of(server: httpx.AsyncClient) -> str:
    return str((await server.post("/threads", json={})).json()["thread_id"])


async def waited(server: httpx.AsyncClient, thread_id: str, calls: int, **body: Any) -> tuple[dict[str, Any], Any]:
    """The run that was made, once it has ended, and what was answered."""
    body = {"assistant_id": "spender", "input": {"calls": calls}, **body}
    answer = await server.post(f"/threads/{thread_id}/runs/wait", json=body)
    assert answer.status_code == 200, answer.text
    run = await server.get(answer.headers["content-location"])
    return run.json(), answer.json()


async def test_a_run_and_its_thread_say_what_was_used(server: httpx.AsyncClient) -> None:
    thread_id = await thread_of(server)
    fresh = (await server.get(f"/threads/{thread_id}")).json()
    assert fresh["usage"] is None
    assert (await server.get(f"/threads/{thread_id}/usage")).json() == {
        **NOTHING,
        "steps": 0,
        "thread_id": thread_id,
        "models": {},
    }
    first, _ = await waited(server, thread_id, 2)
    assert first["usage"] == used(2) | {"steps": 2}
    await waited(server, thread_id, 3)
    thread = (await server.get(f"/threads/{thread_id}")).json()
    assert thread["usage"] == used(3) | {"steps": 3}
    [searched] = (await server.post("/threads/search", json={"ids": [thread_id], "select": ["usage"]})).json()
    assert searched["usage"] == thread["usage"]
    assert (await server.get(f"/threads/{thread_id}/usage")).json() == {
        **thread["usage"],
        "thread_id": thread_id,
        "models": {"openai:gpt-4o": used(3)},
    }
    listed = (await server.get(f"/threads/{thread_id}/runs", params={"select": "usage"})).json()
    assert [run["usage"]["calls"] for run in listed] == [1, 2]
    alone = (await server.get(f"/threads/{thread_id}/runs/{first['run_id']}/usage")).json()
    assert alone == {
        **first["usage"],
        "thread_id": thread_id,
        "run_id": first["run_id"],
        "models": {"openai:gpt-4o": used(2)},
        "budget": {"max_steps": 50},
        "remaining": {"max_steps": 48},
    }
    copy = (await server.post(f"/threads/{thread_id}/copy")).json()
    assert copy["usage"] is None, "a copy has spent nothing"


async def test_a_budget_ends_a_run_and_not_the_thread(server: httpx.AsyncClient) -> None:
    thread_id = await thread_of(server)
    run, answer = await waited(server, thread_id, 10, max_tokens=250, max_cost_usd=5, max_seconds=60.5, max_steps=9)
    says = {
        "error": "BudgetExceeded",
        "message": "The run was stopped by its budget: max_tokens=250 reached, 300 tokens used.",
    }
    assert answer == {"__error__": says}
    assert (run["status"], run["error"]) == ("error", says)
    budget = {"max_tokens": 250, "max_cost_usd": 5, "max_seconds": 60.5, "max_steps": 9}
    assert run["kwargs"]["budget"] == budget
    left = (await server.get(f"/threads/{thread_id}/runs/{run['run_id']}/usage")).json()
    assert left["budget"] == budget
    assert 0 < left["remaining"].pop("max_seconds") < 60.5
    assert left["remaining"] == {
        "max_tokens": 0,
        "max_cost_usd": pytest.approx(5 - 3 * COST, abs=1e-9),
        "max_steps": 6,
    }
    thread = (await server.get(f"/threads/{thread_id}")).json()
    assert (thread["status"], len(thread["values"]["said"])) == ("error", 2)
    streamed = await server.post(
        f"/threads/{thread_id}/runs/stream", json={"assistant_id": "spender", "input": None, "max_cost_usd": COST * 1.5}
    )
    assert "BudgetExceeded" in streamed.text
    run, values = await waited(server, thread_id, 10, input=None)
    assert (run["status"], len(values["said"])) == ("success", 10)
    assert (await server.get(f"/threads/{thread_id}")).json()["status"] == "idle"


async def test_every_way_to_make_a_run_takes_one(server: httpx.AsyncClient) -> None:
    body = {"assistant_id": "spender", "input": {"calls": 5}, "max_tokens": 150}
    stateless = await server.post("/runs/wait", json=body)
    assert stateless.json()["__error__"]["error"] == "BudgetExceeded"
    [batched] = (await server.post("/runs/batch", json=[body])).json()
    assert batched["kwargs"]["budget"]["max_tokens"] == 150
    cron = (await server.post("/runs/crons", json={**body, "schedule": "0 0 1 1 *", "enabled": False})).json()
    assert cron["payload"]["max_tokens"] == 150
    changed = (await server.patch(f"/runs/crons/{cron['cron_id']}", json={"max_steps": 7})).json()
    assert (changed["payload"]["max_tokens"], changed["payload"]["max_steps"]) == (150, 7)

    thread_id = str(uuid4())
    params = {"assistant_id": "spender", "input": {"calls": 5}, "max_steps": 3}
    command = {"id": 1, "method": "run.start", "params": params}
    started = (await server.post(f"/threads/{thread_id}/commands", json=command)).json()
    joined = await server.get(f"/threads/{thread_id}/runs/{started['result']['run_id']}/join")
    assert "max_steps=3" in joined.json()["__error__"]["message"]
    for bad in ({"max_steps": 0}, {"max_steps": "3"}):
        refused = await server.post(f"/threads/{thread_id}/commands", json={**command, "params": {**params, **bad}})
        assert refused.json()["error"] == "invalid_argument"


async def test_budget_of_an_assistant_stops_its_runs(server: httpx.AsyncClient) -> None:
    body = {"graph_id": "spender", "metadata": {"budget": {"max_tokens": 150, "max_steps": 20}}}
    assistant = (await server.post("/assistants", json=body)).json()
    thread_id = await thread_of(server)
    run, _ = await waited(server, thread_id, 3, assistant_id=assistant["assistant_id"])
    assert run["error"]["error"] == "BudgetExceeded"
    assert run["kwargs"]["budget"] == {"max_tokens": 150, "max_steps": 20}
    run, _ = await waited(server, await thread_of(server), 3, assistant_id=assistant["assistant_id"], max_tokens=300)
    assert run["status"] == "success"
    # Clients that know no such fields have their metadata.
    run, _ = await waited(
        server,
        await thread_of(server),
        3,
        assistant_id=assistant["assistant_id"],
        metadata={"budget": {"max_steps": 1}},
    )
    assert run["kwargs"]["budget"] == {"max_tokens": 150, "max_steps": 1}
    assert "max_steps=1" in run["error"]["message"]
    for budget, status in (({"max_tokens": -1}, 422), ("generous", 200), ({"unknown": 1, "max_steps": None}, 200)):
        answer = await server.post(
            "/runs", json={"assistant_id": "spender", "input": {}, "metadata": {"budget": budget}}
        )
        assert answer.status_code == status, answer.text
        made = await server.post("/assistants", json={"graph_id": "spender", "metadata": {"budget": budget}})
        answer = await server.post("/runs", json={"assistant_id": made.json()["assistant_id"], "input": {}})
        assert answer.status_code == status, answer.text
        if status == 422:
            assert "max_tokens" in answer.json()["detail"]


@pytest.mark.parametrize("limit", ["max_cost_usd", "max_tokens", "max_seconds", "max_steps"])
async def test_limits_that_are_none(server: httpx.AsyncClient, limit: str) -> None:
    thread_id = await thread_of(server)
    for value in (0, -1, "5", True, [], 1e300, 10**40, *([1.5] if limit in ("max_tokens", "max_steps") else [])):
        body = {"assistant_id": "spender", "input": {}, limit: value}
        answer = await server.post(f"/threads/{thread_id}/runs", json=body)
        assert answer.status_code == 422, (value, answer.text)
        assert answer.json()["detail"].startswith(limit)
    assert (await server.get(f"/threads/{thread_id}/runs")).json() == []
    accepted = await server.post(
        f"/threads/{thread_id}/runs", json={"assistant_id": "spender", "input": {}, limit: None}
    )
    assert accepted.json()["kwargs"]["budget"] == {"max_steps": 50}


async def test_usage_of_unknown_thread_or_run_is_not_found(server: httpx.AsyncClient) -> None:
    thread_id, nobody = await thread_of(server), str(uuid4())
    run, _ = await waited(server, thread_id, 1)
    assert (await server.get(f"/threads/{nobody}/usage")).status_code == 404
    assert (await server.get(f"/threads/{thread_id}/runs/{nobody}/usage")).status_code == 404
    assert (await server.get(f"/threads/{nobody}/runs/{run['run_id']}/usage")).status_code == 404
    assert (await server.get("/threads/x/usage")).status_code == 422


async def test_webhook_contains_the_usage(server: httpx.AsyncClient) -> None:
    async with receiving() as receiver:
        await waited(server, await thread_of(server), 2, webhook=receiver.url)
        [got] = await receiver.get()
    assert got.json["usage"] == used(2) | {"steps": 2}


async def test_defaults_reach_crons(server: httpx.AsyncClient) -> None:
    """Those that the settings gave when the cron was made."""
    thread_id = await thread_of(server)
    body = {"assistant_id": "spender", "input": {"calls": 60}, "schedule": "* * * * * *", "max_tokens": 10_000}
    cron = (await server.post(f"/threads/{thread_id}/runs/crons", json=body)).json()

    async def fired() -> Any:
        return (await server.get(f"/threads/{thread_id}/runs")).json()

    run = (await until(fired, "the cron fires"))[-1]
    await server.delete(f"/runs/crons/{cron['cron_id']}")
    assert run["kwargs"]["budget"] == {"max_steps": 50, "max_tokens": 10_000}


async def test_usage_of_other_callers_is_hidden(server_url: str, database_url: str) -> None:
    settings: Settings = quick_settings(database_url, port=free_port())
    async with answering(settings, GraphCatalog.load(load_config(AUTH_PROJECT))) as anybody:

        async def ask(token: str, method: str, path: str, **body: Any) -> httpx.Response:
            return await anybody.request(method, path, headers={"authorization": f"Bearer {token}"}, json=body)

        thread_id = (await ask("alice", "POST", "/threads")).json()["thread_id"]
        body = {"assistant_id": "whoami", "input": {}}
        run_id = (await ask("alice", "POST", f"/threads/{thread_id}/runs", **body)).json()["run_id"]
        for path in (f"/threads/{thread_id}/usage", f"/threads/{thread_id}/runs/{run_id}/usage"):
            assert (await anybody.get(path)).status_code == 401
            assert (await ask("bob", "GET", path)).status_code == 404
            assert (await ask("alice", "GET", path)).status_code == 200

"""Requests that can destroy something refuse what they do not know, instead of ignoring it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from holdfast.api.app import ROUTES
from holdfast.api.routes import SOCKET
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import load_config
from holdfast.settings import Settings
from tests.api.test_runs import thread
from tests.support.serving import answering
from tests.support.smoke import EXAMPLES

# Routes that change something and destroy nothing: an unknown field cannot make them do more than the caller wanted.
HARMLESS = {
    ("PATCH", "/assistants/{assistant_id}"),
    ("PATCH", "/runs/crons/{cron_id}"),
    ("PATCH", "/threads/{thread_id}"),
    ("PATCH", "/threads/{thread_id}/state"),
    ("POST", "/assistants"),
    ("POST", "/assistants/count"),
    ("POST", "/assistants/search"),
    ("POST", "/assistants/{assistant_id}/latest"),
    ("POST", "/assistants/{assistant_id}/versions"),
    ("POST", "/runs"),
    ("POST", "/runs/batch"),
    ("POST", "/runs/crons"),
    ("POST", "/runs/crons/count"),
    ("POST", "/runs/crons/search"),
    ("POST", "/runs/stream"),
    ("POST", "/runs/wait"),
    ("POST", "/store/items/search"),
    ("POST", "/store/namespaces"),
    ("POST", "/threads"),
    ("POST", "/threads/count"),
    ("POST", "/threads/search"),
    ("POST", "/threads/{thread_id}/commands"),
    ("POST", "/threads/{thread_id}/copy"),
    ("POST", "/threads/{thread_id}/history"),
    ("POST", "/threads/{thread_id}/runs"),
    ("POST", "/threads/{thread_id}/runs/crons"),
    ("POST", "/threads/{thread_id}/runs/stream"),
    ("POST", "/threads/{thread_id}/runs/wait"),
    ("POST", "/threads/{thread_id}/runs/{run_id}/resume"),
    ("POST", "/threads/{thread_id}/state"),
    ("POST", "/threads/{thread_id}/state/checkpoint"),
    ("POST", "/threads/{thread_id}/stream/events"),
    ("POST", "/webhooks/deliveries/{delivery_id}/redeliver"),
    ("PUT", "/store/items"),
}
# How clients send no body.
NOTHING: list[dict[str, Any]] = [{}, {"json": None}, {"json": {}}]
DECLARED = [route for _, routes in ROUTES for route in routes.declared]
CHANGING = {(method, route.path): route for route in DECLARED for method in route.methods - {"GET", SOCKET}}
DESTRUCTIVE = {place: route for place, route in CHANGING.items() if route.destroys}


def test_every_changing_route_is_known_to_be_destructive_or_not() -> None:
    assert set(CHANGING) - set(DESTRUCTIVE) == HARMLESS, "add it to holdfast.api.destructive.DESTRUCTIVE, or here"
    assert len(DESTRUCTIVE) == 14


async def send(client: httpx.AsyncClient, place: tuple[str, str], query: str = "", **body: Any) -> httpx.Response:
    method, path = place
    return await client.request(method, re.sub(r"\{\w+\}", str(uuid4()), path) + query, **body)


async def test_destructive_routes_refuse_unknown_query_parameters(web: httpx.AsyncClient) -> None:
    for place in DESTRUCTIVE:
        answer = await send(web, place, "?older_then=60")
        assert answer.status_code == 422, place
        assert "'older_then' is not a query parameter of this request" in answer.json()["detail"], place
    misspelt = await send(web, ("POST", "/threads/{thread_id}/runs/{run_id}/cancel"), "?acton=interrupt")
    assert "'acton' (did you mean 'action'?)" in misspelt.json()["detail"]


async def test_destructive_routes_refuse_unknown_fields(web: httpx.AsyncClient) -> None:
    for place, route in DESTRUCTIVE.items():
        answer = await send(web, place, json={"elder_than": 60})
        assert answer.status_code == 422, place
        expected = "'elder_than' " if route.arguments.body is not None else "takes no body"
        assert expected in answer.json()["detail"], place
        for nothing in NOTHING:
            assert "no body" not in (await send(web, place, **nothing)).text, place


@pytest.mark.parametrize("length", [101, 50_000])
async def test_refusal_shortens_a_long_unknown_name(web: httpx.AsyncClient, length: int) -> None:
    name = "older_than" + "x" * (length - 10)
    for place, route in DESTRUCTIVE.items():
        answers = [await send(web, place, f"?{name}=60")]
        if route.arguments.body is not None:
            answers.append(await send(web, place, json={name: 60}))
        for answer in answers:
            assert answer.status_code == 422, place
            assert f"'{name[:100]}' is not a " in answer.json()["detail"], place
            assert len(answer.content) < 300, place


async def test_mistyped_filter_discards_no_letter(web: httpx.AsyncClient) -> None:
    for path in ("/dead-letters/discard", "/dead-letters/retry"):
        answer = await web.post(path, json={"all": True, "older_then": 3600})
        assert answer.status_code == 422
        detail = "'older_then' (did you mean 'older_than'?) is not a field of this request. Nothing was changed."
        assert answer.json() == {"detail": detail}


async def test_mistyped_filter_cancels_no_run(web: httpx.AsyncClient) -> None:
    thread_id = await thread(web)
    run = (await web.post(f"/threads/{thread_id}/runs", json={"assistant_id": "echo", "input": {}})).json()
    wrong: list[dict[str, Any]] = [
        {"status": "all", "thread": thread_id},
        {"status": "all", "run_ids": []},
        {"status": "all", "assistant_id": "steps"},
    ]
    for body in wrong:
        assert (await web.post("/runs/cancel", json=body)).status_code == 422, body
    assert (await web.post("/runs/cancel?thread_id=x", json={"status": "all"})).status_code == 422
    assert (await web.get(f"/runs/{run['run_id']}")).json()["status"] == "pending"


async def test_misplaced_strategy_deletes_no_thread(web: httpx.AsyncClient) -> None:
    thread_id = await thread(web)
    assert (await web.request("DELETE", f"/threads/{thread_id}", json={"strategy": "keep_latest"})).status_code == 422
    pruned = await web.post("/threads/prune", json={"thread_ids": [thread_id], "stratgy": "keep_latest"})
    assert pruned.status_code == 422
    assert "did you mean 'strategy'?" in pruned.json()["detail"]
    assert (await web.get(f"/threads/{thread_id}")).status_code == 200


async def test_mistyped_strategy_of_a_time_to_live_deletes_no_thread(web: httpx.AsyncClient) -> None:
    thread_id = await thread(web)
    wrong = {"ttl": {"ttl": 5, "stratgy": "keep_latest"}}
    for answer in (await web.patch(f"/threads/{thread_id}", json=wrong), await web.post("/threads", json=wrong)):
        assert answer.status_code == 422
        assert "'stratgy' (did you mean 'strategy'?)" in answer.json()["detail"]
    assert (await web.get(f"/threads/{thread_id}?include=ttl")).json()["ttl"] is None


AUTH = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def authenticate({parameter}):
    return "somebody"
"""


@pytest.mark.parametrize(("parameter", "status"), [("query_params", 204), ("request", 204), ("headers", 422)])
async def test_query_may_hold_what_the_projects_authentication_reads(
    settings: Settings, tmp_path: Path, parameter: str, status: int
) -> None:
    (tmp_path / "auth.py").write_text(AUTH.format(parameter=parameter))
    config = {
        "dependencies": ["."],
        "graphs": {"echo": f"{EXAMPLES.parent / 'graphs.py'}:echo"},
        "auth": {"path": "./auth.py:auth"},
    }
    (tmp_path / "langgraph.json").write_text(json.dumps(config))
    async with answering(settings, GraphCatalog.load(load_config(tmp_path / "langgraph.json"))) as client:
        thread_id = await thread(client)
        answer = await client.delete(f"/threads/{thread_id}", params={"token": "x"})
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("path", ["/threads/search", "/runs/crons/count", "/assistants/search"])
async def test_searches_ignore_unknown_fields(web: httpx.AsyncClient, path: str) -> None:
    assert (await web.post(path, json={"of_a_newer_client": 1})).status_code == 200

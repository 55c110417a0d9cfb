"""/openapi.json says what the server does: schemathesis asks whether it is true, this whether it is whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
import schemathesis
from pydantic import BaseModel

from holdfast.api import response_models as shapes
from holdfast.api.app import describe
from holdfast.graphs.config import load_config
from holdfast.settings import load_settings
from tests.support.intruder import operations
from tests.support.smoke import EXAMPLES

# What is no command is answered in the protocol's own shape.
COMMAND_REFUSED = "#/components/schemas/CommandRefused"
BODILESS = ("/copy", "/runs/{run_id}/cancel", "/drain", "/redeliver", "/dead-letters/{run_id}/discard")
# What `include` and `select` add, and what only some interrupts and checkpoints have.
SOMETIMES = {"ttl", "extracted", "now", "waiting_for", "parent_run_id"}


def described(auth: object = None) -> dict[str, Any]:
    """The document of a server that is only built, not started."""
    project = SimpleNamespace(project=load_config(EXAMPLES))
    settings = load_settings({}, database_url="postgresql://nowhere")
    web: Any = SimpleNamespace(settings=settings, catalog=project, auth=auth)
    return describe(web).document()


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return described()


async def test_openapi_document_is_valid(web: httpx.AsyncClient) -> None:
    document = (await web.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1.")
    schemathesis.openapi.from_dict(document).validate()
    page = await web.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "/openapi.json" in page.text


def test_every_filter_by_assistant_takes_the_name_of_a_graph(document: dict[str, Any]) -> None:
    taken = {}
    for method, path, declared in operations(document):
        for parameter in declared.get("parameters", ()):
            if parameter["name"] == "assistant_id":
                taken[f"{method} {path}"] = parameter["schema"]
        body = declared.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        for name in re.findall(r"#/components/schemas/(\w+)", json.dumps(body)):
            if "assistant_id" in (known := document["components"]["schemas"][name].get("properties", {})):
                taken[f"{method} {path} {name}"] = known["assistant_id"]
    assert len(taken) > 20
    only_uuid = {where for where, schema in taken.items() if "uuid" in json.dumps(schema)}
    assert only_uuid == {"POST /assistants AssistantCreate"}, "there it is the id of a new assistant"


def test_every_operation_says_what_it_takes_and_answers(document: dict[str, Any]) -> None:
    found = operations(document)
    assert len(found) >= 62
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Detail"}}}
    summaries = []
    for method, path, declared in found:
        where = f"{method} {path}"
        summaries.append(declared["summary"])
        assert declared["tags"], where
        named = {one["name"] for one in declared.get("parameters", ()) if one["in"] == "path"}
        assert named == {part.strip("{}") for part in path.split("/") if part.startswith("{")}, where
        if method in ("POST", "PUT", "PATCH") and not path.endswith(BODILESS):
            schema = declared["requestBody"]["content"]["application/json"]["schema"]
            assert set(schema) - {"title"}, where
        successes = {status: one for status, one in declared["responses"].items() if status < "300"}
        assert successes, where
        for status, answer in successes.items():
            if status not in ("202", "204"):
                assert answer["content"], f"{where} {status}"
        for status, answer in declared["responses"].items():
            if status == "400" and path.endswith("/commands"):
                assert answer["content"] == {"application/json": {"schema": {"$ref": COMMAND_REFUSED}}}
            elif status >= "400" and declared["tags"] != ["meta"]:
                assert answer["content"] == refusal, f"{where} {status}"
        if declared["tags"] != ["meta"]:
            assert {"422", "503"} <= set(declared["responses"]), where
            assert ("413" in declared["responses"]) == (method != "GET"), where
    assert len(set(summaries)) == len(summaries)


def test_streams_are_declared_as_streams(document: dict[str, Any]) -> None:
    streams = {
        f"{method} {path}"
        for method, path, declared in operations(document)
        if "text/event-stream" in declared["responses"].get("200", {}).get("content", {})
    }
    assert streams == {
        "POST /runs/stream",
        "GET /runs/{run_id}/stream",
        "POST /threads/{thread_id}/runs/stream",
        "GET /threads/{thread_id}/runs/{run_id}/stream",
        "GET /threads/{thread_id}/stream",
        "POST /threads/{thread_id}/stream/events",
    }


@pytest.mark.parametrize("auth", [None, SimpleNamespace(openapi={})], ids=["nobody asks", "somebody asks"])
def test_denials_are_declared_where_there_are_any(auth: object) -> None:
    for method, path, declared in operations(described(auth)):
        denied = {"401", "403"} & set(declared["responses"])
        asks = auth is not None and (declared["tags"] != ["meta"] or path == "/metrics")
        assert denied == ({"401", "403"} if asks else set()), f"{method} {path}"


def test_nulls_are_in_the_schema_where_they_are_accepted(document: dict[str, Any]) -> None:
    create = document["components"]["schemas"]["RunCreate"]
    assert {"type": "null"} in create["properties"]["stream_mode"]["anyOf"]
    assert {"type": "null"} not in create["properties"]["assistant_id"].get("anyOf", [])


async def test_objects_have_the_fields_that_are_declared(client: httpx.AsyncClient) -> None:
    """The schema leaves room for more, so that clients do; whatever is there is to be declared all the same."""

    async def call(method: str, path: str, **request: Any) -> Any:
        answer = await client.request(method, path, **request)
        assert answer.status_code == 200, answer.text
        return answer.json()

    thread = await call("POST", "/threads", json={"ttl": 5})
    there = f"/threads/{thread['thread_id']}"
    await call("POST", f"{there}/runs/wait", json={"assistant_id": "ask", "input": {"question": "?"}})
    [run] = await call("GET", f"{there}/runs")
    assistant = await call("POST", "/assistants", json={"graph_id": "echo"})
    cron = await call("POST", "/runs/crons", json={"assistant_id": "echo", "schedule": "0 0 1 1 *"})
    item: dict[str, Any] = {"namespace": [str(uuid4())], "key": "k", "value": {}}
    assert (await client.put("/store/items", json=item)).status_code == 204
    named = {"namespace": item["namespace"][0], "key": "k"}
    state = await call("GET", f"{there}/state")
    identity = f"/assistants/{assistant['assistant_id']}"
    command = {"id": 1, "method": "agent.getTree", "params": {}}
    shown: Iterable[tuple[type[BaseModel], Any]] = (
        (shapes.Information, await call("GET", "/info")),
        (shapes.Health, await call("GET", "/ok?check_db=1")),
        (shapes.Thread, thread),
        (shapes.ThreadWithTtl, full := await call("GET", f"{there}?include=ttl")),
        (shapes.ThreadTtl, full["ttl"]),
        (shapes.SelectedThread, (await call("POST", "/threads/search", json={"extract": {"a": "values"}}))[0]),
        (shapes.Run, run),
        (shapes.State, state),
        (shapes.Task, state["tasks"][0]),
        (shapes.Interrupt, state["interrupts"][0]),
        (shapes.CheckpointPlace, state["checkpoint"]),
        (shapes.Updated, await call("POST", f"{there}/state", json={"values": {"question": "!"}})),
        (shapes.Storage, await call("GET", f"{there}/storage")),
        (shapes.Assistant, assistant),
        (shapes.AssistantVersion, (await call("POST", f"{identity}/versions"))[0]),
        (shapes.AssistantSchemas, await call("GET", f"{identity}/schemas")),
        (shapes.Drawing, await call("GET", f"{identity}/graph")),
        (shapes.Cron, cron),
        (shapes.StoredItem, await call("GET", "/store/items", params=named)),
        (shapes.FoundItem, (await call("POST", "/store/items/search"))["items"][0]),
        (shapes.FoundNamespaces, await call("POST", "/store/namespaces")),
        (shapes.CommandSucceeded, await call("POST", f"{there}/commands", json=command)),
        (shapes.CommandRefused, await call("POST", f"{there}/commands", json={**command, "method": "x"})),
        (shapes.Pruned, await call("POST", "/threads/prune", json={"thread_ids": []})),
    )
    for shape, answer in shown:
        assert set(shape.model_fields) - set(answer) <= SOMETIMES, shape
        assert set(answer) <= set(shape.model_fields), shape

"""Values that are JSON, of the right type, and still not harmless. What cannot be stored is refused and leaves nothing
behind; everything else comes back as it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from holdfast.api.destructive import destroys
from tests.support.intruder import NOBODY, Intruder, least_body, operations
from tests.support.json_body import JSON

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = {"assistant_id": "echo", "after_seconds": 3600}
CRON = {**RUN, "schedule": "0 0 1 1 *"}
NUL = "a\0b"
HOSTILE_KEYS = (
    "",
    " ",
    "__proto__",
    "constructor",
    "'",
    '"',
    "\\",
    "\\u0000",
    "%",
    "%s",
    "%(thread_id)s",
    "_",
    "{}",
    "{0.__class__}",
    "$.a[*] ? (@ > 1)",
    "$where",
    "a.b",
    "a->>b",
    "?",
    "'; DROP TABLE holdfast.thread; --",
    "\n\r\t",
    "\u202e\u200b",
    "\ufffd",
    "🦊",
    "x" * 10_000,
)
HOSTILE = {key: number for number, key in enumerate(HOSTILE_KEYS)}

# What Postgres has no room for, wherever it can be said.
WITH_NUL: list[tuple[str, str, Any]] = [
    *(
        ("POST", path, {**body, "metadata": metadata})
        for path, body in (
            ("/threads", {}),
            ("/threads/search", {}),
            ("/threads/count", {}),
            ("/threads/{calm}/history", {}),
            ("/assistants", {"graph_id": "echo"}),
            ("/assistants/search", {}),
            ("/assistants/count", {}),
            ("/assistants/echo/versions", {}),
            ("/runs", RUN),
            ("/runs/stream", RUN),
            ("/runs/wait", RUN),
            ("/threads/{thread_id}/runs", RUN),
            (f"/threads/{NOBODY}/runs", {**RUN, "if_not_exists": "create"}),
            ("/runs/crons", CRON),
            ("/threads/{thread_id}/runs/crons", CRON),
            ("/runs/crons/search", {}),
            ("/runs/crons/count", {}),
        )
        for metadata in ({NUL: 1}, {"a": NUL}, {"a": [{"b": {NUL: None}}]})
    ),
    ("PATCH", "/threads/{thread_id}", {"metadata": {"a": NUL}}),
    ("PATCH", "/assistants/echo", {"metadata": {NUL: 1}}),
    ("PATCH", "/assistants/echo", {"name": NUL}),
    ("PATCH", "/runs/crons/{cron_id}", {"metadata": {"a": NUL}}),
    ("PATCH", "/runs/crons/{cron_id}", {"config": {"metadata": {"a": NUL}}}),
    ("PATCH", "/runs/crons/{cron_id}", {"schedule": NUL}),
    ("POST", "/threads/search", {"values": {"a": NUL}}),
    ("POST", "/threads/search", {"extract": {"a": f"values.{NUL}"}}),
    ("POST", "/threads/search", {"extract": {NUL: "values"}}),
    ("POST", "/threads/count", {"values": {NUL: 1}}),
    ("POST", "/threads", {"metadata": {"graph_id": NUL}, "supersteps": [{"updates": [{"values": {}}]}]}),
    ("POST", "/threads/{calm}/state", {"values": {"value": 1}, "as_node": NUL}),
    ("POST", "/threads/{calm}/state", {"values": {"value": 1}, "checkpoint": {"checkpoint_ns": NUL}}),
    ("POST", "/threads/{calm}/state/checkpoint", {"checkpoint": {"checkpoint_ns": NUL}}),
    ("POST", "/threads/{calm}/state/checkpoint", {"checkpoint": {}, "select": [NUL]}),
    ("POST", "/threads/{calm}/history", {"checkpoint": {"checkpoint_ns": NUL}}),
    ("POST", "/assistants", {"graph_id": NUL}),
    ("POST", "/assistants", {"graph_id": "echo", "name": NUL}),
    ("POST", "/assistants", {"graph_id": "echo", "description": NUL}),
    ("POST", "/assistants", {"graph_id": "echo", "context": {"a": NUL}}),
    ("POST", "/assistants", {"graph_id": "echo", "context": {NUL: 1}}),
    ("POST", "/assistants", {"graph_id": "echo", "config": {"configurable": {"a": {NUL: 1}}}}),
    ("POST", "/assistants", {"graph_id": "echo", "config": {"tags": [NUL]}}),
    ("POST", "/assistants", {"graph_id": "echo", "config": {"metadata": {NUL: 1}}}),
    ("POST", "/assistants/search", {"name": NUL}),
    ("POST", "/assistants/search", {"graph_id": NUL}),
    ("POST", "/runs", {"assistant_id": NUL}),
    ("POST", "/runs", {**RUN, "config": {"metadata": {"a": NUL}}}),
    ("POST", "/runs", {**RUN, "config": {"configurable": {NUL: 1}}}),
    ("POST", "/runs", {**RUN, "context": {NUL: 1}}),
    ("POST", "/runs/batch", [RUN, {**RUN, "metadata": {"a": NUL}}]),
    ("POST", "/runs/crons", {**CRON, "schedule": "* * * * \0"}),
    ("POST", "/runs/crons", {**CRON, "timezone": NUL}),
    ("POST", "/runs/crons", {**CRON, "config": {"metadata": {"a": NUL}}}),
    ("POST", "/runs/crons/search", {"assistant_id": NUL}),
    ("PUT", "/store/items", {"namespace": [NUL], "key": "k", "value": {}}),
    ("PUT", "/store/items", {"namespace": ["a"], "key": NUL, "value": {}}),
    ("PUT", "/store/items", {"namespace": ["a"], "key": "k", "value": {"a": NUL}}),
    ("PUT", "/store/items", {"namespace": ["a"], "key": "k", "value": {NUL: 1}}),
    ("PUT", "/store/items", {"namespace": ["a"], "key": "k", "value": {}, "index": [NUL]}),
    ("DELETE", "/store/items", {"namespace": [NUL], "key": "k"}),
    ("DELETE", "/store/items", {"namespace": ["a"], "key": NUL}),
    ("POST", "/store/items/search", {"namespace_prefix": [NUL]}),
    ("POST", "/store/items/search", {"filter": {"a": NUL}}),
    ("POST", "/store/items/search", {"filter": {NUL: 1}}),
    ("POST", "/store/items/search", {"filter": {"a": {"$gt": NUL}}}),
    ("POST", "/store/namespaces", {"prefix": [NUL]}),
    ("POST", "/store/namespaces", {"suffix": [NUL]}),
    ("GET", "/store/items?namespace=%00&key=k", None),
    ("GET", "/store/items?namespace=a&key=%00", None),
    ("GET", "/threads/{calm}/state?select=%00", None),
    ("GET", "/threads/{calm}/stream?stream_mode=%00", None),
]

# Of the right type, and refused for what it says.
REFUSED: list[tuple[str, str, Any, int]] = [
    ("POST", "/threads", {"thread_id": "{thread_id}"}, 422),
    ("POST", "/threads", {"if_exists": "maybe"}, 422),
    ("POST", "/threads", {"ttl": 0}, 422),
    ("POST", "/threads", {"ttl": {"ttl": 1, "strategy": "forget"}}, 422),
    ("POST", "/threads", {"supersteps": [{"updates": []}]}, 422),
    ("POST", "/threads", {"supersteps": [{"updates": [{"values": {}}]}]}, 400),
    ("POST", "/threads", {"metadata": {"graph_id": "x"}, "supersteps": [{"updates": [{"values": {}}]}]}, 404),
    ("POST", "/threads/search", {"limit": 1001}, 422),
    ("POST", "/threads/search", {"limit": 0}, 422),
    ("POST", "/threads/search", {"offset": 2**60}, 422),
    ("POST", "/threads/search", {"sort_by": "metadata; DROP TABLE thread"}, 422),
    ("POST", "/threads/search", {"select": ["thread_id", "*"]}, 422),
    ("POST", "/threads/search", {"extract": {"a b": "values.x"}}, 422),
    ("POST", "/threads/search", {"extract": {"a": "values'.x"}}, 422),
    ("POST", "/threads/search", {"extract": {"a": "values.x[99999999999]"}}, 422),
    ("POST", "/threads/search", {"extract": {f"a{n}": "values" for n in range(11)}}, 422),
    ("POST", "/threads/{calm}/state", {"values": {"value": 1}, "as_node": "nobody"}, 400),
    ("POST", "/threads/{thread_id}/state", {"values": {"value": 1}}, 409),
    ("POST", "/threads/{calm}/state", {"values": {}, "checkpoint_id": NOBODY}, 404),
    ("POST", "/threads/{calm}/state", {"values": {}, "checkpoint": {"checkpoint_ns": "x|y|'"}}, 404),
    ("POST", "/assistants", {"graph_id": "x" * 100_000}, 404),
    ("POST", "/assistants", {"graph_id": "echo", "context": {"a": 1}, "config": {"configurable": {"b": 1}}}, 400),
    ("POST", "/assistants/search", {"select": ["*"]}, 422),
    ("POST", "/assistants/echo/latest", {"version": 99}, 404),
    ("POST", "/assistants/echo/latest", {"version": 2**31}, 422),
    ("GET", "/assistants/echo/graph?xray=-1", None, 422),
    ("GET", "/assistants/echo/graph?xray=99999999999999999999", None, 422),
    ("DELETE", "/assistants/echo", None, 409),
    ("POST", "/runs", {"assistant_id": ""}, 422),
    ("POST", "/runs", {"assistant_id": "x" * 100_000}, 422),
    ("POST", "/runs", {"assistant_id": "echo'; --"}, 422),
    ("POST", "/runs", {"assistant_id": NOBODY}, 404),
    ("POST", "/runs", {**RUN, "after_seconds": 1e300}, 422),
    ("POST", "/runs", {**RUN, "stream_mode": ["values", "loud"]}, 422),
    ("POST", "/runs", {**RUN, "stream_mode": ["tools"]}, 422),
    ("POST", "/runs", {**RUN, "config": {"recursion_limit": 2**31}}, 422),
    ("POST", "/runs", {**RUN, "command": {"resume": 1}}, 400),
    ("POST", "/runs", {**RUN, "command": {"goto": {"node": 5}}}, 422),
    ("POST", "/runs", {**RUN, "command": {"goto": [{"input": 1}, "say"]}}, 422),
    ("POST", "/runs", {**RUN, "command": {"update": [["a"]]}}, 422),
    ("POST", "/runs", {**RUN, "context": {"a": 1}, "config": {"configurable": {"b": 1}}}, 400),
    ("POST", "/runs/batch", [RUN] * 1001, 422),
    ("POST", "/runs/batch", [RUN, {"assistant_id": NOBODY}], 404),
    ("POST", "/runs/batch", [RUN, {**RUN, "command": {"resume": 1}}], 400),
    ("POST", "/threads/{thread_id}/runs", {**RUN, "multitask_strategy": "reject"}, 409),
    ("POST", "/runs/cancel", {"status": "all", "thread_id": NOBODY, "run_ids": [NOBODY]}, 422),
    ("POST", "/runs/cancel", {"thread_id": NOBODY}, 422),
    ("POST", "/runs/cancel", {"run_ids": [NOBODY]}, 422),
    ("POST", "/runs/cancel", {}, 422),
    ("POST", "/runs/cancel", {"thread_id": NOBODY, "run_ids": [NOBODY, NOBODY]}, 404),
    ("DELETE", "/threads/{thread_id}/runs/{run_id}", None, 409),
    ("POST", "/runs/crons", {**CRON, "schedule": ""}, 422),
    ("POST", "/runs/crons", {**CRON, "schedule": "* * * * * * *"}, 422),
    ("POST", "/runs/crons", {**CRON, "schedule": "*/0 * * * *"}, 422),
    ("POST", "/runs/crons", {**CRON, "schedule": "0 0 31 2 *"}, 422),
    ("POST", "/runs/crons", {**CRON, "schedule": "٣ * * * *"}, 422),
    ("POST", "/runs/crons", {**CRON, "schedule": "* " * 300}, 422),
    ("POST", "/runs/crons", {**CRON, "timezone": "../../etc/passwd"}, 422),
    ("POST", "/runs/crons", {**CRON, "timezone": "Europe"}, 422),
    ("POST", "/runs/crons", {**CRON, "end_time": "yesterday"}, 422),
    ("POST", "/runs/crons", {**CRON, "end_time": "0001-01-01T00:00:00+23:59"}, 422),
    ("POST", "/runs/crons", {**CRON, "end_time": "9999-12-31T23:59:59-23:59"}, 422),
    ("PATCH", "/runs/crons/{cron_id}", {}, 400),
    ("PATCH", "/runs/crons/{cron_id}", {"command": {"resume": 1}}, 400),
    ("PUT", "/store/items", {"namespace": [], "key": "k", "value": {}}, 400),
    ("PUT", "/store/items", {"namespace": ["langgraph"], "key": "k", "value": {}}, 400),
    ("PUT", "/store/items", {"namespace": [""], "key": "k", "value": {}}, 422),
    ("PUT", "/store/items", {"namespace": ["a.b"], "key": "k", "value": {}}, 422),
    ("PUT", "/store/items", {"namespace": ["a"], "key": "k" * 3000, "value": {}}, 422),
    ("PUT", "/store/items", {"namespace": ["a"] * 1001, "key": "k", "value": {}}, 422),
    ("PUT", "/store/items", {"namespace": ["a"], "key": "k", "value": {}, "ttl": 1e300}, 422),
    ("GET", "/store/items?namespace=a", None, 400),
    ("POST", "/store/items/search", {"filter": {"a": {"$like": "%"}}}, 422),
    ("POST", "/store/items/search", {"filter": {"a": {"$gt": {}}}}, 422),
    ("POST", "/store/namespaces", {"max_depth": 0}, 422),
    ("POST", "/threads/{thread_id}/stream/events", {"channels": ["values", "secrets"]}, 400),
    ("POST", "/threads/{thread_id}/stream/events", {"channels": ["values"], "since": -1}, 400),
    ("POST", "/threads/{thread_id}/stream/events", {"channels": ["values"], "since": 2**63}, 400),
    ("POST", "/threads/{thread_id}/stream/events", {"channels": ["values"], "depth": True}, 400),
]

# Commands that are commands, and cannot be carried out: an answer, with 200.
COMMANDS: list[tuple[str, Any, str]] = [
    ("", {}, "unknown_command"),
    ("__init__", {}, "unknown_command"),
    (NUL, {}, "unknown_command"),
    ("run.start", [], "invalid_argument"),
    ("run.start", "", "invalid_argument"),
    ("run.start", {}, "invalid_argument"),
    ("run.start", {"assistant_id": 5}, "invalid_argument"),
    ("run.start", {"assistant_id": NUL}, "unknown_error"),
    ("run.start", {"assistant_id": NOBODY}, "unknown_error"),
    ("run.start", {"assistant_id": "echo", "metadata": {"a": NUL}}, "invalid_argument"),
    ("run.start", {"assistant_id": "echo", "metadata": []}, "invalid_argument"),
    ("run.start", {"assistant_id": "echo", "config": {"configurable": 5}}, "invalid_argument"),
    ("run.start", {"assistant_id": "echo", "config": {"recursion_limit": 0}}, "invalid_argument"),
    ("input.respond", {}, "invalid_argument"),
    ("input.respond", {"interrupt_id": 5}, "invalid_argument"),
    ("input.respond", {"responses": {"interrupt_id": "x"}}, "invalid_argument"),
    ("input.respond", {"responses": [None]}, "invalid_argument"),
    ("input.respond", {"interrupt_id": NUL, "response": 1}, "no_such_interrupt"),
    ("input.respond", {"responses": [{"interrupt_id": "x", "response": 1}] * 2}, "no_such_interrupt"),
]


def _ids(table: list[Any]) -> list[str]:
    return [f"{number}-{row[0]}" for number, row in enumerate(table)]


async def _nothing_changes(intruder: Intruder, method: str, path: str, body: Any) -> httpx.Response:
    before = intruder.everything()
    request = {} if body is None else {"json": body}
    answer = await intruder.refused(method, intruder.path(path), **request)
    assert intruder.everything() == before
    return answer


@pytest.mark.parametrize(("method", "path", "body"), WITH_NUL, ids=_ids(WITH_NUL))
async def test_a_nul_character(intruder: Intruder, method: str, path: str, body: Any) -> None:
    answer = await _nothing_changes(intruder, method, path, body)
    assert answer.status_code in (400, 404, 422)


@pytest.mark.parametrize(("method", "path", "body", "status"), REFUSED, ids=_ids(REFUSED))
async def test_what_is_refused(intruder: Intruder, method: str, path: str, body: Any, status: int) -> None:
    answer = await _nothing_changes(intruder, method, path, body)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(("method", "params", "code"), COMMANDS, ids=_ids(COMMANDS))
async def test_a_command_that_fails(intruder: Intruder, method: str, params: Any, code: str) -> None:
    before = intruder.everything()
    command = {"id": 7, "method": method, "params": params}
    answer = await intruder.client.post(intruder.path("/threads/{calm}/commands"), json=command)
    assert answer.status_code == 200
    assert answer.json() == {"type": "error", "id": 7, "error": code, "message": answer.json()["message"]}
    assert intruder.everything() == before


@pytest.mark.parametrize("given", ["x", "1e3", "-2", "1.0", "²", "1" * 17, "0" * 5000, "1_0"])
async def test_last_event_id_of_another_form_is_accepted(intruder: Intruder, given: str) -> None:
    for path in (
        "/runs/{run_id}/stream",
        "/threads/{thread_id}/runs/{run_id}/stream",
        "/threads/{thread_id}/stream",
    ):
        headers = [(b"last-event-id", given.encode("latin-1"))]
        async with intruder.client.stream("GET", intruder.path(path), headers=headers) as answer:
            assert answer.status_code == 200


async def test_hostile_keys_come_back_as_they_were(intruder: Intruder) -> None:
    client = intruder.client
    thread = (await client.post("/threads", json={"metadata": HOSTILE})).json()
    run = (
        await client.post(f"/threads/{thread['thread_id']}/runs", json={**RUN, "metadata": HOSTILE, "input": HOSTILE})
    ).json()
    cron = (await client.post("/runs/crons", json={**CRON, "metadata": HOSTILE})).json()
    assistant = (
        await client.post("/assistants", json={"graph_id": "echo", "metadata": HOSTILE, "context": HOSTILE})
    ).json()
    for found in (
        (await client.get(f"/threads/{thread['thread_id']}")).json(),
        (await client.get(f"/runs/crons/{cron['cron_id']}")).json(),
        (await client.get(f"/assistants/{assistant['assistant_id']}")).json(),
    ):
        assert HOSTILE.items() <= found["metadata"].items()
    assert HOSTILE.items() <= run["metadata"].items()
    assert run["kwargs"]["input"] == HOSTILE
    for key, value in HOSTILE.items():
        for path, name in (("threads", "thread_id"), ("assistants", "assistant_id"), ("runs/crons", "cron_id")):
            own = {"threads": thread, "assistants": assistant, "runs/crons": cron}[path]
            wanted = {"metadata": {key: value, "": 0}}
            assert [one[name] for one in (await client.post(f"/{path}/search", json=wanted)).json()] == [own[name]]
            assert (await client.post(f"/{path}/count", json={"metadata": {key: "other"}})).json() == 0


async def test_hostile_items_of_the_store(intruder: Intruder) -> None:
    client = intruder.client
    labels = [key for key in HOSTILE_KEYS if key and "." not in key and len(key) < 1000]
    for label in labels:
        item = {"namespace": ["hostile", label], "key": label, "value": HOSTILE, "index": False}
        assert (await client.put("/store/items", json=item)).status_code == 204
    for label in labels:
        named = {"namespace": f"hostile.{label}", "key": label}
        assert (await client.get("/store/items", params=named)).json()["value"] == HOSTILE
        wanted = {"namespace_prefix": ["hostile", label], "filter": {label: HOSTILE[label]}}
        found = (await client.post("/store/items/search", json=wanted)).json()["items"]
        assert [item["key"] for item in found] == [label]
        deleted = await client.request("DELETE", "/store/items", json={"namespace": ["hostile", label], "key": label})
        assert deleted.status_code == 204
    assert (await client.post("/store/items/search", json={"namespace_prefix": ["hostile"]})).json() == {"items": []}


async def test_nul_is_fine_where_it_is_only_handed_on(intruder: Intruder) -> None:
    """Input is for graph code, which may want it; Postgres keeps it as it came."""
    said = {"value": NUL, NUL: [NUL]}
    run = (await intruder.client.post("/runs", json={**RUN, "input": said})).json()
    assert (await intruder.client.get(f"/runs/{run['run_id']}")).json()["kwargs"]["input"] == said


async def test_embeddings_that_fail_are_a_failure_of_the_server(intruder: Intruder) -> None:
    """No client can help it, and none is told more than that."""
    before = intruder.everything()
    item = {"namespace": ["a"], "key": "new", "value": {"text": "unspeakable"}}
    stored = await intruder.client.put("/store/items", json=item)
    found = await intruder.client.post("/store/items/search", json={"query": "unspeakable"})
    for answer in (stored, found):
        assert answer.status_code == 500
        assert list(answer.json()) == ["detail"]
        assert "away" not in answer.text
    assert intruder.everything() == before


async def test_no_character_of_a_name_is_a_pattern(intruder: Intruder) -> None:
    for name in ("100%", "100x", "a_b", "aXb", "back\\slash"):
        await intruder.client.post("/assistants", json={"graph_id": "ask", "name": name})
    for part, found in (("%", ["100%"]), ("_", ["a_b"]), ("\\", ["back\\slash"]), ("0%", ["100%"]), (".*", [])):
        wanted = {"name": part, "graph_id": "ask"}
        names = [one["name"] for one in (await intruder.client.post("/assistants/search", json=wanted)).json()]
        assert names == found


async def test_numbers_at_the_edge(intruder: Intruder) -> None:
    """They are the same number again, and the times next to them are times."""
    numbers = {"a": 1e308, "b": -1.7976931348623157e308, "c": 5e-324, "d": 2**63 - 1, "e": -(2**63), "f": 2**64 - 1}
    about = {"graph_id": "echo", "metadata": numbers, "context": numbers, "config": {"metadata": numbers}}
    assistant = orjson.loads((await intruder.client.post("/assistants", json=about)).content)
    thread = orjson.loads((await intruder.client.post("/threads", json={"metadata": numbers})).content)
    named = {**CRON, "assistant_id": assistant["assistant_id"], "metadata": numbers}
    cron = orjson.loads((await intruder.client.post("/runs/crons", json=named)).content)
    changed = await intruder.client.patch(f"/runs/crons/{cron['cron_id']}", json={"metadata": {"z": 1}})
    run = await intruder.client.post(f"/threads/{thread['thread_id']}/runs", json={**named, "input": numbers})
    for answer in (assistant, thread, cron, orjson.loads(changed.content), orjson.loads(run.content)):
        assert numbers.items() <= answer["metadata"].items()
        assert "T" in answer["created_at"]


async def test_long_texts(intruder: Intruder) -> None:
    long = "ä" * 1_000_000
    thread = await intruder.client.post("/threads", json={"metadata": {long: long}})
    assistant = await intruder.client.post("/assistants", json={"graph_id": "echo", "name": long, "description": long})
    run = await intruder.client.post("/runs", json={**RUN, "input": long, "metadata": {"a": long}})
    item = {"namespace": ["long"], "key": "k", "value": {"text": long}}
    stored = await intruder.client.put("/store/items", json=item)
    assert [one.status_code for one in (thread, assistant, run, stored)] == [200, 200, 200, 204]
    found = await intruder.client.post("/assistants/search", json={"name": long, "select": ["name"]})
    assert found.json() == [{"name": long}]


async def test_the_same_thing_twice_in_a_list(intruder: Intruder) -> None:
    client = intruder.client
    thread = (await client.post("/threads")).json()["thread_id"]
    twice = {"ids": [thread, thread], "select": ["thread_id", "thread_id"]}
    assert (await client.post("/threads/search", json=twice)).json() == [{"thread_id": thread}]
    again = {"stream_mode": ["values", "values"], "interrupt_before": ["say", "say"], "feedback_keys": ["a", "a"]}
    assert (await client.post("/runs", json={**RUN, **again})).status_code == 200
    assert (await client.post("/threads/prune", json={"thread_ids": [thread, thread]})).json() == {"pruned_count": 1}
    repeated = b'{"status": 5, "status": "idle"}'
    assert (await client.post("/threads/count", content=repeated, headers=JSON)).status_code == 200


async def test_unknown_fields_are_ignored(intruder: Intruder) -> None:
    """In every body that can destroy nothing: clients are newer than servers."""
    document = (await intruder.client.get("/openapi.json")).json()
    unknown = {"strict_future": True, "assistantId": 5, "__proto__": {"limit": -1}, "": None}
    for method, path, declared in operations(document):
        # There is no question here that could be answered.
        if "requestBody" not in declared or destroys(path, {method}) or path.endswith("/resume"):
            continue
        target = intruder.path(path.replace("{thread_id}/state", "{calm}/state"))
        least = least_body(document, declared)
        body = [{**one, **unknown} for one in least] if isinstance(least, list) else {**least, **unknown}
        async with intruder.client.stream(method, target, json=body) as answer:
            assert answer.status_code < 300, (method, path)


NOT_JSON = {
    "none": None,
    "empty": "",
    "text": "text/plain",
    "form": "application/x-www-form-urlencoded",
    "multipart": "multipart/form-data; boundary=x",
    "JSON in the end": "text/plain; application/json",
    "JSON in the name": "application/jsonp",
    "garbage": ";;;",
    "long": "x" * 5000,
}


@pytest.mark.parametrize("content_type", NOT_JSON.values(), ids=NOT_JSON)
async def test_bodies_of_other_types_are_refused_by_every_operation(
    intruder: Intruder, content_type: str | None
) -> None:
    document = (await intruder.client.get("/openapi.json")).json()
    headers = {} if content_type is None else {"content-type": content_type}
    before = intruder.everything()
    asked = 0
    for method, path, _ in operations(document):
        if method != "GET":
            for body in (b"{}", _parts()):
                answer = await intruder.client.request(method, intruder.path(path), content=body, headers=headers)
                assert answer.status_code == 415, (method, path)
                assert "content-type: application/json" in answer.json()["detail"]
                asked += 1
    assert asked > 50
    assert intruder.everything() == before


async def _parts() -> AsyncIterator[bytes]:
    yield b"{}"


async def test_unknown_fields_of_inner_objects_are_ignored(intruder: Intruder) -> None:
    """A Command of JavaScript's LangGraph has `lg_name`, for one, and one of Python's has `graph`."""
    unknown = {"lg_name": "Command", "graph": None, "strict_future": {"limit": -1}}
    command = {"update": {"value": 1}, "goto": [{"node": "say", "input": {}, **unknown}], **unknown}
    place = {"checkpoint_ns": "", **unknown}
    run = {
        **RUN,
        "command": command,
        "config": {"tags": ["a"], **unknown},
        "langsmith_tracer": {"project_name": "p", **unknown},
    }
    steps = [{"updates": [{"values": {"value": 1}, "as_node": "say", **unknown}], **unknown}]
    start = {"id": 1, "method": "run.start", "params": {"assistant_id": "echo", "command": command}, **unknown}
    for method, path, body in (
        ("POST", "/runs", run),
        ("POST", "/runs/batch", [run]),
        ("POST", "/runs/crons", {**CRON, "command": command}),
        ("PATCH", "/runs/crons/{cron_id}", {"command": command}),
        ("POST", "/threads", {"ttl": {"ttl": 5, **unknown}, "metadata": {"graph_id": "echo"}, "supersteps": steps}),
        ("POST", "/threads/{calm}/state", {"values": {"value": 1}, "as_node": "say", "checkpoint": place}),
        ("POST", "/threads/{calm}/state/checkpoint", {"checkpoint": place}),
        ("POST", "/threads/{calm}/history", {"checkpoint": place, "before": {"configurable": unknown, **unknown}}),
        ("POST", f"/threads/{NOBODY}/commands", start),
    ):
        answer = await intruder.client.request(method, intruder.path(path), json=body)
        assert answer.status_code < 300, (path, answer.text)
        assert "error" not in answer.json() or answer.json()["error"] is None, (path, answer.text)


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "Application/JSON", "application/json; charset=utf-8", "application/merge-patch+json"],
)
async def test_bodies_of_json_types_are_read(intruder: Intruder, content_type: str) -> None:
    headers = {"content-type": content_type}
    answer = await intruder.client.post("/threads/count", content='{"metadata": {"ä": 1}}'.encode(), headers=headers)
    assert (answer.status_code, answer.json()) == (200, 0)


@pytest.mark.parametrize("content_type", [None, "", "text/plain"])
async def test_requests_without_a_body_need_no_content_type(intruder: Intruder, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    assert (await intruder.client.post("/threads/count", headers=headers)).status_code == 200


async def test_headers_that_say_nothing(intruder: Intruder) -> None:
    for name in ("x-request-id", "langsmith-trace", "baggage", "prefer", "traceparent", "cookie", "accept", "range"):
        for value in (b"", b"\xff\xfe", b"%00%ff%", b"a=b=c;;;,,,=", b"langsmith-metadata=%7B%22a%22:%00", b"x" * 9000):
            headers = {name.encode(): value}
            assert (await intruder.client.post("/runs", json=RUN, headers=headers)).status_code == 200, (name, value)


@pytest.mark.parametrize(
    "said",
    [
        b"GET /ok HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
        b"GET /ok\0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /threads HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /threads HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"NONSENSE\r\n\r\n",
    ],
    ids=["NUL in header", "NUL in path", "negative length", "bad chunk", "no request"],
)
async def test_what_is_not_http(intruder: Intruder, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", intruder.client.base_url.port)
    writer.write(said)
    answer = await asyncio.wait_for(reader.read(1000), 60)
    writer.close()
    await writer.wait_closed()
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 422"))

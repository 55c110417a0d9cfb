"""Values that are JSON, of the right type, and refused for what they say. A refusal leaves nothing behind."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.intruder import CRON, NOBODY, NUL, RUN, Intruder

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
async def test_hostile_value_is_refused(intruder: Intruder, method: str, path: str, body: Any, status: int) -> None:
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

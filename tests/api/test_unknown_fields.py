"""Fields that the server does not know are ignored where they can destroy nothing: clients are newer than servers."""

from __future__ import annotations

import pytest

from holdfast.api.destructive import destroys
from tests.support.intruder import CRON, NOBODY, RUN, Intruder, least_body, operations

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
        ("POST", "/threads", {"ttl": {"ttl": 5}, "metadata": {"graph_id": "echo"}, "supersteps": steps}),
        ("POST", "/threads/{calm}/state", {"values": {"value": 1}, "as_node": "say", "checkpoint": place}),
        ("POST", "/threads/{calm}/state/checkpoint", {"checkpoint": place}),
        ("POST", "/threads/{calm}/history", {"checkpoint": place, "before": {"configurable": unknown, **unknown}}),
        ("POST", f"/threads/{NOBODY}/commands", start),
    ):
        answer = await intruder.client.request(method, intruder.path(path), json=body)
        assert answer.status_code < 300, (path, answer.text)
        assert "error" not in answer.json() or answer.json()["error"] is None, (path, answer.text)

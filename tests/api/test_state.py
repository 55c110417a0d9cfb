"""The state of threads over HTTP: read, looked back on, changed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from holdfast.settings import Settings
from tests.support.json_body import JSON
from tests.support.threads import history, made, ran, state_of
from tests.support.waiting import until

STEPS = ["s1", "s2", "s3", "s4", "s5"]
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
FIELDS = {
    "values",
    "next",
    "tasks",
    "metadata",
    "created_at",
    "checkpoint",
    "parent_checkpoint",
    "interrupts",
    "checkpoint_id",
    "parent_checkpoint_id",
}


async def test_C06_the_state_after_a_run(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "echo", input=HELLO)
    [run] = (await client.get(f"/threads/{thread_id}/runs")).json()
    state = await state_of(client, thread_id)
    assert set(state) == FIELDS
    assert [message["content"] for message in state["values"]["messages"]] == ["hello", "hello"]
    assert (state["next"], state["tasks"], state["interrupts"]) == ([], [], [])
    assert state["checkpoint"]["thread_id"] == thread_id
    assert state["checkpoint"]["checkpoint_ns"] == ""
    assert state["checkpoint_id"] == state["checkpoint"]["checkpoint_id"]
    assert state["parent_checkpoint_id"] == state["parent_checkpoint"]["checkpoint_id"]
    expected = {
        "source": "loop",
        "step": 1,
        "parents": {},
        "run_id": run["run_id"],
        "thread_id": thread_id,
        "graph_id": "echo",
        "assistant_id": run["assistant_id"],
    }
    assert expected.items() <= state["metadata"].items()
    assert state["created_at"].endswith("+00:00")


async def test_the_metadata_of_the_last_checkpoint_can_be_patched(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    path = f"/threads/{thread_id}/state"
    assert (await client.patch(path, json={"metadata": {"seen": 1}})).status_code == 400
    await ran(client, thread_id, "echo", input=HELLO)
    before = await state_of(client, thread_id)
    noted = {"seen": {"by": "me\0"}, "step": 99, "source": "nowhere", "run_id": "forged", "thread_id": "forged"}
    assert (await client.patch(path, json={"metadata": noted})).status_code == 204
    after = await state_of(client, thread_id)
    assert after == {**before, "metadata": {**before["metadata"], "seen": {"by": "me\ufffd"}}}
    await ran(client, thread_id, "echo", input=HELLO)
    assert "seen" not in (await state_of(client, thread_id))["metadata"]
    assert (await client.patch(f"/threads/{uuid4()}/state", json={"metadata": {}})).status_code == 404


async def test_a_thread_without_checkpoints_has_the_empty_state(web: httpx.AsyncClient) -> None:
    empty: dict[str, Any] = {
        "values": {},
        "next": [],
        "tasks": [],
        "metadata": None,
        "created_at": None,
        "checkpoint": None,
        "parent_checkpoint": None,
        "interrupts": [],
        "checkpoint_id": None,
        "parent_checkpoint_id": None,
    }
    for metadata in ({}, {"graph_id": "steps"}, {"graph_id": 7}):
        thread_id = await made(web, metadata=metadata)
        assert await state_of(web, thread_id) == empty
        assert await history(web, thread_id) == []
        unknown = str(uuid4())
        echoed = await state_of(web, thread_id, f"/{unknown}")
        place = {"thread_id": thread_id, "checkpoint_ns": "", "checkpoint_id": unknown}
        assert echoed == {**empty, "checkpoint": place, "checkpoint_id": unknown}
        body = {"checkpoint": {"thread_id": "another", "checkpoint_ns": ""}}
        assert (await web.post(f"/threads/{thread_id}/state/checkpoint", json=body)).json() == empty


async def test_a_graph_that_is_gone(web: httpx.AsyncClient) -> None:
    thread_id = await made(web, metadata={"graph_id": "gone"})
    for method, suffix in (("GET", "state"), ("GET", "history"), ("POST", "state")):
        response = await web.request(method, f"/threads/{thread_id}/{suffix}", content="{}", headers=JSON)
        assert response.status_code == 404
        assert "gone" in response.json()["detail"]


async def test_C07_history(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    states = await history(client, thread_id, limit=10)
    assert [state["metadata"]["step"] for state in states] == [5, 4, 3, 2, 1, 0, -1]
    assert [state["metadata"]["source"] for state in states] == ["loop"] * 6 + ["input"]
    for newer, older in pairwise(states):
        assert newer["parent_checkpoint"] == older["checkpoint"]
        assert newer["parent_checkpoint_id"] == older["checkpoint_id"]
    assert states[-1]["parent_checkpoint"] is None
    assert [state["next"] for state in states] == [[], *([name] for name in reversed(STEPS)), ["__start__"]]
    [task] = states[1]["tasks"]
    assert (task["name"], task["result"], task["error"], task["interrupts"]) == ("s5", {"done": ["s5"]}, None, [])
    assert set(task) == {"id", "name", "path", "error", "interrupts", "checkpoint", "state", "result"}
    # What a state was is what it is when asked for by its id, but for the values: those are of the moment.
    assert states[0] == await state_of(client, thread_id)
    for state in states:
        assert await state_of(client, thread_id, f"/{state['checkpoint_id']}") == state
        body = {"checkpoint": state["checkpoint"]}
        assert (await client.post(f"/threads/{thread_id}/state/checkpoint", json=body)).json() == state


async def test_history_is_one_state_long_unless_asked(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    states = await history(client, thread_id)
    path = f"/threads/{thread_id}/history"
    assert (await client.get(path)).json() == states[:1]
    assert (await client.post(path, json={})).json() == states[:1]
    assert (await client.post(path)).json() == states[:1]
    assert (await client.get(f"{path}?limit=3&before={states[1]['checkpoint_id']}")).json() == states[2:5]
    assert await history(client, thread_id, metadata={"step": 2}) == [states[3]]
    assert await history(client, thread_id, metadata={"source": "input"}) == [states[-1]]
    assert await history(client, thread_id, metadata={"source": "fork"}) == []


async def test_C63_before_in_three_forms(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    states = await history(client, thread_id)
    place = states[2]["checkpoint"]
    for before in (
        place["checkpoint_id"],
        place,
        {"checkpoint_id": place["checkpoint_id"]},
        {"configurable": place},
        {"configurable": {"checkpoint_id": place["checkpoint_id"]}},
        place["checkpoint_id"].upper(),
    ):
        assert await history(client, thread_id, before=before) == states[3:]
    for before in (None, {}, {"configurable": {}}, {"checkpoint_id": None}):
        assert await history(client, thread_id, before=before) == states


async def test_select(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    whole = await state_of(client, thread_id)
    path = f"/threads/{thread_id}"
    for query, expected in (
        ("select=next&select=checkpoint", {"next": [], "checkpoint": whole["checkpoint"]}),
        ("select=next,checkpoint", {"next": [], "checkpoint": whole["checkpoint"]}),
        ("select=values.done", {"values": {"done": STEPS}}),
        ("select=values.done&select=values.seconds&select=next", {"values": whole["values"], "next": []}),
        ("select=values.done&select=values", {"values": whole["values"]}),
        ("select=values.nothing", {"values": {}}),
        ("select=", whole),
    ):
        assert (await client.get(f"{path}/state?{query}")).json() == expected
        assert (await client.get(f"{path}/state/{whole['checkpoint_id']}?{query}")).json() == expected
        assert (await client.get(f"{path}/history?{query}")).json() == [expected]
    body = {"select": ["values.done", "next"], "checkpoint": whole["checkpoint"]}
    expected = {"values": {"done": STEPS}, "next": []}
    assert (await client.post(f"{path}/state/checkpoint", json=body)).json() == expected
    assert (await client.post(f"{path}/history", json={"select": body["select"]})).json() == [expected]
    assert (await client.get(f"{path}/state?select=password")).status_code == 422


async def test_C50_update(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    before = await state_of(client, thread_id)
    response = await client.post(f"/threads/{thread_id}/state", json={"values": {"done": ["mine"]}, "as_node": "s2"})
    assert response.status_code == 200
    answer = response.json()
    assert set(answer) == {"checkpoint", "configurable", "checkpoint_id"}
    assert answer["checkpoint"] == answer["configurable"]
    state = await state_of(client, thread_id)
    assert (state["checkpoint"], state["parent_checkpoint"]) == (answer["checkpoint"], before["checkpoint"])
    assert state["checkpoint_id"] == answer["checkpoint_id"]
    assert state["values"]["done"] == [*STEPS, "mine"]
    assert state["next"] == ["s3"]
    metadata = state["metadata"]
    assert (metadata["source"], metadata["step"], metadata["graph_id"]) == ("update", 6, "steps")
    assert metadata["assistant_id"] == before["metadata"]["assistant_id"]
    # It is nobody's run: whoever rolls one back must not take the update with it.
    assert "run_id" not in metadata
    thread = (await client.get(f"/threads/{thread_id}")).json()
    assert (thread["status"], thread["values"]) == ("interrupted", state["values"])
    assert thread["state_updated_at"] == thread["updated_at"] > thread["created_at"]
    assert (await ran(client, thread_id, input=None))["done"] == [*STEPS, "mine", "s3", "s4", "s5"]
    assert (await client.get(f"/threads/{thread_id}")).json()["status"] == "idle"


async def test_C50_update_while_a_run_is_in_flight(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    runs = f"/threads/{thread_id}/runs"
    for after in (3600, 0):
        body = {"assistant_id": "steps", "input": {"seconds": 3600}, "after_seconds": after}
        run = (await client.post(runs, json=body)).json()
        if not after:

            async def running(run_id: str = run["run_id"]) -> bool:
                return bool((await client.get(f"{runs}/{run_id}")).json()["status"] == "running")

            await until(running, "the run starts")
        before = await history(client, thread_id)
        refused = await client.post(f"/threads/{thread_id}/state", json={"values": {"done": ["mine"]}, "as_node": "s1"})
        assert refused.status_code == 409
        assert run["run_id"] in refused.json()["detail"]
        assert len(await history(client, thread_id)) >= len(before)
        assert "mine" not in str(await history(client, thread_id))
        await client.post(f"{runs}/{run['run_id']}/cancel?wait=1")


async def test_update_a_thread_that_never_ran(client: httpx.AsyncClient) -> None:
    thread_id = await made(client, metadata={"graph_id": "echo"})
    response = await client.post(f"/threads/{thread_id}/state", json={"values": HELLO, "as_node": "__start__"})
    assert response.status_code == 200, response.text
    assert (await state_of(client, thread_id))["next"] == ["reply"]
    # The run must not take the thread for a new one.
    result = await ran(client, thread_id, "echo", input=None)
    assert [message["content"] for message in result["messages"]] == ["hello", "hello"]


async def test_update_an_earlier_checkpoint(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    states = await history(client, thread_id)
    path = f"/threads/{thread_id}/state"
    for place in ({"checkpoint_id": states[3]["checkpoint_id"]}, {"checkpoint": states[3]["checkpoint"]}):
        response = await client.post(path, json={"values": {"done": ["fork"]}, "as_node": "s3", **place})
        assert response.status_code == 200
        state = await state_of(client, thread_id)
        assert state["values"]["done"] == ["s1", "s2", "fork"]
        assert state["parent_checkpoint"] == states[3]["checkpoint"]
        assert (await client.get(f"/threads/{thread_id}")).json()["values"] == state["values"]
    unknown = await client.post(path, json={"values": {}, "as_node": "s3", "checkpoint_id": str(uuid4())})
    assert unknown.status_code == 404
    assert len(await history(client, thread_id)) == len(states) + 2


async def test_update_without_values_ends_what_waits(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "ask", input={"question": "why?"})
    [task] = (await state_of(client, thread_id))["tasks"]
    [asked] = task["interrupts"]
    assert asked["value"] == {"question": "why?"}
    assert set(asked) == {"id", "value"}
    thread = (await client.get(f"/threads/{thread_id}")).json()
    assert thread["interrupts"][task["id"]][0]["id"] == asked["id"]
    response = await client.post(f"/threads/{thread_id}/state", json={"values": None, "as_node": "__end__"})
    assert response.status_code == 200
    thread = (await client.get(f"/threads/{thread_id}")).json()
    assert (thread["status"], thread["interrupts"]) == ("idle", {})
    assert (await state_of(client, thread_id))["next"] == []


async def test_an_update_that_leaves_a_question_open(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, "ask", input={"question": "why?"})
    await client.post(f"/threads/{thread_id}/state", json={"values": {"question": "how?"}, "as_node": "__start__"})
    state = await state_of(client, thread_id)
    assert state["next"] == ["ask_human"]
    thread = (await client.get(f"/threads/{thread_id}")).json()
    assert (thread["status"], thread["values"]) == ("interrupted", {"question": "how?"})
    assert [item["value"] for item in (await ran(client, thread_id, "ask", input=None))["__interrupt__"]] == [
        {"question": "how?"}
    ]


async def test_an_update_puts_an_error_right(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    await ran(client, thread_id, input={"seconds": "soon"})
    failed = (await client.get(f"/threads/{thread_id}")).json()
    assert (failed["status"], failed["error"]["error"]) == ("error", "TypeError")
    [task] = (await state_of(client, thread_id))["tasks"]
    assert "TypeError" in task["error"]
    body = {"values": {"seconds": 0}, "as_node": "__start__"}
    assert (await client.post(f"/threads/{thread_id}/state", json=body)).status_code == 200
    mended = (await client.get(f"/threads/{thread_id}")).json()
    assert (mended["status"], mended["error"]) == ("interrupted", None)
    assert (await ran(client, thread_id, input=None))["done"] == STEPS


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"values": {"done": []}, "as_node": "nowhere"}, 400),
        ({"values": {"done": []}, "as_node": "\0"}, 400),
        ({"values": {"done": 5}, "as_node": "s1"}, 400),
        ({"values": [1, 2], "as_node": "s1"}, 400),
        ({"values": [5], "as_node": "__copy__"}, 400),
        ({"values": {"done": []}, "as_node": "s1", "checkpoint": {"checkpoint_ns": "nowhere:1"}}, 404),
        ({"values": {"done": []}, "as_node": "s1", "checkpoint": {"checkpoint_ns": "\0"}}, 404),
        ({"values": {"done": []}, "as_node": "s1", "checkpoint": {"checkpoint_ns": "|" * 10_000}}, 404),
        ({"values": "text", "as_node": "s1"}, 422),
        ({"values": {}, "as_node": 5}, 422),
        ({"values": {}, "checkpoint_id": "x"}, 422),
        ({"values": {}, "checkpoint": "x"}, 422),
        ({"values": {}, "checkpoint": {"checkpoint_ns": 5}}, 422),
        ({"values": {}, "checkpoint": {"checkpoint_map": 5}}, 422),
        ({"values": {"done": 5}, "as_node": "s1", "checkpoint": {"checkpoint_map": {"": {"a": ["b"]}}}}, 400),
    ],
)
async def test_an_update_that_is_refused_changes_nothing(
    client: httpx.AsyncClient, body: dict[str, Any], status: int
) -> None:
    thread_id = await made(client)
    await ran(client, thread_id)
    before = (await client.get(f"/threads/{thread_id}")).json(), await history(client, thread_id)
    response = await client.post(f"/threads/{thread_id}/state", json=body)
    assert response.status_code == status, response.text
    assert isinstance(response.json()["detail"], str)
    assert ((await client.get(f"/threads/{thread_id}")).json(), await history(client, thread_id)) == before


@pytest.mark.parametrize(
    ("method", "suffix", "body", "status"),
    [
        ("GET", "state/x", None, 422),
        ("GET", "state?subgraphs=perhaps", None, 422),
        ("GET", "history?limit=0", None, 422),
        ("GET", "history?limit=1001", None, 422),
        ("GET", "history?before=x", None, 422),
        ("POST", "history", {"limit": 10**30}, 422),
        ("POST", "history", {"before": "x"}, 422),
        ("POST", "history", {"before": 5}, 422),
        ("POST", "history", {"before": {"configurable": {"checkpoint_id": "\0"}}}, 422),
        ("POST", "history", {"before": {"configurable": 5}}, 422),
        ("POST", "history", {"metadata": {"a": "\0"}}, 422),
        ("POST", "history", {"metadata": 5}, 422),
        ("POST", "history", {"select": ["x"]}, 422),
        ("POST", "history", {"checkpoint": {"checkpoint_ns": "nowhere"}}, 404),
        ("POST", "history", {"checkpoint": {"checkpoint_ns": "\0"}}, 404),
        ("POST", "state/checkpoint", {}, 422),
        ("POST", "state/checkpoint", {"checkpoint": {"checkpoint_id": "x"}}, 422),
        ("POST", "state/checkpoint", {"checkpoint": {"checkpoint_ns": "nowhere:1"}}, 404),
        ("POST", "state/checkpoint", {"checkpoint": {}, "select": ["values.\0"]}, 200),
    ],
)
async def test_what_no_reading_may_ask(
    web: httpx.AsyncClient, method: str, suffix: str, body: Any, status: int
) -> None:
    thread_id = await made(web, metadata={"graph_id": "steps"})
    await web.post(f"/threads/{thread_id}/state", json={"values": {"done": ["x"]}, "as_node": "s1"})
    response = await web.request(method, f"/threads/{thread_id}/{suffix}", json=body)
    assert response.status_code == status, response.text
    assert (await web.request(method, f"/threads/{uuid4()}/{suffix}", json=body)).status_code in (404, 422)


async def test_update_needs_a_graph(web: httpx.AsyncClient) -> None:
    thread_id = await made(web)
    response = await web.post(f"/threads/{thread_id}/state", json={"values": {}})
    assert response.status_code == 400
    assert (await web.post(f"/threads/{uuid4()}/state", json={"values": {}})).status_code == 404


async def test_storage(client: httpx.AsyncClient) -> None:
    thread_id = await made(client)
    empty = {"thread_id": thread_id, "total_bytes": 0, "checkpoints": 0, "channel_values": 0, "pending_writes": 0}
    assert (await client.get(f"/threads/{thread_id}/storage")).json() == empty
    await ran(client, thread_id)
    used = (await client.get(f"/threads/{thread_id}/storage")).json()
    parts = [used[part] for part in ("checkpoints", "channel_values", "pending_writes")]
    assert all(part > 0 for part in parts)
    assert used["total_bytes"] == sum(parts)
    assert (await client.get(f"/threads/{uuid4()}/storage")).status_code == 404


async def test_values_that_postgres_cannot_keep_as_json(client: httpx.AsyncClient, settings: Settings) -> None:
    """NUL, above all: a run may bring it in, and an update must not stumble over it."""
    thread_id = await made(client)
    await ran(client, thread_id, "ask", input={"question": "a\0b"})
    body = {"values": {"answer": "c\0d"}, "as_node": "ask_human"}
    assert (await client.post(f"/threads/{thread_id}/state", json=body)).status_code == 200
    assert (await state_of(client, thread_id))["values"] == {"question": "a\0b", "answer": "c\0d"}
    with psycopg.connect(str(settings.database_url)) as connection:
        row = connection.execute('SELECT "values" FROM holdfast.thread').fetchone()
    assert row == ({"question": "a\ufffdb", "answer": "c\ufffdd"},)

"""The state of threads over HTTP: read, looked back on, changed."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Annotated, Any
from uuid import uuid4

import httpx
import psycopg
import pytest
from langgraph.channels import DeltaChannel
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from holdfast.api.main import serve
from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.settings import Settings
from holdfast.worker.main import Worker
from tests.support.catalogs import catalog_of
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


async def made(client: httpx.AsyncClient, **body: Any) -> str:
    response = await client.post("/threads", json=body)
    assert response.status_code == 200, response.text
    identity: str = response.json()["thread_id"]
    return identity


async def ran(client: httpx.AsyncClient, thread_id: str, graph: str = "steps", **body: Any) -> dict[str, Any]:
    body = {"assistant_id": graph, "input": {"seconds": 0}, **body}
    response = await client.post(f"/threads/{thread_id}/runs/wait", json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


async def state_of(client: httpx.AsyncClient, thread_id: str, query: str = "") -> dict[str, Any]:
    response = await client.get(f"/threads/{thread_id}/state{query}")
    assert response.status_code == 200, response.text
    state: dict[str, Any] = response.json()
    return state


async def history(client: httpx.AsyncClient, thread_id: str, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(f"/threads/{thread_id}/history", json={"limit": 100, **body})
    assert response.status_code == 200, response.text
    states: list[dict[str, Any]] = response.json()
    return states


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
        response = await web.request(method, f"/threads/{thread_id}/{suffix}", content="{}")
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


# --- An update and a run at the same time --------------------------------------------------------------------------


async def test_an_update_waits_for_a_run_that_is_being_created(web: httpx.AsyncClient, settings: Settings) -> None:
    """The run is not committed yet, so only the thread's lock can tell that it is coming."""
    thread_id = await made(web, metadata={"graph_id": "steps"})
    database = Database(settings, "test")
    await database.open()
    try:
        async with database.transaction() as creating:
            await creating.execute("SELECT 1 FROM thread WHERE thread_id = %s FOR NO KEY UPDATE", (thread_id,))
            await creating.execute(
                "INSERT INTO run (run_id, thread_id, assistant_id, graph_id, created_at, kwargs) "
                "VALUES (%s, %s, %s, 'steps', now(), '{}')",
                (uuid4(), thread_id, uuid4()),
            )
            body = {"values": {"done": ["mine"]}, "as_node": "s1"}
            updating = asyncio.create_task(web.post(f"/threads/{thread_id}/state", json=body))

            async def waits() -> bool:
                if updating.done():
                    return True
                async with database.connection() as connection:
                    cursor = await connection.execute(
                        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                    )
                    return await cursor.fetchone() is not None

            await until(waits, "the update waits for the thread")
        assert (await updating).status_code == 409
        assert await history(web, thread_id) == []
    finally:
        await database.close()


async def test_updates_and_runs_at_once_lose_and_double_nothing(client: httpx.AsyncClient) -> None:
    """Whatever is acknowledged is in the state once, and no run starts from a state that an update then replaces."""
    thread_id = await made(client, metadata={"graph_id": "steps"})
    accepted: list[str] = []
    refused = runs = 0

    async def update(name: str) -> None:
        nonlocal refused
        body = {"values": {"done": [name]}, "as_node": "s5"}
        response = await client.post(f"/threads/{thread_id}/state", json=body)
        assert response.status_code in (200, 409), response.text
        if response.status_code == 200:
            accepted.append(name)
        else:
            refused += 1

    async def run() -> None:
        nonlocal runs
        runs += 1
        await ran(client, thread_id)

    turn = 0
    while turn < 12 or not refused:
        turn += 1
        work = [update(f"u{turn}a"), run(), update(f"u{turn}b"), update(f"u{turn}c")]
        await asyncio.gather(*work[turn % 3 :], *work[: turn % 3])
        await update(f"u{turn}alone")
    done = (await state_of(client, thread_id))["values"]["done"]
    assert sorted(word for word in done if word.startswith("u")) == sorted(accepted)
    assert len(accepted) >= 12
    # Each run's steps, uninterrupted.
    text = " ".join(done)
    assert text.count(" ".join(STEPS)) == runs
    assert len(done) == len(accepted) + runs * len(STEPS)
    states = await history(client, thread_id, limit=1000)
    for newer, older in pairwise(states):
        assert newer["parent_checkpoint_id"] == older["checkpoint_id"]
    assert (await client.get(f"/threads/{thread_id}")).json()["values"]["done"] == done


# --- Graphs with something special about them ----------------------------------------------------------------------


class Notes(TypedDict, total=False):
    notes: Annotated[list[str], operator.add]


class Strict(BaseModel):
    number: int = 0


def joined(state: Any, writes: Any) -> Any:
    return [*state, *(word for write in writes for word in write)]


class DeltaNotes(TypedDict):
    notes: Annotated[list[str], DeltaChannel(joined, snapshot_frequency=3)]


def note(state: Any) -> dict[str, Any]:
    return {"notes": ["noted"]}


def ask(state: Any) -> dict[str, Any]:
    return {"notes": [interrupt("which?")]}


def double(state: Strict) -> dict[str, Any]:
    return {"number": state.number * 2}


async def never(state: Any) -> str:
    await asyncio.Event().wait()
    return END


def lost_file(state: Any) -> str:
    raise FileNotFoundError("rules.txt")


def special_graphs() -> GraphCatalog:
    child = StateGraph(Notes).add_node(note).add_node(ask).add_edge(START, "note").add_edge("note", "ask").compile()
    nested = StateGraph(Notes).add_node("child", child).add_edge(START, "child").compile()
    strict = StateGraph(Strict).add_node(double).add_edge(START, "double").add_edge("double", END).compile()
    delta = StateGraph(DeltaNotes).add_node(note).add_edge(START, "note").compile()
    slow = StateGraph(Notes).add_node(note).add_edge(START, "note").add_conditional_edges("note", never).compile()
    broken = StateGraph(Notes).add_node(note).add_edge(START, "note").add_conditional_edges("note", lost_file).compile()
    return catalog_of(nested=nested, strict=strict, delta=delta, slow=slow, broken=broken)


@pytest.fixture
async def special(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server and a worker with those graphs."""
    stop, catalog = asyncio.Event(), special_graphs()
    worker = Worker(settings, catalog)
    serving, working = asyncio.create_task(serve(settings, catalog, stop)), asyncio.create_task(worker.run())
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=30) as client:

        async def answers() -> bool:
            assert not serving.done(), serving.exception()
            try:
                return (await client.get("/ok")).status_code == 200
            except httpx.TransportError:
                return False

        await until(answers, "the server answers")
        yield client
    stop.set()
    worker.stop()
    await serving
    await working


async def test_the_state_of_a_subgraph(special: httpx.AsyncClient) -> None:
    thread_id = await made(special)
    await ran(special, thread_id, "nested", input={"notes": []})
    [task] = (await state_of(special, thread_id))["tasks"]
    assert (task["name"], task["state"]) == ("child", None)
    namespace = task["checkpoint"]["checkpoint_ns"]
    assert namespace == f"child:{task['id']}"
    for spelling in ("true", "1", "True"):
        [nested] = (await state_of(special, thread_id, f"?subgraphs={spelling}"))["tasks"]
        assert nested["checkpoint"] is None
        assert set(nested["state"]) == FIELDS
        assert (nested["state"]["next"], nested["state"]["values"]) == (["ask"], {"notes": ["noted"]})
        assert nested["state"]["tasks"][0]["interrupts"][0]["value"] == "which?"
    body: dict[str, Any] = {"checkpoint": {"checkpoint_ns": namespace}}
    direct = (await special.post(f"/threads/{thread_id}/state/checkpoint", json=body)).json()
    assert direct == nested["state"]
    states = await history(special, thread_id, checkpoint={"checkpoint_ns": namespace})
    assert [state["metadata"]["step"] for state in states] == [1, 0, -1]
    assert direct["checkpoint"] == states[0]["checkpoint"]
    assert states[0]["checkpoint"]["checkpoint_map"][namespace] == states[0]["checkpoint_id"]
    # An update inside the subgraph, as the node that asks: the answer is not needed any more.
    body = {"values": {"notes": ["told"]}, "as_node": "ask", "checkpoint": {"checkpoint_ns": namespace}}
    response = await special.post(f"/threads/{thread_id}/state", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["checkpoint"]["checkpoint_ns"] == namespace
    assert (await ran(special, thread_id, "nested", input=None))["notes"] == ["noted", "told"]


async def test_input_that_the_graph_refused_does_not_hide_the_thread(special: httpx.AsyncClient) -> None:
    thread_id = await made(special)
    assert (await ran(special, thread_id, "strict", input={"number": 3})) == {"number": 6}
    assert "__error__" in await ran(special, thread_id, "strict", input={"number": "three"})
    for suffix in ("state", "state?subgraphs=true", "history?limit=100"):
        assert (await special.get(f"/threads/{thread_id}/{suffix}")).status_code == 200
    states = await history(special, thread_id)
    assert [state["values"].get("number") for state in states] == ["three", 6, 6, 3, None]
    assert states[0]["next"] == []
    refused = await special.post(
        f"/threads/{thread_id}/state", json={"values": {"number": "x"}, "as_node": "__start__"}
    )
    assert refused.status_code == 400
    assert await history(special, thread_id) == states
    body = {"values": {"number": 4}, "as_node": "__start__", "checkpoint_id": states[2]["checkpoint_id"]}
    assert (await special.post(f"/threads/{thread_id}/state", json=body)).status_code == 200
    assert await ran(special, thread_id, "strict", input=None) == {"number": 8}


async def test_delta_channels(special: httpx.AsyncClient) -> None:
    thread_id = await made(special)
    expected: list[str] = []
    for turn in range(4):
        body = {"values": {"notes": [f"u{turn}"]}, "as_node": "note"}
        await ran(special, thread_id, "delta", input={"notes": [f"i{turn}"]})
        assert (await special.post(f"/threads/{thread_id}/state", json=body)).status_code == 200
        expected += [f"i{turn}", "noted", f"u{turn}"]
        assert (await state_of(special, thread_id))["values"]["notes"] == expected
    copy = (await special.post(f"/threads/{thread_id}/copy")).json()["thread_id"]
    assert (await state_of(special, copy))["values"]["notes"] == expected
    refused = await special.post("/threads/prune", json={"thread_ids": [thread_id], "strategy": "keep_latest"})
    assert refused.status_code == 422
    assert (await state_of(special, thread_id))["values"]["notes"] == expected


@pytest.mark.parametrize(("graph_id", "reason"), [("slow", "too long"), ("broken", "FileNotFoundError")])
async def test_an_edge_that_does_not_decide(
    special: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, graph_id: str, reason: str
) -> None:
    """The thread's lock is not held for as long as somebody's code likes."""
    monkeypatch.setattr("holdfast.resources.state.PATIENCE", 0.02)
    thread_id = await made(special, metadata={"graph_id": graph_id})
    path = f"/threads/{thread_id}/state"
    refused = await special.post(path, json={"values": {"notes": ["x"]}, "as_node": "note"})
    assert refused.status_code == 400
    assert reason in refused.json()["detail"]
    assert await history(special, thread_id) == []
    body = {"values": {"notes": ["x"]}, "as_node": "__start__"}
    assert (await special.post(path, json=body)).status_code == 200


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

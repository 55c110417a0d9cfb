"""The state of graphs that have something special about them."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import psycopg
import pytest
from langgraph.channels import DeltaChannel
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

import holdfast
from holdfast.db.connect import Database
from holdfast.graphs.catalog import GraphCatalog
from holdfast.settings import Settings
from tests.support.catalogs import catalog_of
from tests.support.serving import answering, serving
from tests.support.threads import history, made, ran, state_of


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


class Silent(Exception):
    """Nothing can be said about it."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


FAILURES: dict[str, BaseException] = {
    "silent": Silent(),
    "long": ValueError("x" * 30_000),
    "surrogate": ValueError("a\ud800b"),
    "exit": SystemExit("a script without a main guard"),
    "interrupt": KeyboardInterrupt("pressed"),
}


def picky(old: list[str], new: list[str]) -> list[str]:
    """A reducer that fails as it is told."""
    if new and new[0] in FAILURES:
        raise FAILURES[new[0]]
    return [*old, *new]


class PickyNotes(TypedDict, total=False):
    notes: Annotated[list[str], picky]


def exiting(state: Any) -> str:
    raise SystemExit("a script without a main guard")


async def exiting_later(state: Any) -> str:
    raise SystemExit("a script without a main guard")


async def spawning(state: Any) -> str:
    await holdfast.spawn("nested", key="one", input={})
    return END


def retrying(state: Any) -> str:
    raise holdfast.Retry(after=1)


def querying(state: Any) -> str:
    raise psycopg.errors.UndefinedTable('relation "rules" does not exist')


async def cancelling(state: Any) -> str:
    raise asyncio.CancelledError


class Own(BaseException):
    """As some libraries have, for what nobody is to catch."""


def leaving(state: Any) -> str:
    raise Own("not an ordinary exception")


EDGES = {
    "spawning": (spawning, "NotInRun"),
    "retrying": (retrying, "Retry"),
    "querying": (querying, "UndefinedTable: relation"),
    "cancelling": (cancelling, "CancelledError"),
    "leaving": (leaving, "Own: not an ordinary exception"),
}


def lost_file(state: Any) -> str:
    raise FileNotFoundError("rules.txt")


def special_graphs() -> GraphCatalog:
    child = StateGraph(Notes).add_node(note).add_node(ask).add_edge(START, "note").add_edge("note", "ask").compile()
    nested = StateGraph(Notes).add_node("child", child).add_edge(START, "child").compile()
    strict = StateGraph(Strict).add_node(double).add_edge(START, "double").add_edge("double", END).compile()
    delta = StateGraph(DeltaNotes).add_node(note).add_edge(START, "note").compile()
    slow = StateGraph(Notes).add_node(note).add_edge(START, "note").add_conditional_edges("note", never).compile()
    broken = StateGraph(Notes).add_node(note).add_edge(START, "note").add_conditional_edges("note", lost_file).compile()
    picky_ones = StateGraph(PickyNotes).add_node(note).add_edge(START, "note").compile()
    exits = StateGraph(Notes).add_node(note).add_edge(START, "note").add_conditional_edges("note", exiting).compile()
    later = StateGraph(Notes).add_node(note).add_edge(START, "note").add_conditional_edges("note", exiting_later)
    edges = {
        name: StateGraph(Notes).add_node(note).add_edge(START, "note").add_conditional_edges("note", edge).compile()
        for name, (edge, _) in EDGES.items()
    }
    graphs = {"slow": slow, "broken": broken, "picky": picky_ones, "exits": exits, "exits_later": later.compile()}
    return catalog_of(nested=nested, strict=strict, delta=delta, **graphs, **edges)


@pytest.fixture
async def special(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server and a worker with those graphs."""
    async with serving(settings, special_graphs()) as client:
        yield client


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
        assert set(nested["state"]) == set(await state_of(special, thread_id))
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
    thread_id = await made(special, metadata={"graph_id": graph_id})
    path = f"/threads/{thread_id}/state"
    with monkeypatch.context() as patch:
        if graph_id == "slow":
            patch.setattr("holdfast.engine.thread_state.UPDATE_TIMEOUT_LEASES", 0.02)
        refused = await special.post(path, json={"values": {"notes": ["x"]}, "as_node": "note"})
    assert refused.status_code == 400
    assert reason in refused.json()["detail"]
    assert await history(special, thread_id) == []
    body = {"values": {"notes": ["x"]}, "as_node": "__start__"}
    assert (await special.post(path, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("silent", "Silent: (no message: its __str__ fails)"),
        ("long", "… (30000 characters)"),
        ("surrogate", "ValueError: a\ufffdb"),
        ("exit", "SystemExit: a script without a main guard"),
        ("interrupt", "KeyboardInterrupt: pressed"),
    ],
)
async def test_whatever_a_reducer_raises_is_an_answer(special: httpx.AsyncClient, failure: str, said: str) -> None:
    thread_id = await made(special, metadata={"graph_id": "picky"})
    path = f"/threads/{thread_id}/state"
    assert (await special.post(path, json={"values": {"notes": ["first"]}, "as_node": "note"})).status_code == 200
    refused = await special.post(path, json={"values": {"notes": [failure]}, "as_node": "note"})
    assert refused.status_code == 400, refused.text
    assert refused.json()["detail"].endswith(said)
    assert len(refused.json()["detail"]) < 25_000
    assert (await state_of(special, thread_id))["values"] == {"notes": ["first"]}


@pytest.mark.parametrize(("graph", "said"), [(name, said) for name, (_, said) in EDGES.items()], ids=list(EDGES))
async def test_whatever_an_edge_raises_is_an_answer(settings: Settings, graph: str, said: str) -> None:
    async with answering(settings, special_graphs()) as client:
        thread_id = await made(client, metadata={"graph_id": graph})
        path = f"/threads/{thread_id}/state"
        refused = await client.post(path, json={"values": {"notes": ["x"]}, "as_node": "note"})
        assert refused.status_code == 400, refused.text
        assert said in refused.json()["detail"]
        body = {"values": {"notes": ["x"]}, "as_node": "__start__"}
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.expects_errors("http.failed")
async def test_update_that_the_database_has_no_right_to_store_is_no_fault_of_the_graph(
    settings: Settings, database: Database
) -> None:
    async with answering(settings, special_graphs()) as client:
        thread_id = await made(client, metadata={"graph_id": "strict"})
        async with database.connection() as connection:
            await connection.execute("ALTER TABLE checkpoints RENAME TO elsewhere")
        body = {"values": {"number": 1}, "as_node": "__start__"}
        assert (await client.post(f"/threads/{thread_id}/state", json=body)).status_code == 500


@pytest.mark.parametrize("graph", ["exits", "exits_later"])
async def test_an_edge_that_exits_does_not_end_the_process(settings: Settings, graph: str) -> None:
    """LangGraph executes edges in tasks of their own. Without a worker, which would contain them in this event loop."""
    async with answering(settings, special_graphs()) as client:
        thread_id = await made(client, metadata={"graph_id": graph})
        path = f"/threads/{thread_id}/state"
        refused = await client.post(path, json={"values": {"notes": ["x"]}, "as_node": "note"})
        assert refused.status_code == 400, refused.text
        assert "SystemExit: a script without a main guard" in refused.json()["detail"]
        assert (await client.get(path)).status_code == 200

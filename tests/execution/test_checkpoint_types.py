"""What checkpoints bring back: the types that graphs use, in any process, and nothing else that a row may name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ormsgpack
import pytest

from holdfast.db.connect import Database
from holdfast.resources.checkpoints import PooledSaver, TransactionSaver
from tests.support.fleet import Fleet

GRAPH = """
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langchain_core.outputs import Generation
from langgraph.types import interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

class Mood(Enum):
    GLAD = "glad"

@dataclass
class Place:
    name: str
    mood: Mood

class Animal(BaseModel):
    name: str

class Dog(Animal):
    tricks: list[str]

class Pair(NamedTuple):
    left: int
    right: int

class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    place: Place
    animals: list[Animal]
    answer: Generation
    anything: Any
    seen: list[str]

def make(state: State) -> State:
    return {
        "messages": [HumanMessage("hello"), AIMessage("good day")],
        "place": Place("here", Mood.GLAD),
        "animals": [Animal(name="cat"), Dog(name="rex", tricks=["sit"])],
        "answer": Generation(text="a"),
        "anything": {"pair": Pair(1, 2), "dog": Dog(name="bo", tricks=[])},
    }

def described(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {described(one)}' for key, one in sorted(value.items()))}}}"
    return type(value).__name__

def look(state: State) -> State:
    interrupt("look?")
    names = ("messages", "place", "animals", "answer", "anything")
    return {"seen": [described(state["place"].mood) if hasattr(state["place"], "mood") else "?",
                     *(described(state[name]) for name in names)]}

graph = StateGraph(State).add_node(make).add_node(look).add_edge(START, "make").add_edge("make", "look").compile()

@task
def fetch() -> Dog:
    return Dog(name="rex", tricks=["sit"])

@entrypoint()
def workflow(given: dict) -> str:
    dog = fetch().result()
    interrupt("go on?")
    return described(dog)
"""
SEEN = [
    "Mood",
    "[HumanMessage, AIMessage]",
    "Place",
    "[Animal, Dog]",
    "Generation",
    "{dog: Dog, pair: Pair}",
]


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "shapes.py").write_text(GRAPH)
    (project / "burglar.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nclass Tool:\n    pass\n")
    config = {"graphs": {"shapes": "./shapes.py:graph", "workflow": "./shapes.py:workflow"}}
    (project / "langgraph.json").write_text(json.dumps({**config, "dependencies": ["."]}))
    async with Fleet(database_url, tmp_path, project / "langgraph.json") as fleet:
        yield fleet


async def asked(fleet: Fleet, url: str, graph: str) -> str:
    """A thread of which a run has stopped to ask."""
    thread_id: str = (await fleet.client.post(f"{url}/threads", json={})).json()["thread_id"]
    body = {"assistant_id": graph, "input": {}}
    answer = await fleet.client.post(f"{url}/threads/{thread_id}/runs/wait", json=body)
    assert "__interrupt__" in answer.json(), answer.text
    return thread_id


async def resumed(fleet: Fleet, url: str, graph: str, thread_id: str) -> Any:
    body = {"assistant_id": graph, "command": {"resume": "yes"}}
    return (await fleet.client.post(f"{url}/threads/{thread_id}/runs/wait", json=body)).json()


async def test_types_of_graphs_are_read_in_another_process(fleet: Fleet) -> None:
    """Named by a schema, subclasses of what it names, in fields of any type, and results of tasks."""
    [web], [worker] = await fleet.start(webs=1, workers=1)
    shapes, workflow = await asked(fleet, web.url, "shapes"), await asked(fleet, web.url, "workflow")
    worker.kill()
    await fleet.start_worker()
    assert (await resumed(fleet, web.url, "shapes", shapes))["seen"] == SEEN
    assert await resumed(fleet, web.url, "workflow", workflow) == "Dog"
    state = (await fleet.client.get(f"{web.url}/threads/{shapes}/state")).json()
    assert state["values"]["animals"] == [{"name": "cat"}, {"name": "rex", "tricks": ["sit"]}]


async def test_reading_a_hostile_checkpoint_calls_and_imports_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """In every form in which a checkpoint may name something: functions, methods, classes of both pydantics."""
    [web], _ = await fleet.start(webs=1, workers=1)
    thread_id = await asked(fleet, web.url, "shapes")
    made = tmp_path / "made"
    arguments: list[Any] = [str(made), [str(made)], {"path": str(made)}, str(made), {"path": str(made)}, str(made)]
    hostile = [
        ormsgpack.Ext(code, ormsgpack.packb([module, name, argument, "mkdir"]))
        for code, argument in enumerate(arguments)
        for module, name in (("os", "mkdir"), ("burglar", "Tool"), ("os", "path"))
    ]
    await fleet.query(
        "UPDATE checkpoint_blobs SET type = 'msgpack', blob = %s WHERE thread_id = %s AND channel = 'anything' "
        "RETURNING channel",
        (ormsgpack.packb(hostile), thread_id),
    )
    state = await fleet.client.get(f"{web.url}/threads/{thread_id}/state")
    assert state.status_code == 200
    assert (await fleet.client.post(f"{web.url}/threads/{thread_id}/history", json={})).status_code == 200
    assert "seen" in await resumed(fleet, web.url, "shapes", thread_id)
    assert not made.exists()
    assert not (tmp_path / "imported").exists()


async def test_every_saver_uses_the_strict_serializer(database: Database, tmp_path: Path) -> None:
    made = tmp_path / "made"
    hostile = ormsgpack.packb(ormsgpack.Ext(0, ormsgpack.packb(["os", "mkdir", str(made)])))
    async with database.connection() as connection:
        for saver in (PooledSaver(database), TransactionSaver(database, connection)):
            assert saver.serde.loads_typed(("msgpack", hostile)) == str(made)
            assert saver.with_allowlist({("some", "Type")}) is saver
            assert saver.serde.loads_typed(("msgpack", hostile)) == str(made)
    assert not made.exists()

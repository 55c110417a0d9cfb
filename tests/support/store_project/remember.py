"""Graphs that keep things in the store: in asynchronous nodes, in blocking ones, and while they are built."""

from __future__ import annotations

from typing import Any, TypedDict

from langgraph.config import get_store
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph_sdk.runtime import ServerRuntime


class State(TypedDict, total=False):
    user: str
    seen: Any


async def recall(state: State, runtime: Runtime[Any]) -> State:
    """Hands on what the store has, and adds to it."""
    store = runtime.store
    assert store is not None
    item = await store.aget(("people", state["user"]), "profile")
    await store.aput(("people", state["user"]), "visit", {"text": "went to the market"})
    return {"seen": None if item is None else item.value}


def count(state: State) -> State:
    store = get_store()
    store.put(("people", state["user"]), "blocking", {"n": 1}, index=False)
    return {"seen": sorted(item.key for item in store.search(("people", state["user"])))}


def _compiled(node: Any, name: str = "node") -> Any:
    return StateGraph(State).add_node(name, node).add_edge(START, name).add_edge(name, END).compile()


remember = _compiled(recall)
count_blocking = _compiled(count)


async def factory(runtime: ServerRuntime[Any]) -> Any:
    item = await runtime.store.aget(("settings",), "greeting")
    greeting = None if item is None else item.value["text"]

    def greet(state: State) -> State:
        return {"seen": greeting}

    return _compiled(greet, greeting or "node")

"""A graph that ends at once."""

from __future__ import annotations

from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict


class State(TypedDict, total=False):
    said: str


def speak(state: State) -> State:
    return {"said": "hello"}


graph = StateGraph(State).add_node("speak", speak).add_edge(START, "speak").compile()

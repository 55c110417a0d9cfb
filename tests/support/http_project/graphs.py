"""A graph that shows what it was told about its run."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict


class State(TypedDict, total=False):
    ask: bool
    told: dict[str, Any]
    metadata: dict[str, Any]
    tags: list[str]


def look(state: State, config: RunnableConfig) -> State:
    if state.get("ask"):
        interrupt("well?")
    told = {key: value for key, value in config["configurable"].items() if isinstance(value, str)}
    return {"told": told, "metadata": dict(config.get("metadata") or {}), "tags": list(config.get("tags") or [])}


graph = StateGraph(State).add_node("look", look).add_edge(START, "look").compile()

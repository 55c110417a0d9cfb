"""Graphs that say what they know about who started them."""

from __future__ import annotations

from typing import Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import interrupt
from langgraph_sdk.runtime import ServerRuntime


class State(TypedDict, total=False):
    seen: dict[str, Any]
    answer: str


def look(state: State, config: RunnableConfig, runtime: Runtime[None]) -> State:
    configurable = config["configurable"]
    user = configurable.get("langgraph_auth_user")
    info = runtime.server_info
    return {
        "seen": {
            "identity": None if user is None else user["identity"],
            "team": None if user is None else user.get("team"),
            "user_id": configurable.get("langgraph_auth_user_id"),
            "permissions": configurable.get("langgraph_auth_permissions"),
            "runtime": None if info is None or info.user is None else info.user.identity,
        }
    }


def wait(state: State) -> State:
    return {"answer": str(interrupt("who goes there?"))}


def _graph(node: Any) -> Any:
    builder = StateGraph(State)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_edge("node", END)
    return builder.compile()


whoami = _graph(look)
ask = _graph(wait)


def make(config: RunnableConfig, runtime: ServerRuntime[Any]) -> Any:
    """A factory that refuses to build for nobody."""
    if runtime.user is None or "langgraph_auth_user" not in config["configurable"]:
        raise RuntimeError("built for nobody")
    return whoami

"""A graph that leaves a note in the store, and says what notes there are and whose run it is."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from langgraph.store.base import BaseStore
from typing_extensions import TypedDict


class State(TypedDict, total=False):
    note: str
    notes: list[str]
    tenant: Any


async def leave(state: State, config: RunnableConfig, store: BaseStore) -> State:
    await store.aput(("notes",), state["note"], {"text": state["note"]})
    found = await store.asearch((), limit=100)
    user = config["configurable"].get("langgraph_auth_user")
    return {
        "notes": sorted(f"{'.'.join(item.namespace)} {item.key}" for item in found),
        "tenant": None if user is None else user.get("tenant_id"),
    }


remember = StateGraph(State).add_node("leave", leave).add_edge(START, "leave").compile()

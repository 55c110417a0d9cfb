"""A graph that fails for a reason which may pass, and never does."""

from typing import Any

from langgraph.graph import START, StateGraph


async def fail(state: dict[str, Any]) -> dict[str, Any]:
    raise ConnectionError("refused")


hopeless = StateGraph(dict).add_node(fail).add_edge(START, "fail")

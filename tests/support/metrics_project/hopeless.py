"""A graph that fails for a reason which may pass, and never does."""

from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict


class Nothing(TypedDict, total=False):
    done: bool


async def fail(state: Nothing) -> Nothing:
    raise ConnectionError("refused")


hopeless = StateGraph(Nothing).add_node(fail).add_edge(START, "fail")

"""Graphs that leave one of everything: a state, a question with terms, a failure, a family."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

import holdfast


class State(TypedDict, total=False):
    value: Any


def echo_value(state: State) -> State:
    return {"value": state.get("value")}


def ask_question(state: State) -> State:
    answer = holdfast.ask(
        "Well?",
        fields=[{"name": "word"}],
        deadline=3600,
        default={"word": "yes"},
        escalate={"to": "somebody", "deadline": 3600},
    )
    return {"value": answer}


def fail(state: State) -> State:
    raise ValueError("no")


async def spread(state: State) -> State:
    child = await holdfast.spawn("ask", {}, key="one")
    return {"value": await holdfast.gather(child)}


def echo(config: RunnableConfig) -> StateGraph[Any, Any, Any, Any]:
    """A factory: to open the state, the server reads what configured the run that wrote it."""
    return StateGraph(State).add_node(echo_value).add_edge(START, "echo_value")


question = StateGraph(State).add_node(ask_question).add_edge(START, "ask_question").compile()
failing = StateGraph(State).add_node(fail).add_edge(START, "fail").compile()
family = StateGraph(State).add_node(spread).add_edge(START, "spread").compile()

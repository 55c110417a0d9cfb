"""Graphs that take any JSON and end at once, however odd it is: what a fuzzer posts must not keep it waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt


class State(TypedDict, total=False):
    value: Any


def say(state: State) -> State:
    return {"value": state.get("value")}


def question(state: State) -> State:
    return {"value": interrupt(state.get("value"))}


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [{"role": "ai", "content": str(len(state["messages"]))}]}


echo = StateGraph(State).add_node(say).add_edge(START, "say").compile()
ask = StateGraph(State).add_node(question).add_edge(START, "question").compile()
chat = StateGraph(MessagesState).add_node(reply).add_edge(START, "reply").compile()
parent = StateGraph(State).add_node("child", echo).add_edge(START, "child").compile()


def embed(texts: Sequence[str]) -> list[list[float]]:
    if any("unspeakable" in text for text in texts):
        raise RuntimeError("the model is away")
    return [[1.0, float(len(text)), float(text.count("a"))] for text in texts]

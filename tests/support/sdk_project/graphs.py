"""Graphs that give a client something of every kind to look at."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.config import get_config, get_store, get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.runtime import Runtime
from langgraph.types import interrupt


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(state["messages"][-1].content)]}


echo = StateGraph(MessagesState).add_node(reply).add_edge(START, "reply").compile()


# --- steps: five in a row, each of which can be made to last -----------------------------------------


class Steps(TypedDict, total=False):
    hold: str
    seconds: float
    done: Annotated[list[str], operator.add]


def _step(name: str) -> Any:
    async def run(state: Steps) -> Steps:
        if state.get("hold") == name:
            await asyncio.sleep(state.get("seconds", 600))
        return {"done": [name]}

    return run


steps = StateGraph(Steps).add_sequence([(name, _step(name)) for name in ("s1", "s2", "s3", "s4", "s5")])
steps.add_edge(START, "s1")


# --- ticker: many small events -----------------------------------------------------------------------


class Ticks(TypedDict, total=False):
    count: int
    pause: float
    ticked: int


async def tick(state: Ticks) -> Ticks:
    write = get_stream_writer()
    for number in range(1, state["count"] + 1):
        write({"tick": number})
        await asyncio.sleep(state.get("pause", 0))
    return {"ticked": state["count"]}


ticker = StateGraph(Ticks).add_node(tick).add_edge(START, "tick").compile()


# --- ask: questions ----------------------------------------------------------------------------------


class Question(TypedDict, total=False):
    question: str
    answer: str
    notes: list[str]


def ask_human(state: Question) -> Question:
    return {"answer": interrupt({"question": state.get("question", "?")})}


ask = StateGraph(Question).add_node(ask_human).add_edge(START, "ask_human").add_edge("ask_human", END).compile()


class Answers(TypedDict, total=False):
    answers: Annotated[list[str], operator.add]


def _asker(name: str) -> Any:
    def run(state: Answers) -> Answers:
        return {"answers": [f"{name}: {interrupt(name)}"]}

    return run


ask_twice = (
    StateGraph(Answers)
    .add_node("left", _asker("left"))
    .add_node("right", _asker("right"))
    .add_edge(START, "left")
    .add_edge(START, "right")
    .compile()
)


async def work(state: Answers) -> Answers:
    """Goes on until the client puts an item into the store."""
    store, thread_id = get_store(), get_config()["configurable"]["thread_id"]
    while await store.aget(("gates",), thread_id) is None:
        await asyncio.sleep(0.02)
    return {"answers": ["worked"]}


# The question is there while the other node is still at work.
ask_and_work = (
    StateGraph(Answers)
    .add_node("left", _asker("left"))
    .add_node(work)
    .add_edge(START, "left")
    .add_edge(START, "work")
    .compile()
)

# The question is asked by a graph inside.
deep_ask = StateGraph(Question).add_node("inner", ask).add_edge(START, "inner").compile()


# --- boom: failure -----------------------------------------------------------------------------------


def explode(state: MessagesState) -> dict[str, Any]:
    raise ValueError("the fuse was lit")


boom = StateGraph(MessagesState).add_node(explode).add_edge(START, "explode").compile()


# --- chat: tokens ------------------------------------------------------------------------------------


async def call_model(state: MessagesState) -> dict[str, Any]:
    said = state["messages"][-1].text
    model = GenericFakeChatModel(messages=iter([AIMessage(f"You said: {said}")]))
    return {"messages": [await model.ainvoke(state["messages"])]}


chat = StateGraph(MessagesState).add_node(call_model).add_edge(START, "call_model").compile()


# --- tour: custom events, a graph inside that talks, and a tool ----------------------------------------


def announce(state: MessagesState) -> dict[str, Any]:
    write = get_stream_writer()
    write({"percent": 10})
    write({"name": "progress", "payload": {"percent": 50}})
    return {}


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    if city == "Atlantis":
        raise LookupError("no such city")
    return f"sunny in {city}"


def decide(state: MessagesState) -> dict[str, Any]:
    city = state["messages"][0].text
    call = {"name": "weather", "args": {"city": city}, "id": "call-1", "type": "tool_call"}
    return {"messages": [AIMessage("", tool_calls=[call])]}


tour = (
    StateGraph(MessagesState)
    .add_node(announce)
    .add_node("talk", chat)
    .add_node(decide)
    .add_node("tools", ToolNode([weather]))
    .add_edge(START, "announce")
    .add_edge("announce", "talk")
    .add_edge("talk", "decide")
    .add_edge("decide", "tools")
    .compile()
)


# --- context: what a run was told ----------------------------------------------------------------------


@dataclass
class Context:
    model: str = "default"


class Told(TypedDict, total=False):
    given: Any
    model: str
    tags: list[str]
    metadata: dict[str, Any]


def tell(state: Told, runtime: Runtime[Context]) -> Told:
    config = get_config()
    shown = {key: value for key, value in config["metadata"].items() if key in ("team", "origin")}
    model = runtime.context.model if runtime.context else config["configurable"]["model"]
    return {"model": model, "tags": config.get("tags") or [], "metadata": shown}


told = StateGraph(Told, context_schema=Context).add_node(tell).add_edge(START, "tell").compile()

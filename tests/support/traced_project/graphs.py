"""Graphs for the tests of traces: a model that talks, a parent, one that waits to be hurt, and some that end badly."""

import asyncio
import operator
import os
from pathlib import Path
from typing import Annotated, Any

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.messages.ai import UsageMetadata
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt
from opentelemetry import trace
from typing_extensions import TypedDict

import holdfast

USAGE = UsageMetadata(input_tokens=12, output_tokens=5, total_tokens=17)


class State(TypedDict, total=False):
    done: Annotated[list[str], operator.add]
    messages: Annotated[list[AnyMessage], add_messages]
    hold: str


def line(state: type, *nodes: Any) -> Any:
    builder: Any = StateGraph(state)
    previous = START
    for node in nodes:
        builder.add_node(node.__name__, node)
        builder.add_edge(previous, node.__name__)
        previous = node.__name__
    return builder.compile()


async def ask(state: MessagesState) -> dict[str, Any]:
    """A model that says what it has used, as those of the integrations do."""
    said = AIMessage("the tide turns at six", usage_metadata=USAGE, response_metadata={"model_name": "gpt-4o"})
    return {"messages": [await GenericFakeChatModel(messages=iter([said])).ainvoke(state["messages"])]}


def note(state: MessagesState) -> dict[str, Any]:
    """A plain node, which runs in a thread, with a span of its own."""
    with trace.get_tracer("project").start_as_current_span("written down"):
        return {}


async def spread(state: State) -> dict[str, Any]:
    child = holdfast.spawn("talk", {"messages": [("user", "when does the tide turn?")]}, key="tide")
    [found] = await holdfast.gather(child)
    return {"done": [found["messages"][-1]["content"]]}


async def before(state: State) -> dict[str, Any]:
    return {"done": ["before"]}


async def wait(state: State) -> dict[str, Any]:
    """Waits for a file: the process it is in is killed meanwhile."""
    gate = Path(os.environ["TRACED_GATES"]) / state["hold"]
    gate.with_suffix(".reached").touch()
    while not gate.exists():
        await asyncio.sleep(0.02)
    return {"done": ["waited"]}


_tried: set[str] = set()


async def stumble(state: State) -> dict[str, Any]:
    if state["hold"] not in _tried:
        _tried.add(state["hold"])
        raise holdfast.Retry("not yet", after=0.05)
    return {"done": ["up again"]}


async def fail(state: State) -> dict[str, Any]:
    raise ValueError("there is no such tide")


async def question(state: State) -> dict[str, Any]:
    return {"done": [interrupt("which tide?")]}


talk = line(MessagesState, ask, note)
parent = line(State, spread)
held = line(State, before, wait)
flaky = line(State, stumble)
broken = line(State, fail)
asking = line(State, question)

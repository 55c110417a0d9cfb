"""What is run to see what running costs: five steps that do next to nothing, over a small conversation; one step that
does nothing at all; one that says a great deal; and one that speaks when it is asked to."""

from __future__ import annotations

import asyncio
import operator
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph


class Conversation(TypedDict, total=False):
    messages: Annotated[list[dict[str, str]], operator.add]
    step: int


def step(number: int) -> Any:
    async def run(state: Conversation) -> Conversation:
        return {"messages": [{"role": "assistant", "content": f"This is what step {number} says."}], "step": number}

    return run


graph = StateGraph(Conversation).add_sequence([(f"s{number}", step(number)) for number in range(1, 6)])
five = graph.add_edge(START, "s1").compile()


class Nothing(TypedDict, total=False):
    done: bool


async def do_nothing(state: Nothing) -> Nothing:
    return {"done": True}


one = StateGraph(Nothing).add_sequence([("only", do_nothing)]).add_edge(START, "only").compile()


class Speech(TypedDict, total=False):
    events: int
    pause: float
    gate: str
    """A file to wait for before the first word, or the socket that asks for each."""


async def speak(state: Speech) -> Speech:
    say = get_stream_writer()
    while (gate := state.get("gate")) and not Path(gate).exists():
        await asyncio.sleep(0.02)
    for number in range(state["events"]):
        say({"number": number, "text": " about as much as a model says at a time"})
        # As a model's stream would, let others have their turn.
        await asyncio.sleep(state.get("pause", 0))
    return {}


speech = StateGraph(Speech).add_sequence([("speak", speak)]).add_edge(START, "speak").compile()


async def speak_on_demand(state: Speech) -> Speech:
    """Says something for each byte that comes through the gate, a Unix socket, until that is closed."""
    say = get_stream_writer()
    reader, writer = await asyncio.open_unix_connection(state["gate"])
    number = 0
    while await reader.read(1):
        say({"number": number, "text": " about as much as a model says at a time"})
        number += 1
    writer.close()
    return {}


on_demand = StateGraph(Speech).add_sequence([("speak", speak_on_demand)]).add_edge(START, "speak").compile()

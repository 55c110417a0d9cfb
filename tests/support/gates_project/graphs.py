"""Graphs that ask, in all the ways there are."""

import asyncio
import operator
from typing import Annotated, Any

from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict

import holdfast


class Review(TypedDict, total=False):
    terms: dict[str, Any]
    # How long the work after the answer takes.
    seconds: float
    answer: Any
    done: Annotated[list[str], operator.add]


def review(state: Review) -> Review:
    return {"answer": holdfast.ask("Ship it?", **state.get("terms", {})), "done": ["review"]}


async def work(state: Review) -> Review:
    await asyncio.sleep(state.get("seconds", 0))
    return {"done": ["work"]}


quiet = StateGraph(Review).add_node(work).add_edge(START, "work").compile()
gate = StateGraph(Review).add_sequence([review, work]).add_edge(START, "review").compile()


class Answers(TypedDict, total=False):
    answers: Annotated[list[Any], operator.add]


def both(state: Answers) -> Answers:
    return {"answers": [interrupt("first?"), interrupt("second?")]}


twice = StateGraph(Answers).add_node(both).add_edge(START, "both").compile()


def asker(name: str) -> Any:
    def run(state: Answers) -> Answers:
        return {"answers": [(name, interrupt(name))]}

    return run


pair = (
    StateGraph(Answers)
    .add_node("left", asker("left"))
    .add_node("right", asker("right"))
    .add_edge(START, "left")
    .add_edge(START, "right")
    .compile()
)


def refuse(state: Review) -> Review:
    answer = interrupt({"question": "Which?"})
    if answer == "wrong":
        raise ValueError("not that one")
    return {"answer": answer}


picky = StateGraph(Review).add_node(refuse).add_edge(START, "refuse").compile()

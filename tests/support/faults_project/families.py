"""A graph that spawns three runs of `steps`, and stops where a test wants to hurt it.

Input: `hold` is "spawned" to stand between the last spawn and the wait until the test opens the thread's gate; `below`
is the input of the children.
"""

import operator
from typing import Annotated, Any

from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

import holdfast
from graphs import mark_start, pass_gate  # type: ignore[import-not-found]

KEYS = ["one", "two", "three"]


class Family(TypedDict, total=False):
    hold: str
    below: dict[str, Any]
    done: Annotated[list[str], operator.add]


async def spread(state: Family, config: RunnableConfig) -> Family:
    await mark_start("spread", config)
    children = [await holdfast.spawn("steps", state.get("below", {}), key=key) for key in KEYS]
    if state.get("hold") == "spawned":
        await mark_start("spawned", config)
        await pass_gate(config)
    answers = await holdfast.gather(*children)
    return {"done": [f"{key}:{len(answer['done'])}" for key, answer in zip(KEYS, answers, strict=True)]}


family = StateGraph(Family).add_node(spread).add_edge(START, "spread")

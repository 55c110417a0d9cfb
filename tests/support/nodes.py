"""Nodes to build small graphs of, when what matters is how a run ends."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from typing import Annotated, Any

from langgraph.graph import START, StateGraph
from langgraph.pregel import Pregel
from typing_extensions import TypedDict

GO: dict[str, Any] = {"words": ["go"]}


class Words(TypedDict):
    words: Annotated[list[str], operator.add]


def line(*nodes: Callable[..., Any], **compile_options: Any) -> Pregel[Any, Any, Any, Any]:
    """The functions in a row, as nodes of their own names."""
    builder = StateGraph(Words)
    previous = START
    for node in nodes:
        builder.add_node(node.__name__, node)
        builder.add_edge(previous, node.__name__)
        previous = node.__name__
    return builder.compile(**compile_options)


async def first(state: Words) -> dict[str, Any]:
    return {"words": ["first"]}


async def last(state: Words) -> dict[str, Any]:
    return {"words": ["last"]}


class Flaky:
    """A node that fails a number of times, then succeeds."""

    __name__ = "flaky"

    def __init__(self, error: Exception, times: int) -> None:
        self._error = error
        self._times = times
        self.tries = 0

    async def __call__(self, state: Words) -> dict[str, Any]:
        self.tries += 1
        if self.tries <= self._times:
            raise self._error
        return {"words": ["flaky"]}


class Gate:
    """A node that says it has been reached, and then waits until it is opened."""

    __name__ = "gate"

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.visits = 0
        self.stopped = 0

    async def __call__(self, state: Words) -> dict[str, Any]:
        self.visits += 1
        self.reached.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return {"words": ["gate"]}

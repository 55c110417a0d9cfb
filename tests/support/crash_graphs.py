"""Graphs to crash in. Every node notes its name in `executed` when it starts: a list outside Holdfast that no crash
takes back."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Annotated, Any

from langgraph.channels import DeltaChannel
from langgraph.graph import START, StateGraph
from langgraph.pregel import Pregel
from langgraph.types import interrupt
from typing_extensions import TypedDict

Graph = Pregel[Any, Any, Any, Any]


class Words(TypedDict):
    words: Annotated[list[str], operator.add]


def joined(state: Any, writes: Sequence[Any]) -> Any:
    return [*state, *(word for write in writes for word in write)]


class DeltaWords(TypedDict):
    words: Annotated[list[str], DeltaChannel(joined, snapshot_frequency=3)]


class Node:
    """A node that says its name, after asking its questions, if it has any."""

    def __init__(self, executed: list[str], name: str, questions: int) -> None:
        self._executed = executed
        self._name = name
        self._questions = questions

    async def __call__(self, state: Any) -> dict[str, Any]:
        self._executed.append(self._name)
        answers = [interrupt(f"{self._name} {number}?") for number in range(self._questions)]
        return {"words": [" ".join([self._name, *answers])]}


def add_nodes(builder: StateGraph[Any], executed: list[str], **questions: int) -> None:
    for name, count in questions.items():
        builder.add_node(name, Node(executed, name, count))


def line(executed: list[str], schema: type[Any] = Words, **questions: int) -> StateGraph[Any]:
    """Nodes in a row."""
    builder = StateGraph(schema)
    add_nodes(builder, executed, **questions)
    names = list(questions)
    for source, target in zip([START, *names], names, strict=False):
        builder.add_edge(source, target)
    return builder


def steps(executed: list[str]) -> Graph:
    return line(executed, a=0, b=0, c=0).compile()


def steps_with_breakpoints(executed: list[str]) -> Graph:
    return line(executed, a=0, b=0, c=0).compile(interrupt_before=["b"], interrupt_after=["b"])


def asks(executed: list[str]) -> Graph:
    return line(executed, a=0, ask=1, c=0).compile()


def asks_twice(executed: list[str]) -> Graph:
    return line(executed, a=0, ask=2, c=0).compile()


def delta_steps(executed: list[str]) -> Graph:
    return line(executed, DeltaWords, a=0, b=0, c=0, d=0, e=0).compile()


def delta_asks(executed: list[str]) -> Graph:
    return line(executed, DeltaWords, a=0, ask=2, c=0).compile()


def parallel(executed: list[str], *, left: int, right: int) -> Graph:
    """Two nodes at once between a first and a last one."""
    builder = StateGraph(Words)
    add_nodes(builder, executed, a=0, left=left, right=right, z=0)
    builder.add_edge(START, "a")
    builder.add_edge("a", "left")
    builder.add_edge("a", "right")
    builder.add_edge(["left", "right"], "z")
    return builder.compile()


def two_ask(executed: list[str]) -> Graph:
    return parallel(executed, left=1, right=1)


def two_ask_twice(executed: list[str]) -> Graph:
    return parallel(executed, left=2, right=1)


def nested(executed: list[str]) -> Graph:
    """A subgraph of two nodes in the middle, the second of which asks."""
    child = line(executed, inner_a=0, inner_ask=1, inner_c=0).compile()
    return around(executed, child)


def nested_twice(executed: list[str]) -> Graph:
    return around(executed, line(executed, inner_a=0, inner_ask=2).compile())


def nested_quiet(executed: list[str]) -> Graph:
    return around(executed, line(executed, inner_a=0, inner_b=0).compile())


def nested_breakpoint(executed: list[str]) -> Graph:
    return around(executed, line(executed, inner_a=0, inner_b=0).compile(interrupt_before=["inner_b"]))


def around(executed: list[str], child: Graph) -> Graph:
    builder = StateGraph(Words)
    add_nodes(builder, executed, a=0, c=0)
    builder.add_node("child", child)
    builder.add_edge(START, "a")
    builder.add_edge("a", "child")
    builder.add_edge("child", "c")
    return builder.compile()

"""What is run to see what running costs: five steps that do next to nothing, over a small conversation."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

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

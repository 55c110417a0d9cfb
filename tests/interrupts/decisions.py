"""Nodes that ask a human, one of them twice."""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any

from langgraph.types import interrupt
from typing_extensions import TypedDict


class Decisions(TypedDict, total=False):
    decisions: Annotated[list[Any], operator.add]


async def ask_twice(state: Decisions) -> Decisions:
    first = interrupt("first?")
    return {"decisions": [f"first {first}", f"second {interrupt('second?')}"]}


async def ask_once(state: Decisions) -> Decisions:
    answer = interrupt("beside?")
    if answer == "hang":
        await asyncio.Event().wait()
    return {"decisions": [f"beside {answer}"]}


def asker(name: str, failures: int = 0) -> Any:
    """A node that asks, and fails so often after the answer, as something that is away for a moment."""
    left = [failures]

    async def ask(state: Decisions) -> Decisions:
        answer = interrupt(f"{name}?")
        if left[0]:
            left[0] -= 1
            raise ConnectionError("away for a moment")
        return {"decisions": [f"{name} {answer}"]}

    ask.__name__ = name
    return ask


async def ask_about_last(state: Decisions) -> Decisions:
    """Ask about what was decided last, which is another question in each turn."""
    subject = state["decisions"][-1]
    return {"decisions": [f"{subject} {interrupt(f'{subject}?')}"]}

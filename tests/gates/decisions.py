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

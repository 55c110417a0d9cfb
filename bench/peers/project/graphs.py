"""The graphs that every server of the comparison runs, from this one file.

Nothing but LangGraph and LangChain's own base classes: it is loaded into each server's own environment, and into the
bare process that is the limit. The nodes do next to nothing, so that what is measured is the server around them.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langgraph.config import get_stream_writer
from langgraph.graph import START, StateGraph

TEXT = " about as much as a model says at a time"


class Sum(TypedDict, total=False):
    number: int
    result: int


async def double(state: Sum) -> Sum:
    return {"result": 2 * state["number"]}


one = StateGraph(Sum).add_sequence([("double", double)]).add_edge(START, "double").compile()


class Conversation(TypedDict, total=False):
    messages: Annotated[list[dict[str, str]], operator.add]
    step: int


def _step(number: int) -> Any:
    async def run(state: Conversation) -> Conversation:
        return {"messages": [{"role": "assistant", "content": f"This is what step {number} says."}], "step": number}

    return run


_five = StateGraph(Conversation).add_sequence([(f"s{number}", _step(number)) for number in range(1, 6)])
five = _five.add_edge(START, "s1").compile()


class Speech(TypedDict, total=False):
    events: int
    said: int


async def speak(state: Speech) -> Speech:
    say = get_stream_writer()
    for number in range(state["events"]):
        say({"number": number, "text": TEXT})
        # As a model's stream would, let others have their turn.
        await asyncio.sleep(0)
    return {"said": state["events"]}


speech = StateGraph(Speech).add_sequence([("speak", speak)]).add_edge(START, "speak").compile()


class Talker(BaseChatModel):
    """A model that says numbered pieces, as fast as it is listened to."""

    pieces: int

    @property
    def _llm_type(self) -> str:
        return "talker"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=""))])

    async def _astream(self, messages: list[BaseMessage], *_: Any, **__: Any) -> AsyncIterator[ChatGenerationChunk]:
        for number in range(self.pieces):
            yield ChatGenerationChunk(message=AIMessageChunk(content=f"{number}{TEXT}"))
            await asyncio.sleep(0)


async def talk(state: Speech) -> Speech:
    said = 0
    async for _ in Talker(pieces=state["events"]).astream("Go on."):
        said += 1
    return {"said": said}


talking = StateGraph(Speech).add_sequence([("talk", talk)]).add_edge(START, "talk").compile()

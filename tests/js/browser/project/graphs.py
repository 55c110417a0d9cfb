"""Graphs for a chat page.

A message that begins with "slowly" is answered one word at a time, as far as the test allows: how many words it may be
is in the thread's file in PACE_DIRECTORY. So a test can look at the page in the middle of an answer. A message that
begins with "fail" makes the graph fail.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import agenerate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolCallChunk
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.config import get_config
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import interrupt

PACE = Path(os.environ["PACE_DIRECTORY"])


def _allowed(thread_id: str) -> int:
    try:
        return int((PACE / thread_id).read_text())
    except FileNotFoundError:
        return 0


class Parrot(BaseChatModel):
    """Streams an answer that depends on nothing but the conversation."""

    @property
    def _llm_type(self) -> str:
        return "parrot"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        raise NotImplementedError("it is only called asynchronously")

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await agenerate_from_stream(self._astream(messages, stop, run_manager, **kwargs))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        if messages[-1].text.startswith("weather"):
            for piece in ('{"city": ', f'"{messages[-1].text.split()[-1]}"}}'):
                call = ToolCallChunk(name=None, args=piece, id=None, index=0)
                if piece.startswith("{"):
                    call |= {"name": "weather", "id": f"call-{uuid4()}"}
                yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=[call]))
            return
        asked = [message.text for message in messages if message.type in ("human", "tool")]
        slowly = asked[-1].startswith("slowly")
        message_id = f"answer-{uuid4()}"
        for number, word in enumerate(f"Answer {len(asked)} to: {asked[-1]}".split(" ")):
            thread_id = get_config()["configurable"]["thread_id"]
            while slowly and _allowed(thread_id) <= number:
                await asyncio.sleep(0.02)
            text = word if number == 0 else f" {word}"
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=text, id=message_id))
            if run_manager:
                await run_manager.on_llm_new_token(text, chunk=chunk)
            yield chunk


async def model(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    if state["messages"][-1].text.startswith("fail"):
        raise ValueError("the parrot is gone")
    return {"messages": [await Parrot().ainvoke(state["messages"], config)]}


chat = StateGraph(MessagesState).add_node(model).add_edge(START, "model").compile()


# --- a model that calls a tool ------------------------------------------------------------------------


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


agent = (
    StateGraph(MessagesState)
    .add_node(model)
    .add_node("tools", ToolNode([weather]))
    .add_edge(START, "model")
    .add_conditional_edges("model", tools_condition)
    .add_edge("tools", "model")
    .compile()
)


# --- a question to the human ------------------------------------------------------------------------


class Decision(MessagesState, total=False):
    answer: str
    first: str
    second: str


def question(state: Decision) -> dict[str, Any]:
    answer = interrupt({"question": f"Shall I {state['messages'][-1].text}?"})
    return {"answer": answer, "messages": [AIMessage(f"The answer was {answer}")]}


ask = StateGraph(Decision).add_node(question).add_edge(START, "question").compile()


def first(state: Decision) -> dict[str, Any]:
    return {"first": interrupt({"question": "First?"})}


def second(state: Decision) -> dict[str, Any]:
    return {"second": interrupt({"question": "Second?"})}


ask_both = StateGraph(Decision).add_node(first).add_node(second).add_edge(START, "first").add_edge(START, "second")


def insist(state: Decision) -> dict[str, Any]:
    # Both have the same id: it is the task's, not the question's.
    return {"first": interrupt({"question": "First?"}), "second": interrupt({"question": "Second?"})}


ask_twice = StateGraph(Decision).add_node(insist).add_edge(START, "insist").compile()


# --- a graph within a graph ---------------------------------------------------------------------------


def conclude(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage("That was the other graph.")]}


nested = (
    StateGraph(MessagesState)
    .add_node("researcher", chat)
    .add_node(conclude)
    .add_edge(START, "researcher")
    .add_edge("researcher", "conclude")
    .compile()
)

nested_ask = StateGraph(Decision).add_node("approval", ask).add_edge(START, "approval").compile()

"""A graph that asks a model, and one that hands its question to the first as a child run.

The model is a pretended one that says what it has used, as real ones do, so that this runs without a key.
"""

from typing import Any

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.messages.ai import UsageMetadata
from langgraph.graph import START, MessagesState, StateGraph
from typing_extensions import TypedDict

import holdfast


async def ask(state: MessagesState) -> dict[str, Any]:
    used = UsageMetadata(input_tokens=14, output_tokens=6, total_tokens=20)
    model = GenericFakeChatModel(messages=iter([AIMessage("High water is at six.", usage_metadata=used)]))
    return {"messages": [await model.ainvoke(state["messages"])]}


class Page(TypedDict, total=False):
    harbour: str
    line: str


async def look_up(state: Page) -> Page:
    question = {"messages": [("user", f"When is high water in {state['harbour']}?")]}
    [found] = await holdfast.gather(holdfast.spawn("tides", question, key="tides"))
    return {"line": found["messages"][-1]["content"]}


tides = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile()
almanac = StateGraph(Page).add_node("look_up", look_up).add_edge(START, "look_up").compile()

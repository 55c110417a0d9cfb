"""The graphs that the checks of authorisation run."""

import asyncio
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from typing_extensions import TypedDict


def reply(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    return {"messages": [AIMessage(f"hello {config['configurable']['langgraph_auth_user_id']}")]}


class Seconds(TypedDict, total=False):
    seconds: float


async def s1(state: Seconds) -> Seconds:
    await asyncio.sleep(state.get("seconds", 0))
    return {}


echo = StateGraph(MessagesState).add_node(reply).add_edge(START, "reply").compile()
slow = StateGraph(Seconds).add_node(s1).add_edge(START, "s1").compile()

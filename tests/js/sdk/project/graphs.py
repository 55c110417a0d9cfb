"""What the JavaScript SDK can show beyond the graphs of the conformance checks: a tool at work and what it says
meanwhile, and a subgraph that waits for an answer."""

from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.config import get_stream_writer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import interrupt
from typing_extensions import TypedDict


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    write = get_stream_writer()
    write({"name": "progress", "payload": {"city": city, "percent": 50}})
    write({"name": "progress", "payload": {"city": city, "percent": 100}})
    return f"Sunny in {city}"


def plan(state: MessagesState) -> dict[str, Any]:
    city = state["messages"][-1].text
    call = {"name": "weather", "args": {"city": city}, "id": f"call-{city}", "type": "tool_call"}
    return {"messages": [AIMessage("", tool_calls=[call])]}


def conclude(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"It is said: {state['messages'][-1].text}")]}


tools = (
    StateGraph(MessagesState)
    .add_node(plan)
    .add_node("tools", ToolNode([weather]))
    .add_node(conclude)
    .add_edge(START, "plan")
    .add_edge("plan", "tools")
    .add_edge("tools", "conclude")
    .compile()
)


class Question(TypedDict, total=False):
    question: str
    answer: str


def ask(state: Question) -> Question:
    return {"answer": interrupt({"question": state["question"]})}


child = StateGraph(Question).add_node(ask).add_edge(START, "ask").compile()
nested = StateGraph(Question).add_node("child", child).add_edge(START, "child").compile()

"""The graphs that the checks of the wire are about. None of them needs a network."""

import asyncio
import operator
from typing import Annotated, Any

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(state["messages"][-1].content)]}


echo = StateGraph(MessagesState).add_node(reply).add_edge(START, "reply").compile()


class Steps(TypedDict, total=False):
    seconds: float
    done: Annotated[list[str], operator.add]


def step(name: str) -> Any:
    async def run(state: Steps) -> Steps:
        await asyncio.sleep(state.get("seconds", 0))
        return {"done": [name]}

    return run


slow = (
    StateGraph(Steps).add_sequence([(name, step(name)) for name in ("s1", "s2", "s3")]).add_edge(START, "s1").compile()
)


class Question(TypedDict, total=False):
    question: str
    answer: str


def ask_human(state: Question) -> Question:
    return {"answer": interrupt({"question": state.get("question", "Shall I go on?")})}


ask = StateGraph(Question).add_node(ask_human).add_edge(START, "ask_human").compile()


class Answers(TypedDict, total=False):
    topic: str
    answers: Annotated[dict[str, Any], operator.or_]


def asker(name: str) -> Any:
    def run(state: Answers) -> Answers:
        return {"answers": {name: interrupt({"asked": name})}}

    return run


ask2 = (
    StateGraph(Answers)
    .add_node("left", asker("left"))
    .add_node("right", asker("right"))
    .add_edge(START, "left")
    .add_edge(START, "right")
    .compile()
)


def fail(state: Steps) -> Steps:
    raise ValueError("boom")


boom = StateGraph(Steps).add_node(fail).add_edge(START, "fail").compile()


async def call_model(state: MessagesState) -> dict[str, Any]:
    said = state["messages"][-1].text
    model = GenericFakeChatModel(messages=iter([AIMessage(f"You said: {said}. Tell me more about that.")]))
    return {"messages": [await model.ainvoke(state["messages"])]}


llm = StateGraph(MessagesState).add_node(call_model).add_edge(START, "call_model").compile()


class Inner(TypedDict, total=False):
    topic: str
    notes: Annotated[list[str], operator.add]


def look(state: Inner) -> Inner:
    return {"notes": [f"a fact about {state['topic']}"]}


class Outer(TypedDict, total=False):
    topic: str
    notes: Annotated[list[str], operator.add]
    text: str


def write(state: Outer) -> Outer:
    return {"text": "; ".join(state["notes"])}


class Found(TypedDict, total=False):
    notes: list[str]


child = StateGraph(Inner, output_schema=Found).add_node(look).add_edge(START, "look").compile()
sub = (
    StateGraph(Outer)
    .add_node("child", child)
    .add_node(write)
    .add_edge(START, "child")
    .add_edge("child", "write")
    .compile()
)

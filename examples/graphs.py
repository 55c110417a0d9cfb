"""Five small graphs to try Holdfast with. None of them needs a model or a key.

langgraph.json names the variables at the end of each section. They are compiled without a checkpointer:
the server brings its own, which is what lets a run survive a crash.
"""

import asyncio
import operator
from typing import Annotated, Any

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict

# --- echo: the smallest graph -----------------------------------------------------------------------
# Input: {"messages": [{"role": "user", "content": "hello"}]}


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(state["messages"][-1].content)]}


echo = StateGraph(MessagesState).add_node(reply).add_edge(START, "reply").add_edge("reply", END).compile()


# --- steps: something to interrupt ------------------------------------------------------------------
# Input: {"seconds": 2}. Stop the worker in the middle: another one goes on with the step that was cut short,
# and `done` names each step once.


class Steps(TypedDict, total=False):
    seconds: float
    done: Annotated[list[str], operator.add]  # each step's list is added to the ones before


def step(name: str) -> Any:
    async def run(state: Steps) -> Steps:
        await asyncio.sleep(state.get("seconds", 0.5))
        return {"done": [name]}

    return run


NAMES = ["s1", "s2", "s3", "s4", "s5"]

# add_sequence adds the nodes and an edge from each to the next. The graph is left uncompiled:
# the server compiles it.
steps = StateGraph(Steps).add_sequence([(name, step(name)) for name in NAMES]).add_edge(START, "s1")


# --- ask: a human in the loop -----------------------------------------------------------------------
# Input: {"question": "Deploy?"}. The run stops as `interrupted`, for a minute or a year; a second run on the
# same thread with {"command": {"resume": "yes"}} goes on from there.


class Question(TypedDict, total=False):
    question: str
    answer: str


def ask_human(state: Question) -> Question:
    # When the run is resumed this function starts again from its top, and interrupt() returns the answer.
    return {"answer": interrupt({"question": state.get("question", "Shall I go on?")})}


ask = StateGraph(Question).add_node(ask_human).add_edge(START, "ask_human").add_edge("ask_human", END).compile()


# --- chat: tokens as they come ----------------------------------------------------------------------
# Input as for echo, with stream_mode "messages-tuple". The model is a fake that streams word by word; put a
# real chat model in its place and nothing else changes.


async def call_model(state: MessagesState) -> dict[str, Any]:
    said = state["messages"][-1].text
    model = GenericFakeChatModel(messages=iter([AIMessage(f"You said: {said} Tell me more about that.")]))
    return {"messages": [await model.ainvoke(state["messages"])]}


chat = StateGraph(MessagesState).add_node(call_model).add_edge(START, "call_model").compile()


# --- parent: a graph within a graph -----------------------------------------------------------------
# Input: {"topic": "tides"}. Stream with stream_subgraphs to see the child's steps as well.


class Research(TypedDict, total=False):
    topic: str
    notes: list[str]


def search(state: Research) -> Research:
    return {"notes": [f"a fact about {state['topic']}"]}


def review(state: Research) -> Research:
    return {"notes": [*state["notes"], "a second look at it"]}


# A subgraph is a compiled graph used as a node. The keys that both states have go in and come out.
research = StateGraph(Research).add_sequence([search, review]).add_edge(START, "search").compile()


class Report(TypedDict, total=False):
    topic: str
    notes: list[str]
    text: str


def write(state: Report) -> Report:
    return {"text": "; ".join(state["notes"])}


parent = (
    StateGraph(Report)
    .add_node("research", research)
    .add_node(write)
    .add_edge(START, "research")
    .add_edge("research", "write")
    .compile()
)

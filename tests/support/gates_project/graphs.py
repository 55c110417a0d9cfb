"""Graphs that ask, in all the ways there are."""

import asyncio
import operator
import os
from typing import Annotated, Any

from langchain_core.runnables import RunnableConfig
from langgraph.config import get_stream_writer
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict

import holdfast


class Review(TypedDict, total=False):
    terms: dict[str, Any]
    # How long the work after the answer takes.
    seconds: float
    answer: Any
    done: Annotated[list[str], operator.add]


def review(state: Review) -> Review:
    return {"answer": holdfast.ask("Ship it?", **state.get("terms", {})), "done": ["review"]}


async def work(state: Review) -> Review:
    await asyncio.sleep(state.get("seconds", 0))
    return {"done": ["work"]}


quiet = StateGraph(Review).add_node(work).add_edge(START, "work").compile()
gate = StateGraph(Review).add_sequence([review, work]).add_edge(START, "review").compile()


class Answers(TypedDict, total=False):
    answers: Annotated[list[Any], operator.add]


def both(state: Answers) -> Answers:
    return {"answers": [interrupt("first?"), interrupt("second?")]}


twice = StateGraph(Answers).add_node(both).add_edge(START, "both").compile()


def asker(name: str) -> Any:
    def run(state: Answers) -> Answers:
        return {"answers": [(name, interrupt(name))]}

    return run


pair = (
    StateGraph(Answers)
    .add_node("left", asker("left"))
    .add_node("right", asker("right"))
    .add_edge(START, "left")
    .add_edge(START, "right")
    .compile()
)


def refuse(state: Review) -> Review:
    answer = interrupt({"question": "Which?"})
    if answer == "wrong":
        raise ValueError("not that one")
    return {"answer": answer}


picky = StateGraph(Review).add_node(refuse).add_edge(START, "refuse").compile()


# Graphs whose work after the answer goes as the answer says: the first answer fails, the second must be heard.


class Decision(TypedDict, total=False):
    decisions: Annotated[list[Any], operator.add]


# How often an answer fails before it succeeds. The second has more failures than a run has retries.
FAILURES = {"flaky": 2, "flakier": 4}
tries: dict[str, int] = {}


async def act(answer: Any) -> Any:
    """Do what the answer says, in all the ways that end a run."""
    how = answer.split(" ")[0] if isinstance(answer, str) else None
    if how == "raise":
        raise ValueError("not that one")
    if how == "hang":
        await asyncio.sleep(600)
    if how == "exit":
        os._exit(9)
    if how == "later":
        raise holdfast.Retry(after=600)
    if how in FAILURES:
        # As something that is away for a moment.
        tries[answer] = tries.get(answer, 0) + 1
        if tries[answer] <= FAILURES[how]:
            raise ConnectionError("away for a moment")
    return answer


async def decide(state: Decision) -> Decision:
    return {"decisions": [await act(interrupt("approve?"))]}


async def decide_twice(state: Decision) -> Decision:
    first = await act(interrupt("first?"))
    return {"decisions": [first, await act(interrupt("second?"))]}


def decider(name: str) -> Any:
    async def run(state: Decision) -> Decision:
        return {"decisions": [f"{name} {await act(interrupt(name))}"]}

    return run


async def fail_first(state: Decision) -> Decision:
    """Fails until its second execution."""
    tries["fail_first"] = tries.get("fail_first", 0) + 1
    if tries["fail_first"] % 2:
        raise ValueError("after the decision")
    return {}


decision = StateGraph(Decision).add_node(decide).add_edge(START, "decide").compile()
decisions = StateGraph(Decision).add_node(decide_twice).add_edge(START, "decide_twice").compile()
inner = StateGraph(Decision).add_sequence([decide]).add_edge(START, "decide").compile()
nested_decision = StateGraph(Decision).add_node("inner", inner).add_edge(START, "inner").compile()
inner_steps = StateGraph(Decision).add_sequence([decide, fail_first]).add_edge(START, "decide").compile()
nested_steps = StateGraph(Decision).add_node("inner", inner_steps).add_edge(START, "inner").compile()
decision_pair = (
    StateGraph(Decision)
    .add_node("left", decider("left"))
    .add_node("right", decider("right"))
    .add_edge(START, "left")
    .add_edge(START, "right")
    .compile()
)


async def decide_too_large(state: Decision) -> Decision:
    answer = await act(interrupt("approve?"))
    if answer == "too large":
        return {"decisions": ["x" * 3_000_000]}
    return {"decisions": [answer]}


# Graphs that use an answer where LangGraph does not look for questions, and stop after that.


async def stop_once(answer: str) -> None:
    """Do what the answer says after its comma, the first time, once a custom event has told of it."""
    if answer not in tries:
        tries[answer] = 1
        get_stream_writer()("used")
        await act(answer.partition(", ")[2])


@task
async def decide_in_task() -> Any:
    return interrupt("approve?")


async def call_task(state: Decision) -> Decision:
    answer = await decide_in_task()
    await stop_once(answer)
    return {"decisions": [answer]}


async def stop_after_decision(state: Decision) -> Decision:
    await stop_once(state["decisions"][-1])
    return {}


steps = StateGraph(Decision).add_sequence([decide, stop_after_decision]).add_edge(START, "decide").compile()
BY_NAME = {"steps": steps}


async def call_by_name(state: Decision) -> Any:
    return await BY_NAME["steps"].ainvoke(state)


@entrypoint()
async def entry(state: Decision) -> Decision:
    return await call_task(state)


task_in_node = StateGraph(Decision).add_node(call_task).add_edge(START, "call_task").compile()
called_by_name = StateGraph(Decision).add_node(call_by_name).add_edge(START, "call_by_name").compile()

too_large = StateGraph(Decision).add_node(decide_too_large).add_edge(START, "decide_too_large").compile()


def factory(config: RunnableConfig) -> Any:
    """A factory that fails for some configs."""
    if config["configurable"].get("broken"):
        raise ValueError("cannot be built")
    return decision


# Graphs of which a part is away until a run of theirs is a dead letter, or until a second one is.

FAILURES["flakiest"] = 8


async def away(state: Decision) -> Decision:
    """Fails as the thread's first decision says."""
    await act(state["decisions"][0])
    return {}


async def note(state: Decision) -> Decision:
    return {"decisions": ["noted"]}


async def factory_away(config: RunnableConfig) -> Any:
    """A factory that fails as some configs say."""
    await act(config["configurable"].get("away"))
    return decisions


decisions_beside = (
    StateGraph(Decision)
    .add_node(decide_twice)
    .add_node(away)
    .add_edge(START, "decide_twice")
    .add_edge(START, "away")
    .compile()
)
decisions_in_steps = (
    StateGraph(Decision)
    .add_node("first", decider("first?"))
    .add_node("second", decider("second?"))
    .add_node(away)
    .add_edge(START, "first")
    .add_edge("first", "second")
    .add_edge("first", "away")
    .compile()
)
decision_or_note = StateGraph(Decision).add_node(decide).add_node(note).add_edge(START, "decide").compile()

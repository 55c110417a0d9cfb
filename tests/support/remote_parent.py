"""A program with graphs of its own, in which a graph on a server has a part. It knows nothing of Holdfast.

Started with the server's URL. Reads the name of a scenario per line, and whether to use the asynchronous methods;
answers each with a line of JSON: what was seen, or the exception that was raised.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypedDict
from uuid import uuid4

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel.remote import RemoteGraph
from langgraph.types import Command, Interrupt
from langgraph.types import interrupt as interrupt_here

URL = sys.argv[1]
OSLO = {"messages": [{"role": "user", "content": "Oslo"}]}


class Question(TypedDict, total=False):
    question: str
    answer: str
    verdict: str


def prepare(state: Question) -> Question:
    return {"question": f"{state['question']}?"}


def conclude(state: Question) -> Question:
    return {"verdict": f"the answer was {state['answer']}"}


def remote(name: str) -> RemoteGraph:
    return RemoteGraph(name, url=URL)


def conversation(name: str) -> Any:
    """A graph of this process whose one step is a graph of the server."""
    return StateGraph(MessagesState).add_node("remote", remote(name)).add_edge(START, "remote").compile()


def interview(name: str) -> Any:
    """The same between two steps of its own, with a memory."""
    builder = StateGraph(Question).add_node(prepare).add_node("remote", remote(name)).add_node(conclude)
    builder.add_edge(START, "prepare").add_edge("prepare", "remote").add_edge("remote", "conclude")
    return builder.compile(checkpointer=InMemorySaver())


def new_thread() -> RunnableConfig:
    return {"configurable": {"thread_id": str(uuid4())}}


class Calls:
    """The blocking methods of a graph, or the asynchronous ones, under the same names."""

    def __init__(self, graph: Any, awaited: bool) -> None:
        self._graph = graph
        self._awaited = awaited

    async def __call__(self, method: str, *arguments: Any, **named: Any) -> Any:
        if self._awaited:
            return await getattr(self._graph, f"a{method}")(*arguments, **named)
        return getattr(self._graph, method)(*arguments, **named)

    async def all(self, method: str, *arguments: Any, **named: Any) -> list[Any]:
        if self._awaited:
            return [item async for item in getattr(self._graph, f"a{method}")(*arguments, **named)]
        return list(getattr(self._graph, method)(*arguments, **named))


# --- scenarios -------------------------------------------------------------------------------------------


async def invoke(awaited: bool) -> Any:
    values = await Calls(conversation("echo"), awaited)("invoke", OSLO)
    return [message.content for message in values["messages"]]


async def stream(awaited: bool) -> Any:
    graph = Calls(conversation("tour"), awaited)
    modes = ["values", "updates", "custom", "messages"]
    return await graph.all("stream", OSLO, stream_mode=modes, subgraphs=True)


async def interrupt(awaited: bool) -> Any:
    graph, thread = Calls(interview("ask"), awaited), new_thread()
    asked = await graph("invoke", {"question": "Deploy"}, thread)
    [question] = asked["__interrupt__"]
    paused = await graph("get_state", thread)
    answered = await graph("invoke", Command(resume={question.id: "yes"}), thread)
    again = await graph("invoke", {"question": "Sure"}, thread)
    return {
        "value": question.value,
        "next": paused.next,
        "answered": answered,
        "again": [one.value for one in again["__interrupt__"]],
    }


async def interrupt_inside(awaited: bool) -> Any:
    graph, thread = Calls(interview("deep_ask"), awaited), new_thread()
    [question] = (await graph("invoke", {"question": "Deploy"}, thread))["__interrupt__"]
    return await graph("invoke", Command(resume={question.id: "yes"}), thread)


async def interrupt_elsewhere(awaited: bool) -> Any:
    """The caller is resumed from a question of its own, with the remote graph's turn still to come."""

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("user", interrupt_here("what?"))]}

    builder = StateGraph(MessagesState).add_node(ask).add_node("remote", remote("echo"))
    builder.add_edge(START, "ask").add_edge("ask", "remote")
    graph, thread = Calls(builder.compile(checkpointer=InMemorySaver()), awaited), new_thread()
    for answer in ("one", "two"):
        [question] = (await graph("invoke", {"messages": []}, thread))["__interrupt__"]
        values = await graph("invoke", Command(resume={question.id: answer}), thread)
    return [message.content for message in values["messages"]]


async def directly(awaited: bool) -> Any:
    """The graph on the server, without one around it."""
    graph, thread = Calls(remote("ask"), awaited), new_thread()
    asked = await graph("invoke", {"question": "Deploy?"}, thread)
    answered = await graph("invoke", Command(resume="yes"), thread)
    typed = await graph("invoke", {"question": "Deploy?"}, thread, version="v2")
    moved = await graph("invoke", Command(update={"question": "Now?"}, goto="ask_human"), thread)
    return {
        "asked": [one["value"] for one in asked["__interrupt__"]],
        "answered": answered,
        "typed": [one.value for one in typed.interrupts],
        "moved": [one["value"] for one in moved["__interrupt__"]],
    }


async def breakpoints(awaited: bool) -> Any:
    graph, thread = Calls(remote("steps"), awaited), new_thread()
    paused = await graph("invoke", {}, thread, interrupt_before=["s3"])
    state = await graph("get_state", thread)
    return {"paused": paused, "next": state.next, "resumed": await graph("invoke", None, thread)}


async def parts(awaited: bool) -> Any:
    graph = Calls(remote("tour"), awaited)
    return {
        "default": [list(update) for update in await graph.all("stream", OSLO)],
        "typed": await graph.all("stream", OSLO, stream_mode=["values", "custom"], subgraphs=True, version="v2"),
    }


async def state(awaited: bool) -> Any:
    graph, thread = Calls(remote("steps"), awaited), new_thread()
    await graph("invoke", {}, thread)
    history = await graph.all("get_state_history", thread)
    middle = history[3]
    earlier = await graph.all("get_state_history", thread, before=middle.config, limit=2)
    then = await graph("get_state", middle.config)
    updated = await graph("update_state", middle.config, {"done": ["edited"]}, as_node="s3")
    head = await graph("get_state", thread)
    inputs = await graph.all("get_state_history", thread, filter={"source": "input"})
    return {
        "history": [one.metadata["step"] for one in history],
        "earlier": [one.metadata["step"] for one in earlier],
        "then": [then.next, then.values == middle.values, then.config == middle.config],
        "updated": updated["configurable"]["checkpoint_id"] == head.config["configurable"]["checkpoint_id"],
        "head": [head.next, head.values, head.metadata["source"]],
        "inputs": [one.metadata["step"] for one in inputs],
    }


async def state_inside(awaited: bool) -> Any:
    graph, thread = Calls(remote("deep_ask"), awaited), new_thread()
    await graph("invoke", {"question": "Deploy?"}, thread)
    closed, opened = await graph("get_state", thread), await graph("get_state", thread, subgraphs=True)
    [task] = opened.tasks
    return {
        "interrupts": [one.value for one in opened.interrupts],
        "inside": [task.state.next, task.state.values],
        "closed": closed.tasks[0].state["configurable"]["checkpoint_ns"].split(":")[0],
    }


async def drawing(awaited: bool) -> Any:
    graph = Calls(remote("tour"), awaited)
    closed, opened = await graph("get_graph"), await graph("get_graph", xray=True)
    around = await Calls(conversation("tour"), awaited)("get_graph", xray=True)
    return {"closed": list(closed.nodes), "opened": list(opened.nodes), "around": list(around.nodes)}


async def configured(awaited: bool) -> Any:
    graph = remote("context").with_config({"tags": ["a"], "metadata": {"origin": "parent"}})
    merged = graph.with_config(configurable={"model": "small"})
    return [
        await Calls(graph, awaited)("invoke", {}, context={"model": "large"}),
        await Calls(merged, awaited)("invoke", {}, {"tags": ["b"], "metadata": {"team": "x"}}),
    ]


async def failure(awaited: bool) -> Any:
    return await Calls(conversation("boom"), awaited)("invoke", OSLO)


async def failure_directly(awaited: bool) -> Any:
    return await Calls(remote("boom"), awaited).all("stream", OSLO)


async def unknown(awaited: bool) -> Any:
    return await Calls(remote("nobody"), awaited)("invoke", OSLO)


async def events(awaited: bool) -> Any:
    """Version three of the events, which is the thread-centric protocol."""
    graph = remote("tour")
    if awaited:
        async with await graph.astream_events(OSLO, new_thread(), version="v3") as run:
            updates = [update async for update in run.extensions["updates"]]
            output = await run.output()
    else:
        with graph.stream_events(OSLO, new_thread(), version="v3") as blocking:
            updates = list(blocking.extensions["updates"])
            output = blocking.output
    return {"updates": len(updates), "messages": [message["type"] for message in output["messages"]]}


async def events_with_an_interrupt(awaited: bool) -> Any:
    graph, thread = remote("ask"), new_thread()
    if awaited:
        async with await graph.astream_events({"question": "Deploy?"}, thread, version="v3") as run:
            while not await run.interrupted():
                await asyncio.sleep(0.01)
            questions = [one["value"] for one in await run.interrupts()]
        async with await graph.astream_events(Command(resume="yes"), thread, version="v3") as run:
            return {"questions": questions, "output": await run.output()}
    with graph.stream_events({"question": "Deploy?"}, thread, version="v3") as blocking:
        while not blocking.interrupted:
            time.sleep(0.01)
        questions = [one["value"] for one in blocking.interrupts]
    with graph.stream_events(Command(resume="yes"), thread, version="v3") as blocking:
        return {"questions": questions, "output": blocking.output}


# --- the program -----------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """What JSON has no word for."""
    if isinstance(value, Interrupt):
        return {"interrupt": value.value}
    if hasattr(value, "model_dump"):
        return value.model_dump()
    return str(value)


async def play(scenario: Callable[[bool], Any], awaited: bool) -> dict[str, Any]:
    try:
        return {"seen": await scenario(awaited)}
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error)}


def main() -> None:
    for line in sys.stdin:
        name, awaited = json.loads(line)
        # Each in a loop of its own, as a script would: nothing of one scenario is left for the next.
        print(json.dumps(asyncio.run(play(globals()[name], awaited)), default=plain), flush=True)


if __name__ == "__main__":
    main()

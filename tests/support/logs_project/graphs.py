"""Graphs that log, in every way that graph code may, and graphs that fail over what they were given."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import structlog
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, StateGraph
from langgraph.types import Command
from typing_extensions import TypedDict

# Set up at import, as applications do, and not wanted here.
structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
logging.basicConfig(format="BASIC %(message)s")

TOGETHER = 4
standard = logging.getLogger("project.graphs")
structured = structlog.get_logger("project.graphs")
_threads = threading.Barrier(TOGETHER)
_tasks = asyncio.Barrier(TOGETHER)


class State(TypedDict, total=False):
    text: str


def own(config: RunnableConfig) -> str:
    return str(config["configurable"]["run_id"])


async def in_tasks(state: State, config: RunnableConfig) -> dict[str, Any]:
    standard.info("async before", extra={"own": own(config)})
    await _tasks.wait()
    structured.info("async after", own=own(config))
    # A library that means well: it clears what it did not bind.
    structlog.contextvars.clear_contextvars()
    await asyncio.gather(
        *(asyncio.to_thread(standard.warning, "async thread", extra={"own": own(config)}) for _ in "12")
    )
    return {}


def in_threads(state: State, config: RunnableConfig) -> dict[str, Any]:
    structured.info("plain before", own=own(config))
    _threads.wait(60)
    standard.info("plain after", extra={"own": own(config)})
    try:
        raise LookupError("handled")
    except LookupError:
        standard.exception("plain failure", extra={"own": own(config)})
    return {}


def deeper(state: State, config: RunnableConfig) -> dict[str, Any]:
    standard.info("subgraph", extra={"own": own(config)})
    return {}


def _graph(*nodes: Any, schema: Any = State) -> Any:
    builder = StateGraph(schema)
    previous = START
    for number, node in enumerate(nodes):
        name = getattr(node, "__name__", f"node{number}")
        builder.add_node(name, node)
        builder.add_edge(previous, name)
        previous = name
    return builder.compile()


def fail(state: State) -> dict[str, Any]:
    raise ValueError(f"nothing can be made of {state['text']}")


async def break_off(state: State) -> dict[str, Any]:
    raise ConnectionError(f"gone while sending {state['text']}")


async def unstorable(state: Any) -> dict[str, Any]:
    return {"o\0dd": state["text"]}


async def hold(state: State, config: RunnableConfig) -> Command[Any]:
    standard.info("held", extra={"own": own(config)})
    if state["text"] == "go on":
        return Command(update={"text": "done"})
    await asyncio.Event().wait()
    raise AssertionError


async def block(state: State) -> dict[str, Any]:
    time.sleep(3.0)
    return {}


talking = _graph(in_tasks, in_threads, _graph(deeper))
failing = _graph(fail)
flaky = _graph(break_off)
# No database has room for a name like this.
Odd: Any = TypedDict("Odd", {"text": str, "o\0dd": str})
refused = _graph(unstorable, schema=Odd)
held = _graph(hold)
blocking = _graph(block)

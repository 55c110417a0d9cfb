"""What graph code logs has the run's ids on it; and a node that blocks the event loop is named in the log.

    holdfast dev --config examples/logs.json
    holdfast run hasty --input '{"seconds": 2}'     # loop.blocked names the line, the run, and what to do
    holdfast run steady --input '{"seconds": 2}'    # the same work in a thread: nothing to tell

With HOLDFAST_LOG_FORMAT=json the lines are for programs: every one of a run has its `run_id`.
"""

import logging
import time
from typing import Any

import structlog
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

standard = logging.getLogger(__name__)
structured = structlog.get_logger(__name__)


class State(TypedDict, total=False):
    seconds: float
    report: str


def fetch(seconds: float) -> str:
    """Stands for a client that is not async: a database driver, `requests`, a heavy computation."""
    time.sleep(seconds)
    return "fetched"


async def hasty_node(state: State) -> State:
    standard.info("fetching, and blocking everybody")
    return {"report": fetch(state.get("seconds", 1.5))}


def steady_node(state: State) -> State:
    structured.info("fetching in a thread", seconds=state.get("seconds", 1.5))
    return {"report": fetch(state.get("seconds", 1.5))}


def graph_of(node: Any) -> Any:
    return StateGraph(State).add_node("fetch", node).add_edge(START, "fetch").compile()


hasty = graph_of(hasty_node)
steady = graph_of(steady_node)

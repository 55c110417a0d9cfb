"""A run that hands its work to others: one child for each topic, all at once, on whatever workers are free.

    holdfast dev --config examples/children.json
    holdfast run survey --input '{"topics": ["tides", "dunes", "reefs"]}'
    holdfast runs children RUN_ID

Kill workers while it runs (`{"seconds": 5}` gives you time): every topic is read once, and the survey has all of them.
"""

import asyncio
from typing import Any

from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

import holdfast

# --- reader: the child ------------------------------------------------------------------------------
# Input: {"topic": "tides"}


class Reading(TypedDict, total=False):
    topic: str
    seconds: float
    summary: str


async def read(state: Reading) -> Reading:
    await asyncio.sleep(state.get("seconds", 0.2))
    if not state["topic"]:
        raise ValueError("there is nothing to read about nothing")
    return {"summary": f"what is known about {state['topic']}"}


reader = StateGraph(Reading).add_node(read).add_edge(START, "read").compile()


# --- survey: the parent -----------------------------------------------------------------------------
# Input: {"topics": ["tides", "dunes"]}


class Survey(TypedDict, total=False):
    topics: list[str]
    seconds: float
    found: dict[str, str]
    missing: list[str]


async def hand_out(state: Survey) -> Survey:
    """Runs again from here when the children have ended; what it spawns it then finds by the keys."""
    topics = state["topics"]
    answers: list[Any] = await holdfast.gather(
        *[
            holdfast.spawn("reader", {"topic": topic, "seconds": state.get("seconds", 0.2)}, key=f"topic {topic}")
            for topic in topics
        ],
        return_exceptions=True,
    )
    pairs = list(zip(topics, answers, strict=True))
    return {
        "found": {topic: answer["summary"] for topic, answer in pairs if not isinstance(answer, holdfast.ChildFailed)},
        "missing": [topic for topic, answer in pairs if isinstance(answer, holdfast.ChildFailed)],
    }


survey = StateGraph(Survey).add_node(hand_out).add_edge(START, "hand_out").compile()

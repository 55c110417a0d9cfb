"""What is asked of every server, and what the right answer is."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from bench.peers.window import WrongAnswer

EVENTS = 200
"""Events of one streamed run."""

CONVERSATION = {"messages": [{"role": "user", "content": "Say something about each step."}]}


class Scenario(StrEnum):
    STATELESS = "stateless"
    THREAD = "thread"
    FIVE = "five"
    DRAIN = "drain"
    FIRST_EVENT = "first-event"
    TOKENS = "tokens"
    MESSAGES = "messages"

    @property
    def label(self) -> str:
        return LABELS[self]

    @property
    def streams(self) -> bool:
        return self in (Scenario.TOKENS, Scenario.MESSAGES)


LABELS = {
    Scenario.STATELESS: "stateless wait",
    Scenario.THREAD: "thread + wait",
    Scenario.FIVE: "five-step thread + wait",
    Scenario.DRAIN: "enqueue and drain",
    Scenario.FIRST_EVENT: "first event",
    Scenario.TOKENS: "token events (custom)",
    Scenario.MESSAGES: "token events (messages)",
}

STREAMS = {
    Scenario.TOKENS: ("speech", "custom", "custom"),
    Scenario.MESSAGES: ("talking", "messages-tuple", "messages"),
}
"""The graph, the mode it is streamed in, and what its events are called on the wire."""


def request(scenario: Scenario, number: int) -> dict[str, Any]:
    """The body of one run. The number makes its answer one that no other run has."""
    match scenario:
        case Scenario.FIVE:
            return {"assistant_id": "five", "input": CONVERSATION}
        case Scenario.TOKENS | Scenario.MESSAGES:
            graph, mode, _ = STREAMS[scenario]
            return {"assistant_id": graph, "input": {"events": EVENTS}, "stream_mode": [mode]}
        case Scenario.FIRST_EVENT:
            return {"assistant_id": "one", "input": {"number": number}, "stream_mode": ["values"]}
        case _:
            return {"assistant_id": "one", "input": {"number": number}}


def check_values(scenario: Scenario, number: int, values: Any) -> None:
    """Raises WrongAnswer unless these are the final values of that run."""
    if scenario is Scenario.FIVE:
        said = [f"This is what step {step} says." for step in range(1, 6)]
        found = [message.get("content") for message in values.get("messages", ())] if isinstance(values, dict) else []
        right = found == [CONVERSATION["messages"][0]["content"], *said] and values.get("step") == 5
    else:
        right = values == {"number": number, "result": 2 * number}
    if not right:
        raise WrongAnswer(f"{scenario} {number}: {str(values)[:300]}")


def check_events(scenario: Scenario, contents: list[Any]) -> None:
    """Raises WrongAnswer unless every event of a stream is there once and in order."""
    if scenario is Scenario.TOKENS:
        numbers = [content.get("number") for content in contents]
    else:
        # A model's stream ends with an empty piece that says it was the last.
        pieces = [message["content"] for message, *_ in contents if message["content"]]
        numbers = [int(piece.partition(" ")[0]) for piece in pieces]
    if numbers != list(range(EVENTS)):
        raise WrongAnswer(f"{scenario}: {len(numbers)} events: {numbers[:5]}…{numbers[-5:]}")

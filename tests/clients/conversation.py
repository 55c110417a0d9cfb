"""What a client sees of a conversation with an agent."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from langgraph_sdk.client import LangGraphClient


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def shown(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Type and text of each message; the names of the tools for a message that only calls tools."""
    return [
        (one["type"], one["content"] or ",".join(call["name"] for call in one.get("tool_calls", ())))
        for one in messages
    ]


class Turn:
    """One run, streamed as chat pages stream it: whole states, and the tokens of messages."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.tokens: dict[str, str] = defaultdict(str)
        self.namespaces: set[str] = set()
        self.event_ids: list[str] = []

    @property
    def interrupts(self) -> list[Any]:
        return [interrupt["value"] for interrupt in self.values.get("__interrupt__", ())]


async def turn(client: LangGraphClient, thread_id: str, graph: str, **run: Any) -> Turn:
    seen = Turn()
    async for part in client.runs.stream(
        thread_id, graph, stream_mode=["values", "messages-tuple"], stream_subgraphs=True, **run
    ):
        mode, _, namespace = part.event.partition("|")
        assert mode != "error", part.data
        if part.id is not None:
            seen.event_ids.append(part.id)
        if namespace:
            seen.namespaces.add(namespace.split(":")[0])
        if mode == "values" and not namespace:
            seen.values = part.data
        elif mode == "messages" and part.data[0]["type"] == "AIMessageChunk":
            seen.tokens[part.data[0]["id"]] += part.data[0]["content"]
    assert len(seen.event_ids) == len(set(seen.event_ids)), "an event came twice"
    return seen

"""The `messages` and `messages-tuple` stream modes, from LangGraph's (chunk, metadata) pairs."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage, BaseMessageChunk

from holdfast.streams.serialize import to_json


class MessageModes:
    """`messages-tuple` passes each pair on. `messages` announces a message once, then sends it as far as it has
    come."""

    def __init__(self, requested: frozenset[str]) -> None:
        self._tuples = "messages-tuple" in requested
        self._partials = "messages" in requested
        self._seen: dict[str, BaseMessage] = {}

    def events(self, chunk: tuple[BaseMessage, dict[str, Any]]) -> list[tuple[str, bytes]]:
        """The events one pair becomes, as (kind, data)."""
        message, metadata = chunk
        events = []
        if self._tuples:
            events.append(("messages", to_json([message, metadata])))
        if self._partials and message.id is not None:
            known = self._seen.get(message.id)
            if known is None:
                events.append(("messages/metadata", to_json({message.id: {"metadata": metadata}})))
            if isinstance(message, BaseMessageChunk):
                whole: BaseMessage = known + message if isinstance(known, BaseMessageChunk) else message
                self._seen[message.id] = whole
                events.append(("messages/partial", to_json([whole])))
            else:
                self._seen[message.id] = message
                events.append(("messages/complete", to_json([message])))
        return events

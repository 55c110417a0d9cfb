"""The `messages` and `messages-tuple` stream modes, from LangGraph's (chunk, metadata) pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.messages import BaseMessage, BaseMessageChunk


class MessageModes:
    """What clients of v1 asked for. `messages-tuple` passes each pair on. `messages` announces a message once, then
    sends it as far as it has come. All other modes pass as they are."""

    def __init__(self, requested: frozenset[str]) -> None:
        self._requested = requested
        self._seen: dict[str, BaseMessage] = {}

    def events(self, namespace: str, mode: str, chunk: Any) -> Iterator[tuple[str, str, Any]]:
        """The events one item of the graph's stream becomes, as (namespace, kind, data)."""
        if mode == "messages":
            yield from self._message(namespace, chunk)
        elif mode in self._requested:
            yield namespace, mode, chunk

    def finish(self) -> Iterator[tuple[str, str, Any]]:
        """Nothing is held back."""
        return iter(())

    def _message(self, namespace: str, chunk: tuple[BaseMessage, dict[str, Any]]) -> Iterator[tuple[str, str, Any]]:
        message, metadata = chunk
        if "messages-tuple" in self._requested:
            yield namespace, "messages", [message, metadata]
        if "messages" in self._requested and message.id is not None:
            known = self._seen.get(message.id)
            if known is None:
                yield "", "messages/metadata", {message.id: {"metadata": metadata}}
            if isinstance(message, BaseMessageChunk):
                whole: BaseMessage = known + message if isinstance(known, BaseMessageChunk) else message
                self._seen[message.id] = whole
                yield "", "messages/partial", [whole]
            else:
                self._seen[message.id] = message
                yield "", "messages/complete", [message]

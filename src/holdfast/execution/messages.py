"""The stream modes of the v1 API that differ from LangGraph's: `messages`, `messages-tuple` and `debug`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from langchain_core.messages import BaseMessage, BaseMessageChunk, message_chunk_to_message

from holdfast.engine.thread_state import checkpoint_of


class MessageModes:
    """Turns a graph's stream into the events of the requested modes. `messages-tuple` passes each pair on. `messages`
    sends a message's metadata once, and then the message so far with each chunk. Other modes pass unchanged, except
    that `debug` gets checkpoints as clients know them."""

    def __init__(self, requested: frozenset[str]) -> None:
        self._requested = requested
        self._tuples_only = "messages-tuple" in requested and "messages" not in requested
        self._seen: dict[str, BaseMessage] = {}

    def events(self, namespace: str, mode: str, chunk: Any) -> Iterable[tuple[str, str, Any]]:
        """The events of one item of the graph's stream, as (namespace, kind, data)."""
        if mode == "messages":
            if self._tuples_only:
                return ((namespace, "messages", chunk),)
            return self._message(namespace, chunk)
        if mode in self._requested:
            return ((namespace, mode, _with_checkpoints(chunk) if mode == "debug" else chunk),)
        return ()

    def finish(self) -> Iterator[tuple[str, str, Any]]:
        """Events at the end of the stream: none."""
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
                whole: BaseMessageChunk = known + message if isinstance(known, BaseMessageChunk) else message
                self._seen[message.id] = whole
                # A message and not a chunk, because it is the whole message so far.
                yield "", "messages/partial", [message_chunk_to_message(whole)]
            else:
                self._seen[message.id] = message
                yield "", "messages/complete", [message]


def _with_checkpoints(debug: dict[str, Any]) -> dict[str, Any]:
    """A `debug` item with its checkpoint, and that one's parent, in the form that the rest of the API uses."""
    if debug["type"] != "checkpoint":
        return debug
    payload = debug["payload"]
    places = {
        "checkpoint": checkpoint_of(payload["config"]),
        "parent_checkpoint": checkpoint_of(payload.get("parent_config")),
    }
    return {**debug, "payload": {**payload, **places}}

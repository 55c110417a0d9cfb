"""The stream modes of v1 that are not LangGraph's own as they stand: `messages`, `messages-tuple` and `debug`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from langchain_core.messages import BaseMessage, BaseMessageChunk, message_chunk_to_message

from holdfast.engine.thread_state import checkpoint_of


class MessageModes:
    """What clients of v1 asked for. `messages-tuple` passes each pair on. `messages` announces a message once, then
    sends it as far as it has come. All other modes pass as they are."""

    def __init__(self, requested: frozenset[str]) -> None:
        self._requested = requested
        self._tuples_only = "messages-tuple" in requested and "messages" not in requested
        self._seen: dict[str, BaseMessage] = {}

    def events(self, namespace: str, mode: str, chunk: Any) -> Iterable[tuple[str, str, Any]]:
        """The events one item of the graph's stream becomes, as (namespace, kind, data)."""
        if mode == "messages":
            if self._tuples_only:
                return ((namespace, "messages", chunk),)
            return self._message(namespace, chunk)
        if mode in self._requested:
            return ((namespace, mode, _with_checkpoints(chunk) if mode == "debug" else chunk),)
        return ()

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
                whole: BaseMessageChunk = known + message if isinstance(known, BaseMessageChunk) else message
                self._seen[message.id] = whole
                # As a message: chunks are for those who put them together themselves.
                yield "", "messages/partial", [message_chunk_to_message(whole)]
            else:
                self._seen[message.id] = message
                yield "", "messages/complete", [message]


def _with_checkpoints(debug: dict[str, Any]) -> dict[str, Any]:
    """What `debug` says of a checkpoint, with its place and its parent's as clients name them elsewhere."""
    if debug["type"] != "checkpoint":
        return debug
    payload = debug["payload"]
    places = {
        "checkpoint": checkpoint_of(payload["config"]),
        "parent_checkpoint": checkpoint_of(payload.get("parent_config")),
    }
    return {**debug, "payload": {**payload, **places}}

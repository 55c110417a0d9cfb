"""Converts events of the log to the envelopes of the thread-centric protocol: one envelope for each row, with its
`seq`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import orjson

from holdfast.streams.log import LogEvent

CHANNELS = frozenset({"values", "updates", "messages", "tools", "lifecycle", "input", "checkpoints", "tasks", "custom"})

# The method of each kind of event. Other kinds are not part of this protocol.
_METHODS = {
    "metadata": "lifecycle",
    "lifecycle": "lifecycle",
    "end": "lifecycle",
    "values": "values",
    "updates": "updates",
    "custom": "custom",
    "tasks": "tasks",
    "checkpoint": "checkpoints",
    "checkpoints": "checkpoints",
    "message": "messages",
    "tool": "tools",
    "input.requested": "input.requested",
}
_TERMINAL = {
    "success": "completed",
    "error": "failed",
    "timeout": "failed",
    "interrupted": "interrupted",
    "rolled_back": "interrupted",
}
# The fields of a message that clients read. LangChain's other fields are not sent.
_MESSAGE_FIELDS = (
    "type",
    "content",
    "id",
    "name",
    "tool_calls",
    "response_metadata",
    "tool_call_id",
    "status",
    "artifact",
    "usage_metadata",
)


@dataclass(frozen=True)
class EnvelopeFilter:
    """The filter of a subscription: channels, and namespaces in the tree of graphs."""

    channels: frozenset[str]
    namespaces: tuple[tuple[str, ...], ...] = ()
    depth: int | None = None

    def matches(self, method: str, namespace: Sequence[str], data: Any) -> bool:
        channel = "input" if method == "input.requested" else method
        if channel not in self.channels:
            named = f"custom:{data.get('name')}" if method == "custom" and isinstance(data, dict) else ""
            if named not in self.channels:
                return False
        return not self.namespaces or any(self._is_within(prefix, namespace) for prefix in self.namespaces)

    def _is_within(self, prefix: Sequence[str], namespace: Sequence[str]) -> bool:
        if len(namespace) < len(prefix) or (self.depth is not None and len(namespace) - len(prefix) > self.depth):
            return False
        return all(
            found == wanted or (":" not in wanted and found.startswith(f"{wanted}:"))
            for wanted, found in zip(prefix, namespace, strict=False)
        )


def envelope(thread_id: UUID, event: LogEvent) -> dict[str, Any] | None:
    """The envelope of an event; None if its kind is not part of the protocol. The same event gives the same
    envelope."""
    method = _METHODS.get(event.kind)
    if method is None:
        return None
    data, node = _data(event)
    params: dict[str, Any] = {
        "namespace": event.namespace.split("|") if event.namespace else [],
        "timestamp": int(event.created_at.timestamp() * 1000),
        "data": data,
    }
    if node is not None:
        params["node"] = node
    return {
        "type": "event",
        "event_id": f"{thread_id}-{event.seq}",
        "seq": event.seq,
        "method": method,
        "params": params,
    }


def _data(event: LogEvent) -> tuple[Any, str | None]:
    data = orjson.loads(event.data)
    match event.kind:
        case "metadata":
            return {"event": "running", "graph_name": data.get("graph_id"), "run_id": data["run_id"]}, None
        case "end":
            return _ending(event, data), None
        case "values":
            return _values(data), None
        case "updates" if isinstance(data, dict) and len(data) == 1 and "__interrupt__" not in data:
            [(node, delta)] = data.items()
            return _values(delta), node
        case "custom" if not (isinstance(data, dict) and set(data) <= {"name", "payload"} and "payload" in data):
            return {"payload": data}, None
        case "checkpoints":
            configurable, metadata = data["config"]["configurable"], data.get("metadata") or {}
            return {
                "id": configurable["checkpoint_id"],
                "step": metadata.get("step"),
                "source": metadata.get("source"),
            }, None
        case "message":
            node = data.pop("node", None)
            if node is not None and data["event"] == "message-start":
                # The Python client reads it here.
                data["metadata"] = {**(data.get("metadata") or {}), "langgraph_node": node}
            return data, node
        case _:
            return data, None


def _ending(event: LogEvent, data: dict[str, Any]) -> dict[str, Any]:
    ending: dict[str, Any] = {
        "event": "interrupted" if data.get("paused") else _TERMINAL[data["status"]],
        "graph_name": data.get("graph_id"),
        "run_id": str(event.run_id),
    }
    if ending["event"] == "failed" and data.get("error"):
        ending["error"] = data["error"].get("message") or data["error"].get("error")
    return ending


def _values(value: Any) -> Any:
    """A state without `__interrupt__`, and its messages with only the fields that clients read."""
    if isinstance(value, dict):
        if "type" in value and "content" in value and "additional_kwargs" in value:
            return {
                key: value[key] for key in _MESSAGE_FIELDS if value.get(key) not in (None, [], {}) or key == "content"
            }
        return {key: _values(item) for key, item in value.items() if key != "__interrupt__"}
    if isinstance(value, list):
        return [_values(item) for item in value]
    return value

"""The events of a run of the thread-centric protocol.

One row of the event log is one event of the protocol. So an item of LangGraph's stream may become several events: the
checkpoint comes before its values, an interrupt is an event of its own, and so are the start and end of each subgraph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.language_models._compat_bridge import message_to_events
from langchain_core.messages import AIMessageChunk, BaseMessage, ToolMessage

# The stream modes that the graph runs with. With CONTENT_BLOCKS in its config, `messages` are content blocks.
PROTOCOL_MODES = frozenset({"values", "updates", "custom", "tasks", "messages", "checkpoints", "tools"})
CONTENT_BLOCKS = "__pregel_stream_messages_v2"

Event = tuple[str, str, Any]
"""namespace, kind, data"""


class ProtocolModes:
    """Turns a graph's stream into the events of the log. One per attempt."""

    def __init__(self, highest_step: int | None = None) -> None:
        """`highest_step`: the highest step number of any branch of the thread before this attempt."""
        self._highest_step = highest_step
        # Values by namespace, kept until their checkpoint, which LangGraph sends right after them.
        self._held: dict[str, Any] = {}
        # Open subgraphs, by namespace: the id of the task that runs them.
        self._open: dict[str, str] = {}
        self._seen: set[str] = set()
        self._messages: dict[tuple[str, str], str] = {}
        self._requested: set[str] = set()

    def events(self, namespace: str, mode: str, chunk: Any) -> Iterator[Event]:
        """The events of one item of the graph's stream."""
        yield from self._opened(namespace)
        match mode:
            case "values":
                yield from self._release(namespace)
                self._held[namespace] = chunk
                if isinstance(chunk, dict) and chunk.get("__interrupt__"):
                    # No checkpoint follows an interrupt, and other nodes may take long.
                    yield from self._release(namespace)
            case "checkpoints":
                yield namespace, "checkpoint", self._checkpoint(namespace, chunk)
                yield from self._release(namespace)
            case "messages":
                yield from self._message(namespace, chunk)
            case "tasks":
                yield namespace, "tasks", chunk
                yield from self._closed(namespace, chunk)
            case "tools":
                yield namespace, "tool", chunk
            case "updates" | "custom":
                yield namespace, mode, chunk

    def finish(self) -> Iterator[Event]:
        """The events that are still due when the graph has ended or was stopped."""
        for namespace in sorted(self._held, key=len, reverse=True):
            yield from self._release(namespace)
        for namespace in sorted(self._open, key=len, reverse=True):
            yield namespace, "lifecycle", {"event": "completed", "graph_name": _graph_name(namespace)}
        self._open.clear()

    def _release(self, namespace: str) -> Iterator[Event]:
        if namespace not in self._held:
            return
        values = self._held.pop(namespace)
        interrupts = values.get("__interrupt__", ()) if isinstance(values, dict) else ()
        yield namespace, "values", values
        for interrupt in interrupts:
            if interrupt.id not in self._requested:
                self._requested.add(interrupt.id)
                yield (
                    namespace,
                    "input.requested",
                    {"interrupt_id": interrupt.id, "payload": interrupt.value, "value": interrupt.value},
                )

    def _checkpoint(self, namespace: str, payload: dict[str, Any]) -> dict[str, Any]:
        metadata = payload.get("metadata") or {}
        step = metadata.get("step")
        if namespace == "" and self._highest_step is not None and step is not None and step < self._highest_step:
            # A branch from an earlier checkpoint counts its steps from there. A client ignores a step that is lower
            # than one it has seen, as a late old snapshot, and would go on showing the other branch.
            step = None
        described = {
            "id": payload["config"]["configurable"]["checkpoint_id"],
            "step": step,
            "source": metadata.get("source"),
        }
        parent = payload.get("parent_config")
        if parent:
            described["parent_id"] = parent["configurable"]["checkpoint_id"]
        return described

    def _opened(self, namespace: str) -> Iterator[Event]:
        if not namespace or namespace in self._seen:
            return
        segments = namespace.split("|")
        for depth in range(1, len(segments) + 1):
            place = "|".join(segments[:depth])
            if place not in self._seen:
                self._seen.add(place)
                task_id = segments[depth - 1].rpartition(":")[2]
                self._open[place] = task_id
                yield (
                    place,
                    "lifecycle",
                    {"event": "started", "graph_name": _graph_name(place), "trigger_call_id": task_id},
                )

    def _closed(self, namespace: str, task: dict[str, Any]) -> Iterator[Event]:
        """The end of the subgraph that a task ran, if it ran one."""
        if "result" not in task and "error" not in task:
            return
        for place, task_id in list(self._open.items()):
            parent = place.rpartition("|")[0]
            if task_id == task.get("id") and parent == namespace:
                del self._open[place]
                yield from self._release(place)
                end: dict[str, Any] = {"event": "completed", "graph_name": _graph_name(place)}
                if task.get("interrupts"):
                    end["event"] = "interrupted"
                elif task.get("error"):
                    end |= {"event": "failed", "error": str(task["error"])}
                yield place, "lifecycle", end

    def _message(self, namespace: str, chunk: tuple[Any, dict[str, Any]]) -> Iterator[Event]:
        payload, metadata = chunk
        node = metadata.get("langgraph_node")
        if isinstance(payload, dict) and "event" in payload:
            call = (namespace, str(metadata.get("run_id") or metadata.get("langgraph_checkpoint_ns", "")))
            if payload["event"] == "message-start":
                self._messages[call] = str(payload.get("id") or payload.get("message_id") or "")
            yield namespace, "message", {**payload, "message_id": self._messages.get(call, ""), "node": node}
            if payload["event"] == "message-finish":
                self._messages.pop(call, None)
        elif isinstance(payload, BaseMessage) and not isinstance(payload, AIMessageChunk | ToolMessage):
            for event in message_to_events(payload, message_id=payload.id):
                yield namespace, "message", {**event, "message_id": payload.id, "node": node}


def _graph_name(namespace: str) -> str:
    return namespace.rpartition("|")[2].partition(":")[0]

"""Builds the tree of a run's graphs, each with its last status."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from holdfast.streams.envelopes import envelope
from holdfast.streams.log import LogEvent


def run_tree(thread_id: UUID, events: Iterable[LogEvent]) -> dict[str, Any] | None:
    """The tree from a run's `metadata`, `lifecycle` and `end` events in the order of the log; None without events."""
    nodes: dict[tuple[str, ...], dict[str, Any]] = {}
    for event in events:
        shown = envelope(thread_id, event)
        if shown is None or shown["method"] != "lifecycle":
            continue
        namespace = tuple(shown["params"]["namespace"])
        data = shown["params"]["data"]
        node = nodes.get(namespace)
        if node is None:
            node = nodes[namespace] = {"namespace": list(namespace), "status": "", "graph_name": ""}
            parent = next(
                (nodes[namespace[:depth]] for depth in range(len(namespace) - 1, -1, -1) if namespace[:depth] in nodes),
                None,
            )
            if parent is not None:
                parent.setdefault("children", []).append(node)
        node["status"] = data["event"]
        node["graph_name"] = data.get("graph_name") or node["graph_name"]
    return nodes.get(())

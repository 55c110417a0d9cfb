"""A run as a tree of graphs, each in the state that it last told of itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from holdfast.streams.envelopes import envelope
from holdfast.streams.log import LogEvent


def tree_of(thread_id: UUID, events: Iterable[LogEvent]) -> dict[str, Any] | None:
    """The tree that a run's `metadata`, `lifecycle` and `end` events make, in the order of the log; None for none."""
    nodes: dict[tuple[str, ...], dict[str, Any]] = {}
    for event in events:
        shown = envelope(thread_id, event)
        if shown is None or shown["method"] != "lifecycle":
            continue
        place = tuple(shown["params"]["namespace"])
        data = shown["params"]["data"]
        node = nodes.get(place)
        if node is None:
            node = nodes[place] = {"namespace": list(place), "status": "", "graph_name": ""}
            parent = next(
                (nodes[place[:depth]] for depth in range(len(place) - 1, -1, -1) if place[:depth] in nodes), None
            )
            if parent is not None:
                parent.setdefault("children", []).append(node)
        node["status"] = data["event"]
        node["graph_name"] = data.get("graph_name") or node["graph_name"]
    return nodes.get(())

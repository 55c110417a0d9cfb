"""Framing of Server-Sent Events, v1: one frame per event of the log."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from holdfast.streams.log import LogEvent

# Without an empty line after it: in both SDKs one ends an event even if there is none, once an id has come.
HEARTBEAT = b": heartbeat\r\n"

# In the log for Holdfast's own use; clients of v1 learn of an end by the stream's.
# A run has been created to be watched; an attempt at it begins.
BEGINNINGS = ("accepted", "metadata")
_HIDDEN = frozenset({"end", "released", "output", "lifecycle", "message", "tool", "checkpoint", "input.requested"})


def frame(event: LogEvent, modes: frozenset[str] | None = None) -> bytes:
    """An event as clients see it, or nothing if it is not for them.

    `modes` selects by base mode: `values` also passes `values|child:…`, and all kinds of messages go together.
    Errors always pass.
    """
    if event.kind in _HIDDEN:
        return b""
    kind, data = event.kind, event.data
    if kind in BEGINNINGS:
        told = orjson.loads(data)
        if told.get("accepted"):
            return b""  # Of this attempt the run's acceptance has told.
        kind, data = "metadata", orjson.dumps({"run_id": str(event.run_id), "attempt": told["attempt"]})
    if modes is not None and kind != "error" and _base(kind) not in modes:
        return b""
    name = f"{kind}|{event.namespace}" if event.namespace else kind
    return b"event: %s\r\ndata: %s\r\nid: %d\r\n\r\n" % (name.encode(), data, event.seq)


def _base(kind: str) -> str:
    return kind.split("/", 1)[0]


def select_modes(modes: Sequence[str]) -> frozenset[str] | None:
    """The filter for a list of requested modes; None for no filter."""
    if not modes:
        return None
    return frozenset("messages" if mode == "messages-tuple" else mode for mode in modes)

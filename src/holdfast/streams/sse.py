"""Framing of Server-Sent Events, v1: one frame per event of the log."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from holdfast.streams.log import LogEvent

# Without an empty line after it: in both SDKs one ends an event even if there is none, once an id has come.
HEARTBEAT = b": heartbeat\r\n"

# In the log for Holdfast's own use; clients of v1 learn of an end by the stream's.
_HIDDEN = frozenset({"end", "output", "lifecycle", "message", "tool", "checkpoint", "input.requested"})


def frame(event: LogEvent, modes: frozenset[str] | None = None) -> bytes:
    """An event as clients see it, or nothing if it is not for them.

    `modes` selects by base mode: `values` also passes `values|child:…`, and all kinds of messages go together.
    Errors always pass.
    """
    if event.kind in _HIDDEN:
        return b""
    if modes is not None and event.kind != "error" and _base(event.kind) not in modes:
        return b""
    data = event.data
    if event.kind == "metadata":
        told = orjson.loads(data)
        data = orjson.dumps({"run_id": told["run_id"], "attempt": told["attempt"]})
    name = f"{event.kind}|{event.namespace}" if event.namespace else event.kind
    return b"event: %s\r\ndata: %s\r\nid: %d\r\n\r\n" % (name.encode(), data, event.seq)


def _base(kind: str) -> str:
    return kind.split("/", 1)[0]


def select_modes(modes: Sequence[str]) -> frozenset[str] | None:
    """The filter for a list of requested modes; None for no filter."""
    if not modes:
        return None
    return frozenset("messages" if mode == "messages-tuple" else mode for mode in modes)

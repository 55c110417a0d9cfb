"""Formats events of the log as Server-Sent Events of the v1 protocol: one frame for each event."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from holdfast.streams.log import LogEvent

# No empty line follows it. After the first id, both SDKs would take an empty line for the end of an event.
HEARTBEAT = b": heartbeat\r\n"

# The kinds that mark a start: a watched run has been created (`accepted`), or an attempt begins (`metadata`).
START_KINDS = ("accepted", "metadata")
# Kinds that v1 clients do not get. The end of the stream shows them the end of the run.
_HIDDEN = frozenset({"end", "released", "output", "lifecycle", "message", "tool", "checkpoint", "input.requested"})


def frame(event: LogEvent, modes: frozenset[str] | None = None) -> bytes:
    """The frame of an event; empty if clients do not get it.

    `modes` filters by base mode: `values` includes `values|child:…`, and `messages` includes all kinds of messages.
    Errors are always included.
    """
    if event.kind in _HIDDEN:
        return b""
    kind, data = event.kind, event.data
    if kind in START_KINDS:
        start = orjson.loads(data)
        if start.get("accepted"):
            return b""  # The `accepted` event has announced this attempt already.
        kind, data = "metadata", orjson.dumps({"run_id": str(event.run_id), "attempt": start["attempt"]})
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

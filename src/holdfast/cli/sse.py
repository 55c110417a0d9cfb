"""Reads server-sent events, as far as a client of runs needs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.db.stored_json import load_json


@dataclass(frozen=True)
class ServerEvent:
    """One event: `name` may carry a namespace (`updates|child:…`), `id` is the cursor to resume after."""

    name: str
    data: Any
    id: str | None


def read_events(chunks: Iterable[bytes]) -> Iterator[ServerEvent]:
    """Events from the chunks of a body. Leaves out comments, and an event that the end of the body cuts off."""
    name, cursor = "message", None
    data: list[str] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield ServerEvent(name, load_json("\n".join(data)), cursor)
            name, data, cursor = "message", [], None
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "event":
                name = value
            case "data":
                data.append(value)
            case "id":
                cursor = value


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    # Not str.splitlines: it also splits at characters that JSON may contain, such as U+2028.
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()

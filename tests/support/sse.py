"""Reading Server-Sent Events as a client does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson


@dataclass(frozen=True)
class Frame:
    event: str
    data: Any
    id: int | None


async def frames(response: httpx.Response) -> AsyncIterator[Frame]:
    """The events of a stream, comments left out."""
    event, data, number = "", "", None
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            event = line[7:]
        elif line.startswith("data: "):
            data = line[6:]
        elif line.startswith("id: "):
            number = int(line[4:])
        elif not line and event:
            yield Frame(event, orjson.loads(data), number)
            event, data, number = "", "", None

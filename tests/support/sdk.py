"""Both Python clients, called in one way."""

from __future__ import annotations

import asyncio
from typing import Any

from langgraph_sdk import get_client, get_sync_client


class Sdk:
    """`await sdk("threads.get", ...)` calls the method of the asynchronous client, or of the blocking one in a
    thread."""

    def __init__(self, url: str, *, blocking: bool) -> None:
        self._blocking = blocking
        self._client: Any = get_sync_client(url=url) if blocking else get_client(url=url)

    async def __call__(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        method = self._client
        for part in name.split("."):
            method = getattr(method, part)
        if self._blocking:
            return await asyncio.to_thread(method, *arguments, **named)
        return await method(*arguments, **named)

    async def close(self) -> None:
        if self._blocking:
            self._client.close()
        else:
            await self._client.aclose()

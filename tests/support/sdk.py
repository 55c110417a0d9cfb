"""Both Python clients, called in one way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from inspect import isawaitable
from typing import Any

from langgraph_sdk import get_client, get_sync_client


class Sdk:
    """`await sdk("threads.get", ...)` calls the method of the asynchronous client, or of the blocking one in a
    thread."""

    def __init__(self, url: str, *, blocking: bool) -> None:
        self.blocking = blocking
        self.client: Any = get_sync_client(url=url) if blocking else get_client(url=url)

    async def __call__(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        method = self._method(name)
        if self.blocking:
            return await asyncio.to_thread(method, *arguments, **named)
        return await method(*arguments, **named)

    async def iterate(self, name: str, /, *arguments: Any, **named: Any) -> AsyncGenerator[Any, None]:
        """What the method's iterator yields. Leaving early closes the connection."""
        parts = self._method(name)(*arguments, **named)
        if not self.blocking:
            if isawaitable(parts):
                parts = await parts
            async with aclosing(parts):
                async for part in parts:
                    yield part
            return
        nothing = object()
        try:
            while (part := await asyncio.to_thread(next, parts, nothing)) is not nothing:
                yield part
        finally:
            await asyncio.to_thread(parts.close)

    async def stream(self, name: str, /, *arguments: Any, **named: Any) -> list[Any]:
        """All of it."""
        return [part async for part in self.iterate(name, *arguments, **named)]

    async def close(self) -> None:
        if self.blocking:
            self.client.close()
        else:
            await self.client.aclose()

    def _method(self, name: str) -> Any:
        method = self.client
        for part in name.split("."):
            method = getattr(method, part)
        return method

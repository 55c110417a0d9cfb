"""`client.threads.stream()` of both Python clients, used in one way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from tests.support.sdk import Sdk
from tests.support.waiting import until_true


class ThreadStream:
    """An open stream of a thread. `stream` is the SDK's own object, for what is the same in both clients."""

    def __init__(self, sdk: Sdk, assistant_id: str, thread_id: str | None = None, **options: Any) -> None:
        self._blocking = sdk.blocking
        self.stream: Any = sdk.client.threads.stream(thread_id, assistant_id=assistant_id, **options)

    @property
    def thread_id(self) -> str:
        return str(self.stream.thread_id)

    async def __aenter__(self) -> Self:
        await self._call(self.stream.__enter__ if self._blocking else self.stream.__aenter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._call(self.stream.__exit__ if self._blocking else self.stream.__aexit__, kind, error, trace)

    async def start(self, **params: Any) -> str:
        """The id of the run that was started."""
        return str((await self._call(self.stream.run.start, **params))["run_id"])

    async def respond(self, response: Any, **params: Any) -> None:
        await self._call(self.stream.run.respond, response, **params)

    async def tree(self, **params: Any) -> Any:
        return await self._call(self.stream.agent.get_tree, **params)

    async def output(self) -> Any:
        return await self.value(lambda stream: stream.output)

    async def value(self, read: Callable[[Any], Any]) -> Any:
        """Something that one client gives when it is read, and the other when it is awaited."""
        if self._blocking:
            return await asyncio.to_thread(read, self.stream)
        return await read(self.stream)

    async def iterate(self, read: Callable[[Any], Any]) -> AsyncGenerator[Any, None]:
        """What a projection or a subscription yields, until the run ends or pauses."""
        source = read(self.stream)
        if not self._blocking:
            iterator = aiter(source)
            async with aclosing(iterator):
                async for item in iterator:
                    yield item
            return
        items, nothing = iter(source), object()
        try:
            while (item := await asyncio.to_thread(next, items, nothing)) is not nothing:
                yield item
        finally:
            await asyncio.to_thread(items.close)

    async def all(self, read: Callable[[Any], Any]) -> list[Any]:
        return [item async for item in self.iterate(read)]

    @asynccontextmanager
    async def listening(self, read: Callable[[Any], Any]) -> AsyncGenerator[asyncio.Task[list[Any]], None]:
        """What `all` gives, asked for before the body begins."""
        controller = self.stream._controller
        before = set(controller._subscriptions)
        heard = asyncio.create_task(self.all(read))
        try:
            await until_true(
                lambda: heard.done() or not before.issuperset(controller._subscriptions), "somebody listens"
            )
            yield heard
        except BaseException:
            heard.cancel()
            raise

    async def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._blocking:
            return await asyncio.to_thread(method, *arguments, **named)
        return await method(*arguments, **named)

"""Blocks that end when the client disconnects or its API key becomes invalid: for streams and long waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from starlette.types import Receive


class Endable(Protocol):
    """An object that can end, and calls back when it does."""

    def on_end(self, callback: Callable[[], object] | None, /) -> None: ...


class WhileOpen:
    """A block that ends when an Endable ends, by cancelling the block's task. A cancel from another source is not
    suppressed."""

    # Seconds between two cancels. The cancel is repeated because Python 3.11 sometimes loses one.
    CANCEL_INTERVAL_SECONDS = 0.5

    def __init__(self, endable: Endable) -> None:
        self._endable = endable
        self._cancelled = 0
        self._next_cancel: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._endable.on_end(self._end)
        return self

    def _end(self) -> None:
        self._cancelled += 1
        self._task.cancel()
        self._next_cancel = asyncio.get_running_loop().call_later(self.CANCEL_INTERVAL_SECONDS, self._end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._endable.on_end(None)
        if self._next_cancel is None:
            return False
        self._next_cancel.cancel()
        # Others may have cancelled the task as well.
        others = min(self._task.uncancel() for _ in range(self._cancelled))
        return others == 0 and kind is asyncio.CancelledError


class ClientConnection:
    """The connection to the client of a request, whose body has been read. It ends when the client disconnects."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._listening: asyncio.Task[None] | None = None

    def on_end(self, callback: Callable[[], object] | None) -> None:
        if callback is not None:
            self._listening = asyncio.create_task(self._listen(callback), name="disconnect")
        elif self._listening is not None:
            self._listening.cancel()

    async def _listen(self, callback: Callable[[], object]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        callback()

    async def stopped(self) -> None:
        """Wait until the listening task has ended."""
        if self._listening is not None:
            await asyncio.wait([self._listening])

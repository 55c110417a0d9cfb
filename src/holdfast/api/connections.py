"""The way past all layers to a client's connection, for what is said all day long: still there; and for what is heard
once: gone.

A heartbeat that travels through the response, the framework and the layers around it costs more than twice what the
system asks for writing it. It is the same few bytes for everybody, so it can be written where the connection is known.
And whoever asks the layers whether the client has gone needs a task that waits for the answer, for each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from holdfast.api.bounds import BoundedProtocol
from holdfast.streams.sse import HEARTBEAT

EXTENSION = "holdfast.line"
CHUNK = b"%x\r\n%s\r\n" % (len(HEARTBEAT), HEARTBEAT)


class Line:
    """The connection of one request, for as long as it is answered in chunks."""

    __slots__ = ("_cycle", "_tell")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._tell: Callable[[], object] | None = None

    def tell(self, lost: Callable[[], object] | None) -> None:
        """Call this when the client has gone, or has already; None: nobody any more."""
        self._tell = lost
        if lost is not None:
            # A long body stops the reading, and whoever does not read does not see an end.
            self._cycle.flow.resume_reading()
            if self._cycle.disconnected:
                asyncio.get_running_loop().call_soon(self.lose)

    def lose(self) -> None:
        """The client has gone."""
        if self._tell is not None:
            self._tell()

    def beat(self) -> None:
        """Write a heartbeat between two chunks, unless there is no room, no answer yet, or nobody there."""
        cycle = self._cycle
        if (
            cycle.response_started
            and cycle.chunked_encoding
            and not (cycle.response_complete or cycle.disconnected or cycle.flow.write_paused)
            and not cycle.transport.is_closing()
        ):
            cycle.transport.write(CHUNK)


class LineProtocol(BoundedProtocol):
    """The HTTP protocol, giving each request its line. Only for an application without layers that change bodies on
    their way out, such as a project's own compression: nothing else would know of these bytes."""

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before:
            self.cycle.scope["extensions"] = {EXTENSION: {"line": Line(self.cycle)}}

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Of the request that is being answered: a client may have sent others ahead.
        if self._running is not None and (line := line_of(dict(self._running.scope))) is not None:
            line.lose()


class Endable(Protocol):
    """Something that can come to an end, and calls back when it does."""

    def tell(self, end: Callable[[], object] | None, /) -> None: ...


class WhileConnected:
    """A block that ends when the client has gone, or when its API key stops working."""

    # Seconds. Python 3.11 swallows a cancel now and then.
    AGAIN = 0.5

    def __init__(self, line: Endable) -> None:
        self._line = line
        self._cancelled = 0
        self._again: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._line.tell(self._end)
        return self

    def _end(self) -> None:
        self._cancelled += 1
        self._task.cancel()
        self._again = asyncio.get_running_loop().call_later(self.AGAIN, self._end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._line.tell(None)
        if self._again is None:
            return False
        self._again.cancel()
        # Others may have cancelled the task as well.
        others = min(self._task.uncancel() for _ in range(self._cancelled))
        return others == 0 and kind is asyncio.CancelledError


def line_of(scope: Scope) -> Line | None:
    """The request's line, if its server has given it one."""
    line: Line | None = (scope.get("extensions") or {}).get(EXTENSION, {}).get("line")
    return line

"""The way past all layers to a client's connection, for the one thing that is said all day long: still there.

A heartbeat that travels through the response, the framework and the layers around it costs more than twice what the
system asks for writing it. It is the same few bytes for everybody, so it can be written where the connection is known.
"""

from __future__ import annotations

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from holdfast.streams.sse import HEARTBEAT

EXTENSION = "holdfast.line"
CHUNK = b"%x\r\n%s\r\n" % (len(HEARTBEAT), HEARTBEAT)


class Line:
    """The connection of one request, for as long as it is answered in chunks."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

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


class LineProtocol(HttpToolsProtocol):
    """uvicorn's protocol, giving each request its line. Only for an application without layers that change bodies on
    their way out, such as a project's own compression: nothing else would know of these bytes."""

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not None and self.cycle is not before:
            self.cycle.scope["extensions"] = {EXTENSION: {"line": Line(self.cycle)}}


def line_of(scope: Scope) -> Line | None:
    """The request's line, if its server has given it one."""
    line: Line | None = (scope.get("extensions") or {}).get(EXTENSION, {}).get("line")
    return line

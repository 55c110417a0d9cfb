"""The clients, all in one process of their own: `python -m bench.streams.load --control PATH --lifeline-fd FD`.

Lean on purpose, so that what is measured is the server: raw connections, a parser in C, and bodies that are looked at
only when the clock has stopped. Takes orders as lines of JSON on a Unix socket, one at a time, and answers each with a
line.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, cast

import httptools
import orjson
import uvloop

from holdfast.cli.supervised_child import watch_supervisor

# Connections being opened at any moment.
OPENING = 100
HEARTBEAT = b": heartbeat\r\n"
FRAME = re.compile(rb"event: (\S+)\r\ndata: (.*?)\r\nid: (\d+)\r\n\r\n", re.DOTALL)


class Connection(asyncio.Protocol):
    """One client: one request after the other."""

    def __init__(self, *, keep: bool = True) -> None:
        self._keep = keep
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answering: asyncio.Future[None] | None = None
        self._complete: asyncio.Future[None] | None = None
        self.body: list[bytes] = []
        self.heartbeats = 0
        self.lost = False
        self.arrivals: list[float] = []
        """When each part of the body came."""
        self.sent_at = self.ended_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._answering is not None and not self._answering.done():
            if status == 200:
                self._answering.set_result(None)
            else:
                self._answering.set_exception(RuntimeError(f"the server answers {status}"))

    def on_body(self, body: bytes) -> None:
        if self._keep:
            self.arrivals.append(time.perf_counter())
            self.body.append(body)
        else:
            self.heartbeats += body.count(HEARTBEAT)

    def on_message_complete(self) -> None:
        self.ended_at = time.perf_counter()
        if self._complete is not None and not self._complete.done():
            self._complete.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        for future in (self._answering, self._complete):
            if future is not None and not future.done():
                future.set_exception(ConnectionError("the server has hung up"))
                future.exception()

    async def send(self, request: bytes) -> None:
        """Send a request; returns when its answer begins."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self._answering, self._complete = loop.create_future(), loop.create_future()
        self.body, self.arrivals = [], []
        self.sent_at = time.perf_counter()
        self._transport.write(request)
        await self._answering

    async def end(self) -> bytes:
        """The whole body, once it has come."""
        assert self._complete is not None
        await self._complete
        return b"".join(self.body)

    @property
    def first_at(self) -> float:
        return self.arrivals[0]

    def frame_at(self, number: int) -> float:
        """When a frame of the stream had come whole."""
        seen = b""
        for part, at in zip(self.body, self.arrivals, strict=True):
            seen += part
            if len(FRAME.findall(seen)) > number:
                return at
        raise ValueError(f"there is no frame {number}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def request(method: str, path: str, body: Any = None) -> bytes:
    data = b"" if body is None else orjson.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def read_frames(body: bytes) -> list[tuple[str, Any, int]]:
    """The events of a stream: name, data, id. Raises ValueError when there is anything else in it."""
    rest = body.replace(HEARTBEAT, b"")
    frames = [(match[1].decode(), orjson.loads(match[2]), int(match[3])) for match in FRAME.finditer(rest)]
    if FRAME.sub(b"", rest):
        raise ValueError(f"not frames: {FRAME.sub(b'', rest)[:200]!r}")
    return frames


def fault(body: bytes, events: int) -> str | None:
    """What is wrong with a stream that should hold numbered custom events, each once and in order."""
    try:
        frames = read_frames(body)
    except ValueError as error:
        return str(error)
    numbers = [data["number"] for name, data, _ in frames if name == "custom"]
    ids = [identity for _, _, identity in frames]
    if numbers != list(range(events)):
        return f"{len(numbers)} events: {numbers[:5]}…{numbers[-5:]}"
    if ids != sorted(set(ids)):
        return "ids are not ascending"
    return None


class Load:
    """What can be ordered. Every method is an order, and its result the answer."""

    def __init__(self) -> None:
        self._port = 0
        self._open: list[Connection] = []

    async def _connect(self, *, keep: bool = True) -> Connection:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(lambda: Connection(keep=keep), "127.0.0.1", self._port)
        return protocol

    async def server(self, port: int) -> None:
        self._port = port

    async def open(self, requests: list[tuple[str, str, Any]], *, keep: bool, rate: float = math.inf) -> None:
        """Open a stream for each request, at most `rate` of them a second; done when every one has begun."""
        gate = asyncio.Semaphore(OPENING)

        async def one(order: tuple[str, str, Any]) -> None:
            async with gate:
                connection = await self._connect(keep=keep)
                await connection.send(request(*order))
                self._open.append(connection)

        async with asyncio.TaskGroup() as tasks:
            for order in requests:
                tasks.create_task(one(order))
                await asyncio.sleep(1 / rate)

    async def tally(self) -> dict[str, int]:
        return {
            "open": sum(not connection.lost for connection in self._open),
            "heartbeats": sum(connection.heartbeats for connection in self._open),
        }

    async def ended(self, events: int) -> dict[str, Any]:
        """Wait for the end of all open streams, and look at each."""
        bodies = [await connection.end() for connection in self._open]
        found = Counter(body.replace(HEARTBEAT, b"") for body in bodies)
        faults = {told: count for body, count in found.items() if (told := fault(body, events)) is not None}
        first = min(connection.first_at for connection in self._open)
        last = max(connection.ended_at for connection in self._open)
        return {"streams": len(bodies), "different": len(found), "faults": faults, "seconds": last - first}

    async def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open = []

    async def rush(self, threads: list[list[str]], body: Any, events: int) -> dict[str, Any]:
        """One client for each list of threads; each streams one run after the other, on a thread of its own."""
        connections = [await self._connect() for _ in threads]
        bodies: list[bytes] = []

        async def client(connection: Connection, mine: list[str]) -> None:
            for thread_id in mine:
                await connection.send(request("POST", f"/threads/{thread_id}/runs/stream", body))
                bodies.append(await connection.end())

        started = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for connection, mine in zip(connections, threads, strict=True):
                tasks.create_task(client(connection, mine))
        seconds = time.perf_counter() - started
        for connection in connections:
            connection.close()
        faults = Counter(told for one in bodies if (told := fault(one, events)) is not None)
        return {"seconds": seconds, "streams": len(bodies), "faults": dict(faults)}

    async def one_by_one(self, threads: list[str], body: Any) -> list[dict[str, float]]:
        """Stream a run on each thread, one at a time, over one connection: milliseconds to its answer's headers, to the
        event that says it is accepted, to the first event of its execution, and to its end."""
        connection = await self._connect()
        found = []
        for thread_id in threads:
            await connection.send(request("POST", f"/threads/{thread_id}/runs/stream", body))
            answered_at = time.perf_counter()
            frames = read_frames(await connection.end())
            if [name for name, _, _ in frames] != ["metadata", "values"]:
                raise RuntimeError(f"not what a trivial run streams: {frames}")
            times = {
                "headers": answered_at,
                "accepted": connection.frame_at(0),
                "first": connection.frame_at(1),
                "end": connection.ended_at,
            }
            found.append({name: round((at - connection.sent_at) * 1000, 3) for name, at in times.items()})
        connection.close()
        return found


async def _serve(control: str) -> None:
    load = Load()
    over = asyncio.Event()

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for line in reader:
            name, arguments = orjson.loads(line)
            order: Callable[..., Coroutine[Any, Any, Any]] = getattr(load, name)
            answer: dict[str, Any]
            try:
                answer = {"result": await order(**arguments)}
            except Exception as error:
                causes = error.exceptions if isinstance(error, ExceptionGroup) else [error]
                answer = {"error": f"{name}: {len(causes)} times, first {causes[0]!r}"}
            writer.write(orjson.dumps(answer) + b"\n")
            await writer.drain()
        over.set()

    async with await asyncio.start_unix_server(obey, control, limit=2**26):
        await over.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    given = parser.parse_args()
    watch_supervisor(given.lifeline_fd, grace=1)
    with suppress(KeyboardInterrupt):
        uvloop.run(_serve(given.control))


if __name__ == "__main__":
    main()

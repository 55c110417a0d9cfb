"""The client, against a server that may lie."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from aiohttp import web
from bench.peers.load import Load, Tally, events
from bench.peers.scenarios import EVENTS, Scenario
from bench.peers.window import Counter, WrongAnswer

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

Honesty = Callable[[int], int]


@asynccontextmanager
async def server(result: Honesty, *, said: int = EVENTS, status: str = "success") -> AsyncIterator[str]:
    """Runs the graphs' sums as `result` does them, and says so many events."""
    threads: Iterator[int] = count()
    given: dict[str, int] = {}

    async def thread(request: web.Request) -> web.Response:
        return web.json_response({"thread_id": str(next(threads))})

    async def wait(request: web.Request) -> web.Response:
        number = (await request.json())["input"]["number"]
        return web.json_response({"number": number, "result": result(number)})

    async def enqueue(request: web.Request) -> web.Response:
        given[request.match_info["thread"]] = (await request.json())["input"]["number"]
        return web.json_response({"run_id": "1"})

    async def run(request: web.Request) -> web.Response:
        return web.json_response({"status": status})

    async def state(request: web.Request) -> web.Response:
        number = given[request.match_info["thread"]]
        return web.json_response({"values": {"number": number, "result": result(number)}})

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        frames = ["event: metadata\r\ndata: {}\r\n\r\n: heartbeat\r\n\r\n"]
        frames += [f"event: custom\r\ndata: {json.dumps({'number': number})}\r\n\r\n" for number in range(said)]
        body = "".join(frames).encode()
        await response.write(body)
        return response

    app = web.Application()
    app.router.add_post("/threads", thread)
    app.router.add_post("/runs/wait", wait)
    app.router.add_post("/threads/{thread}/runs/wait", wait)
    app.router.add_post("/threads/{thread}/runs", enqueue)
    app.router.add_get("/threads/{thread}/runs/1", run)
    app.router.add_get("/threads/{thread}/state", state)
    app.router.add_post("/threads/{thread}/runs/stream", stream)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("scenario", [Scenario.STATELESS, Scenario.THREAD], ids=str)
async def test_a_wait_is_believed_only_with_the_right_values(scenario: Scenario) -> None:
    async with server(lambda number: 2 * number) as url, Load(url, 3) as load:
        window = await load.waits(scenario, 0, 0)
        assert window.runs == 6
    async with server(lambda number: 2 * number + (number == 4)) as url, Load(url, 3) as load:
        with pytest.raises(ExceptionGroup) as raised:
            await load.waits(scenario, 0, 0)
        assert raised.group_contains(WrongAnswer)


@pytest.mark.parametrize("size", [1, 5, 13, 14, 100])
def test_a_name_is_counted_once_wherever_it_is_cut(size: int) -> None:
    body = b"event: custom\r\n" * 5 + b"event: cust"
    tally = Tally(b"event: custom")
    assert sum(tally.count(body[start : start + size]) for start in range(0, len(body), size)) == 5


async def test_events_are_counted_and_looked_at() -> None:
    async with server(lambda number: number) as url, Load(url, 2) as load:
        counter, kept = Counter(), list[bytes]()
        await load.stream(Scenario.TOKENS, counter, kept)
        assert counter.events == EVENTS
        window = await load.streams(Scenario.TOKENS, 0, 0)
        assert window.runs == 2
    async with server(lambda number: number, said=EVENTS - 1) as url, Load(url, 2) as load:
        with pytest.raises(WrongAnswer):
            await load.streams(Scenario.TOKENS, 0, 0)


async def test_drained_means_that_all_have_succeeded_with_the_right_values() -> None:
    async with server(lambda number: 2 * number) as url, Load(url, 3) as load:
        window, drained = await load.drain(0)
        assert (window.runs, drained.enqueued) == (6, 6)
    async with server(lambda number: 2 * number, status="error") as url, Load(url, 3) as load:
        with pytest.raises(ExceptionGroup) as raised:
            await load.drain(0)
        assert raised.group_contains(WrongAnswer)
    async with server(lambda number: number) as url, Load(url, 3) as load:
        with pytest.raises(WrongAnswer):
            await load.drain(0)


def test_either_line_end_will_do() -> None:
    expected = [("metadata", {"a": 1}), ("end", None)]
    for end in ("\n", "\r\n"):
        body = f': heartbeat{end}{end}event: metadata{end}data: {{"a": 1}}{end}id: 3{end}{end}event: end{end}{end}'
        assert events(body.encode()) == expected

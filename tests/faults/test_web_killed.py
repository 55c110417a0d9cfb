"""A web process that goes away while a client streams: the client goes on at another one, from the last id it saw."""

from __future__ import annotations

import signal

import pytest

from tests.support.fleet import Fleet, until

EVENTS = 300


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_client_resumes_on_another_web_process(fleet: Fleet, number: signal.Signals) -> None:
    (first, second), _ = await fleet.start(webs=2, workers=1)
    run = await fleet.post("chatter", {"events": EVENTS, "seconds": 0.01, "hold": "chat"})
    watcher, watching = fleet.watch(run, [first.url, second.url])

    async def in_the_middle() -> bool:
        return len(watcher.saw("custom")) > 20

    await until(in_the_middle, "the client is in the middle of the stream")
    first.signal(number)
    await first.ended()
    fleet.steps.open_gate(run.thread_id)
    await watching

    assert [data["number"] for data in watcher.saw("custom")] == list(range(1, EVENTS + 1))
    assert (await fleet.row(run))["status"] == "success"
    assert fleet.steps.nodes(run.run_id) == ["chat"]
    await fleet.prove(run, watcher, attempts=[1])
    # Also by a process that stops in good order: clients take a clean end for the run's.
    assert watcher.broken >= 1
    assert watcher.ended_early == 0

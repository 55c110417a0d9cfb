"""kill -9 of a worker: the next attempt is in the same trace, and so is the one that could not be told."""

from __future__ import annotations

from uuid import UUID, uuid4

from tests.support.fleet import until
from tests.support.watching import WatchedRun
from tests.traces.conftest import tracing_fleet
from tests.traces.test_one_trace import CLIENT, only, traceparent


async def test_a_killed_attempt_and_the_one_after_it(server_url: str) -> None:
    async with tracing_fleet(server_url, workers=2) as traced:
        gate = uuid4().hex
        trace_id, headers = traceparent()
        created = await traced.create("held", headers, input={"hold": gate})
        run = WatchedRun(UUID(created["run_id"]), UUID(created["thread_id"]))
        # What the first worker could send of its attempt is there before it is killed.
        await traced.collector.until(
            lambda spans: any(span.name == "before" for span in spans), "the first step's span"
        )

        async def reached() -> bool:
            return (traced.gates / f"{gate}.reached").exists()

        async def durable() -> bool:
            steps = "SELECT FROM checkpoints WHERE thread_id = %s AND (metadata ->> 'step')::int >= 1"
            return bool(await traced.fleet.query(steps, (created["thread_id"],)))

        await until(reached, "the second step is reached")
        await until(durable, "the checkpoint of the first step is stored")
        victim = await traced.fleet.owner(run)
        victim.kill()
        await traced.fleet.taken_over(run)
        (traced.gates / gate).touch()
        lost, second = await traced.attempts(created, 2)
        await traced.collector.until(
            lambda _: bool(traced.collector.named("POST /threads/{thread_id}/runs")), "the request"
        )
        spans = traced.collector.of(trace_id)
    assert lost.trace_id == second.trace_id == trace_id
    assert (lost.attributes["holdfast.outcome"], lost.failed) == ("lost", True)
    assert (second.attributes["holdfast.outcome"], second.failed) == ("success", False)
    assert second.links == ((trace_id, lost.span_id),)
    create = only(spans, "holdfast.create")
    assert lost.parent_id == second.parent_id == create.span_id
    # What was sent before hangs below the span that was written later by somebody else.
    before = only(spans, "before")
    graph = next(span for span in spans if span.span_id == before.parent_id)
    assert (graph.name, graph.parent_id, graph.failed) == ("held", lost.span_id, True)
    assert lost.start <= before.start <= before.end <= lost.end
    assert before.attributes["holdfast.worker_id"] != only(spans, "wait").attributes["holdfast.worker_id"]
    # It waited from the moment it was given back, and not since it was created.
    [_, queue] = sorted((span for span in spans if span.name == "holdfast.queue"), key=lambda span: span.start)
    assert before.end < queue.start <= queue.end <= second.start
    assert {span.parent_id for span in spans} <= {CLIENT, *(span.span_id for span in spans)}

"""One trace, from the client's own span to the webhook, across processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import uuid4

import orjson
import pytest
from websockets.asyncio.client import connect

from tests.support.collector import Recorded, tree
from tests.support.receiver import receiving
from tests.support.waiting import until_true
from tests.traces.conftest import Traced

# OpenInference logs an error for each prompt that is a text, and not a list of messages.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.expects_errors("log.message")]

CLIENT = "b7ad6b7169203331"


def traceparent(*, sampled: bool = True) -> tuple[str, dict[str, str]]:
    """A client's trace, and the headers that say so."""
    trace_id = uuid4().hex
    return trace_id, {"traceparent": f"00-{trace_id}-{CLIENT}-0{int(sampled)}", "tracestate": "vendor=kept"}


def only(spans: Sequence[Recorded], name: str, parent: Recorded | None = None) -> Recorded:
    found = [span for span in spans if span.name == name and (parent is None or span.parent_id == parent.span_id)]
    assert len(found) == 1, f"{len(found)} times {name}:\n{tree(list(spans))}"
    return found[0]


async def test_from_the_client_to_the_webhook(traced: Traced) -> None:
    trace_id, headers = traceparent()
    async with receiving() as receiver:
        answer = await traced.fleet.client.post(
            f"{traced.fleet.urls[0]}/runs/wait",
            json={"assistant_id": "parent", "input": {}, "webhook": receiver.url, "on_completion": "keep"},
            headers=headers,
        )
        assert answer.json()["done"] == ["the tide turns at six"]
        [told] = await receiver.get()

    def whole(spans: list[Recorded]) -> bool:
        names = [span.name for span in spans if span.trace_id == trace_id]
        return {"holdfast.webhook", "POST /runs/wait"} <= set(names) and names.count("holdfast.attempt") == 3

    await traced.collector.until(whole, "the last spans of both processes")
    spans = traced.collector.of(trace_id)
    request = only(spans, "POST /runs/wait")
    assert (request.parent_id, request.attributes["http.response.status_code"]) == (CLIENT, 200)
    create = only(spans, "holdfast.create", request)
    assert (request.resource["holdfast.role"], create.resource["holdfast.role"]) == ("web", "web")
    first, second = (
        next(
            span
            for span in spans
            if span.parent_id == create.span_id
            and (span.name, span.attributes.get("holdfast.attempt")) == ("holdfast.attempt", number)
        )
        for number in (1, 2)
    )
    assert first.resource["holdfast.role"] == "worker"
    assert first.attributes["holdfast.outcome"] == "waiting for its children"
    assert second.attributes["holdfast.outcome"] == "success"
    assert second.links == ((trace_id, first.span_id),)
    for number in (1, 2):
        queue, claim = (
            next(
                span
                for span in spans
                if (span.name, span.parent_id, span.attributes.get("holdfast.attempt"))
                == (name, create.span_id, number)
            )
            for name in ("holdfast.queue", "holdfast.claim")
        )
        assert queue.start <= queue.end == claim.start <= claim.end
    # The child, below the step that spawned it.
    step = only(spans, "spread", only(spans, "parent", first))
    assert not step.failed
    of_child = only(spans, "holdfast.create", step)
    child = only(spans, "holdfast.attempt", of_child)
    assert of_child.resource["holdfast.role"] == "worker"
    only(spans, "holdfast.queue", of_child)
    only(spans, "holdfast.claim", of_child)
    assert [span.name for span in spans if span.parent_id == child.span_id].count("holdfast.journal.commit") >= 1
    assert of_child.run_id == child.run_id != create.run_id
    assert "holdfast.attempt" not in of_child.attributes
    # The webhook carries the trace on.
    webhook = only(spans, "holdfast.webhook", create)
    assert told.headers["traceparent"] == f"00-{trace_id}-{webhook.span_id}-01"
    assert told.headers["tracestate"] == "vendor=kept"
    assert {span.trace_state for span in spans} == {"vendor=kept"}
    known = {span.span_id for span in spans} | {CLIENT}
    assert {span.parent_id for span in spans} <= known, tree(spans)


async def test_what_a_model_was_asked_and_what_it_used(traced: Traced) -> None:
    run = await traced.run("talk", {"x-team": "the reds"}, input={"messages": [("user", "when does the tide turn?")]})
    [attempt] = await traced.attempts(run)
    spans = traced.collector.of(attempt.trace_id)
    step = only(spans, "ask", only(spans, "talk", attempt))
    model = only(spans, "GenericFakeChatModel", step)
    said = model.attributes
    assert said["openinference.span.kind"] == "LLM"
    assert said["llm.input_messages.0.message.content"] == "when does the tide turn?"
    assert said["llm.output_messages.0.message.content"] == "the tide turns at six"
    assert (said["llm.token_count.prompt"], said["llm.token_count.completion"]) == (12, 5)
    for span in (attempt, step, model):
        assert span.attributes["session.id"] == span.attributes["holdfast.thread_id"] == run["thread_id"]
        assert span.attributes["holdfast.run_id"] == run["run_id"]
        assert span.attributes["holdfast.assistant_id"] == run["assistant_id"]
        assert span.attributes["holdfast.graph_id"] == "talk"
        assert (span.attributes["holdfast.attempt"], bool(span.attributes["holdfast.worker_id"])) == (1, True)
    # What graph code records itself, in a thread, and below its step.
    only(spans, "written down", only(spans, "note"))
    # What the graph is given of the request's headers is between the two.
    assert "the reds" not in repr(spans)


async def test_a_run_without_a_client_that_traces_has_a_trace_of_its_own(traced: Traced) -> None:
    traces = set()
    for _ in range(2):
        run = await traced.run("talk", input={"messages": []})
        [attempt] = await traced.attempts(run)
        traces.add(attempt.trace_id)
        roots = {span.name for span in traced.collector.of(attempt.trace_id) if not span.parent_id}
        assert roots <= {"POST /threads/{thread_id}/runs"}
    assert len(traces) == 2
    assert not [span for span in traced.collector.spans if span.attributes.get("url.path") == "/ok"]


async def test_a_client_decides_that_its_trace_is_not_recorded(traced: Traced) -> None:
    trace_id, headers = traceparent(sampled=False)
    await traced.run("talk", headers, input={"messages": []})
    # Whatever it had sent would have come before this.
    await traced.attempts(await traced.run("talk", input={"messages": []}))
    assert traced.collector.of(trace_id) == []


@pytest.mark.parametrize("given", ["", "00-0-0-01", f"00-{'0' * 32}-{CLIENT}-01", "\xff" * 20, "a" * 4000])
async def test_a_traceparent_that_is_none_is_left_alone(traced: Traced, given: str) -> None:
    answer = await traced.fleet.client.get(
        f"{traced.fleet.urls[0]}/threads/{uuid4()}", headers=[(b"traceparent", given.encode("latin-1"))]
    )
    assert answer.status_code == 404


async def test_a_retry_is_another_attempt_in_the_same_trace(traced: Traced) -> None:
    first, second = await traced.attempts(await traced.run("flaky", input={"hold": uuid4().hex}), 2)
    assert (first.attributes["holdfast.outcome"], first.failed) == ("retry", True)
    assert first.events == ("exception",)
    assert (second.attributes["holdfast.outcome"], second.failed) == ("success", False)
    assert first.trace_id == second.trace_id
    assert second.links == ((first.trace_id, first.span_id),)


async def test_an_error_and_a_question(traced: Traced) -> None:
    [failed] = await traced.attempts(await traced.run("broken"))
    assert (failed.attributes["holdfast.outcome"], failed.failed) == ("error", True)
    assert (failed.message, failed.events) == ("ValueError: there is no such tide", ("exception",))
    [asked] = await traced.attempts(await traced.run("asking"))
    assert (asked.attributes["holdfast.outcome"], asked.failed) == ("success", False)
    assert (asked.attributes["holdfast.paused"], asked.attributes["holdfast.interrupts"]) == (True, 1)
    assert not only(traced.collector.of(asked.trace_id), "question").failed


async def test_a_cancelled_run_and_one_that_waited_for_it(traced: Traced) -> None:
    gate = uuid4().hex
    first = await traced.create("held", input={"hold": gate})
    await until_true((traced.gates / f"{gate}.reached").exists, "the step is reached")
    waiting = await traced.create("talk", thread=first["thread_id"], input={"messages": []})
    place = f"{traced.fleet.urls[0]}/threads/{first['thread_id']}/runs/{first['run_id']}"
    asked = time.time_ns()
    (await traced.fleet.client.post(f"{place}/cancel?wait=true")).raise_for_status()
    [cancelled] = await traced.attempts(first)
    assert (cancelled.attributes["holdfast.outcome"], cancelled.failed) == ("interrupted", False)
    [attempt] = await traced.attempts(waiting)
    await traced.collector.until(
        lambda _: bool(traced.collector.named("holdfast.create", attempt.trace_id)), "its creation"
    )
    spans = traced.collector.of(attempt.trace_id)
    queue, create = only(spans, "holdfast.queue"), only(spans, "holdfast.create")
    # All of it, from its creation to the end of the run before it. The worker may have begun to look a moment before it
    # had written down that end.
    assert cancelled.start < create.start <= queue.start < asked <= queue.end <= attempt.start
    assert asked <= cancelled.end


async def test_lines_that_are_logged_within_a_run_say_which_trace(traced: Traced) -> None:
    run = await traced.run("talk", input={"messages": []})
    [attempt] = await traced.attempts(run)
    worker = next(member for member in traced.fleet.members if member.name == "worker-1")

    def finished() -> list[str]:
        return [line["trace_id"] for line in worker.logged("run.finished") if line["run_id"] == run["run_id"]]

    await until_true(lambda: bool(finished()), "the line is logged")
    assert finished() == [attempt.trace_id]


async def test_a_run_that_is_started_over_a_socket_is_in_the_trace_of_its_connection(traced: Traced) -> None:
    trace_id, headers = traceparent()
    thread = (await traced.fleet.client.post(f"{traced.fleet.urls[0]}/threads", json={})).json()["thread_id"]
    at = f"{traced.fleet.urls[0].replace('http', 'ws', 1)}/threads/{thread}/stream/events"
    async with connect(at, additional_headers=headers) as socket:
        start = {"id": 1, "method": "run.start", "params": {"assistant_id": "talk", "input": {"messages": []}}}
        await socket.send(orjson.dumps(start).decode())
        run_id = orjson.loads(await socket.recv())["result"]["run_id"]
    [attempt] = await traced.attempts({"run_id": run_id})
    await traced.collector.until(lambda _: bool(traced.collector.named("holdfast.create", trace_id)), "its creation")
    create = only(traced.collector.of(trace_id), "holdfast.create")
    assert (create.parent_id, attempt.parent_id) == (CLIENT, create.span_id)

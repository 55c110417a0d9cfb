"""What becomes of spans: off unless somebody asks, and never in the way of a run."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from uuid import uuid4

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from structlog.testing import capture_logs

from holdfast.cli.exit_codes import ExitCode
from holdfast.db.connect import Database
from holdfast.errors import SettingsError
from holdfast.execution.traces import AttemptTrace
from holdfast.settings import Settings, load_settings
from holdfast.telemetry import tracing
from holdfast.telemetry.otlp import CountedExporter, DroppedSpans, SpanQueue
from holdfast.telemetry.steps import StepProvider
from holdfast.telemetry.tracing import TracedRun
from holdfast.upkeep.traces import send_traced
from tests.cli.processes import Program, wait_for
from tests.support.catalogs import catalog_of
from tests.support.collector import Collector
from tests.support.live_worker import quick_settings, running_worker
from tests.support.nodes import GO, Words, first, last, line
from tests.support.records import post_run, query, run_ended
from tests.support.servers import free_port
from tests.support.serving import serving
from tests.support.waiting import until_true
from tests.traces.conftest import PROJECT

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

# Loads what a worker and a web process load, and tells what of tracing has come with it that is nobody else's.
OFF = """
import json, sys
import holdfast.api.main, holdfast.worker.process
from holdfast.settings import load_settings
from holdfast.telemetry import tracing
before = set(sys.modules)
tracing.configure_tracing(load_settings({}), "worker")
print(json.dumps([sorted(set(sys.modules) - before), tracing.recorder is None,
                  [name for name in sys.modules if name.startswith(("openinference", "opentelemetry.exporter",
                                                                    "holdfast.telemetry.recorder"))]]))
"""
MISSING = """
import sys
sys.modules["openinference"] = None
from holdfast.cli.main import main
sys.argv = ["holdfast", "web", "--config", sys.argv[1]]
main()
"""


@contextmanager
def sending(settings: Settings, role: Any = "worker") -> Iterator[None]:
    # Not for the whole process: that could not be undone.
    with patch.object(trace, "set_tracer_provider"):
        tracing.configure_tracing(settings, role)
    try:
        yield
    finally:
        tracing.end_tracing()


async def run_one(settings: Settings) -> dict[str, Any]:
    async with serving(settings, catalog_of(line=line(first, last))) as client:
        for _ in range(2):
            answer = await client.post("/runs/wait", json={"assistant_id": "line", "input": GO})
            assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def test_nothing_is_imported_unless_somebody_asks() -> None:
    found = subprocess.run([sys.executable, "-c", OFF], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(found.stdout) == [[], True, []]


async def test_nothing_is_sent_when_it_is_turned_off(database_url: str, collector: Collector) -> None:
    settings = quick_settings(database_url, port=free_port(), otlp_endpoint=collector.url, traces=False)
    with sending(settings):
        assert tracing.recorder is None
        await run_one(settings)
    assert collector.requests == []


@pytest.mark.parametrize("how", ["refused", "unavailable"])
async def test_runs_do_not_notice_a_collector_that_is_away(
    database_url: str, collector: Collector, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    url = f"http://127.0.0.1:{free_port()}" if how == "refused" else collector.url
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_SECONDS", 0.1)
    collector.status = 503
    settings = quick_settings(database_url, port=free_port(), otlp_endpoint=url)
    with capture_logs() as logs, sending(settings):
        assert (await run_one(settings))["words"] == ["go", "first", "last"]
        await until_true(lambda: bool(dropped(logs)), "it is said")
    # Once, however often it was tried.
    assert len(dropped(logs)) == 1
    assert dropped(logs)[0]["error"]
    [ended] = [entry for entry in logs if entry["event"] == "traces.ended"]
    assert ended["dropped"] >= dropped(logs)[0]["spans"]


def dropped(logs: list[Any]) -> list[Any]:
    return [entry for entry in logs if entry["event"] == "traces.dropped"]


async def test_what_is_left_is_sent_at_the_end(
    database_url: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20c2VjcmV0")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
    settings = quick_settings(
        database_url, port=free_port(), otlp_endpoint=f"{collector.url}/", otel_service_name="agents"
    )
    with sending(settings):
        await run_one(settings)
        assert collector.spans == []
    assert {"holdfast.create", "holdfast.attempt", "first", "last"} <= {span.name for span in collector.spans}
    [request] = collector.requests
    assert (request["path"], request["authorization"]) == ("/v1/traces", "Basic c2VjcmV0")
    for span in collector.spans:
        assert span.resource["service.name"] == "agents"
        assert span.resource["deployment.environment.name"] == "tests"


def test_a_collector_that_never_answers_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_TIMEOUT_SECONDS", 0.1)
    # Long enough to be still waiting when we look, also on a machine that stands still for a moment.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "8")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with sending(load_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": url}), "web"):
            assert tracing.recorder is not None
            with tracing.recorder.request_span("GET", "/", {}):
                pass
        # Somebody still waits for an answer, but not we.
        assert any(thread.name == "traces" for thread in threading.enumerate())
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "traces"], "the thread ends")


class Stuck(SpanExporter):
    """Takes nothing more until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.got = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.entered.set()
        self.go.wait(60)
        self.got += len(spans)
        return SpanExportResult.SUCCESS


def test_the_queue_is_bounded_and_what_is_dropped_is_counted_and_said_once() -> None:
    losses = DroppedSpans()
    stuck = Stuck()
    provider = StepProvider(Resource({}))
    outbox = SpanQueue(CountedExporter(stuck, losses), losses, max_queue_size=10, max_export_batch_size=5)
    provider.add_span_processor(outbox)
    tracer = provider.get_tracer("test")
    with capture_logs() as logs:
        for _ in range(5):
            tracer.start_span("taken").end()
        assert stuck.entered.wait(60)
        for _ in range(25):
            tracer.start_span("waits").end()
        assert losses.dropped == 15
        stuck.go.set()
        provider.shutdown()
    assert stuck.got == 15
    assert [entry["event"] for entry in logs] == ["traces.dropped", "traces.recovered"]
    assert logs[1]["dropped"] == 15


def test_a_run_that_was_created_before_traces_were_on_has_one_trace(collector: Collector) -> None:
    subject = TracedRun(run_id=uuid4(), thread_id=uuid4(), graph_id="line")
    with sending(load_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})):
        assert tracing.recorder is not None
        for attempt in (1, 2):
            begun = tracing.recorder.attempt_span(
                subject, {}, attempt=attempt, worker_id=None, graph_name="line", given_back=1.0, claim_began=2**62
            )
            begun.end("success", {})
        with tracing.recorder.delivery_span(subject, {}, {}):
            assert tracing.outgoing_headers()["traceparent"].split("-")[1] == subject.run_id.hex
    assert {span.trace_id for span in collector.spans} == {subject.run_id.hex}
    roots = [span.name for span in collector.spans if not span.parent_id]
    assert sorted(roots) == ["holdfast.attempt", "holdfast.attempt", "holdfast.webhook"]
    one, two = (span for span in collector.spans if span.name == "holdfast.attempt")
    assert two.links == ((one.trace_id, one.span_id),)


@pytest.mark.parametrize(
    ("sampler", "share", "kept"),
    [
        (None, None, 20),
        ("always_on", None, 20),
        ("always_off", None, 0),
        ("traceidratio", "0", 0),
        ("TraceIdRatio", "1", 20),
        ("parentbased_always_off", None, 0),
        ("parentbased_traceidratio", "0", 0),
        ("parentbased_always_on", None, 20),
    ],
)
def test_the_sampler_decides(collector: Collector, sampler: str | None, share: str | None, kept: int) -> None:
    told = {"otlp_endpoint": collector.url, "otel_sampler": sampler, "otel_sampler_arg": share}
    with sending(load_settings({}, **told), "web"):
        assert tracing.recorder is not None
        for _ in range(20):
            with tracing.recorder.request_span("GET", "/", {}):
                pass
    assert len(collector.spans) == kept


def test_an_attempt_that_was_lost_is_told_once_by_whoever_takes_it_over(collector: Collector) -> None:
    subject = TracedRun(run_id=uuid4(), thread_id=uuid4(), graph_id="line")
    with sending(load_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})):
        assert tracing.recorder is not None
        begun = tracing.recorder.attempt_span(
            subject, {}, attempt=1, worker_id=None, graph_name="line", given_back=1.0, claim_began=2**62
        )
        # A worker that was only thought to be dead.
        AttemptTrace(begun).ended(None)
        tracing.recorder.lost_attempt(
            subject, {}, attempt=1, graph_name="line", claimed_at=datetime.now(UTC), poisoned=True
        )
    [attempt] = collector.named("holdfast.attempt")
    assert (attempt.attributes["holdfast.outcome"], attempt.attributes["holdfast.dead_letter"]) == ("lost", "poison")
    assert collector.named("line")[0].parent_id == attempt.span_id


def test_a_run_that_nobody_asks_for_at_the_moment_goes_on_with_the_trace_of_the_one_before(
    collector: Collector,
) -> None:
    subject = TracedRun(run_id=uuid4(), thread_id=uuid4())
    with sending(load_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})):
        assert tracing.recorder is not None
        with tracing.recorder.creation_span(subject, {}, 0.0) as asking:
            pass
        # The answer to its question, by default.
        with tracing.recorder.creation_span(subject, asking, 0.0) as answering:
            assert tracing.stored_trace(answering) != tracing.stored_trace(asking)
    one, two = collector.named("holdfast.create")
    assert (two.trace_id, two.parent_id, one.parent_id) == (one.trace_id, one.span_id, "")


def test_steps_are_recorded_where_the_graph_is_and_not_in_the_threads_of_nodes(collector: Collector) -> None:
    async def walk() -> None:
        with patch.object(asyncio.get_running_loop(), "run_in_executor") as elsewhere:
            await line(first, last).ainvoke(cast(Any, GO))
        elsewhere.assert_not_called()

    with sending(load_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})):
        asyncio.run(walk())
    assert {"first", "last"} <= {span.name for span in collector.spans}


def test_inputs_can_be_hidden(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENINFERENCE_HIDE_INPUTS", "true")
    with sending(load_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})):
        line(hello).invoke({"words": ["a secret"]})
    assert {span.name for span in collector.spans} >= {"hello"}
    assert "a secret" not in repr([span.attributes.get("input.value") for span in collector.spans])


def hello(state: Any) -> dict[str, Any]:
    return {"words": ["hello"]}


@pytest.mark.expects_errors("process.refused")
def test_without_the_packages_the_server_says_what_to_install_and_does_not_start() -> None:
    environ = {"HOLDFAST_TRACES": "true", "DATABASE_URL": "postgresql://nowhere/none"}
    with Program([sys.executable, "-c", MISSING, PROJECT], environ=environ) as program:
        code = program.wait(60)
    assert code == ExitCode.CONFIG, program.output
    assert "holdfast[traces]" in program.output
    assert "openinference-instrumentation-langchain" in program.output
    assert "Traceback" not in program.output


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "x"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"HOLDFAST_TRACES": "true"}, "http://localhost:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/in"}, "https://c/in"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "no"}, "http://c/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "HOLDFAST_TRACES": "false"}, None),
        # Somebody else's, and for them to understand.
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_TRACES_SAMPLER": "mine"}, None),
    ],
    ids=str,
)
def test_when_traces_are_sent_and_where(environ: dict[str, str], expected: str | None) -> None:
    settings = load_settings(environ)
    assert (settings.traces_url if settings.tracing else None) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HOLDFAST_TRACES": "perhaps"}, ["HOLDFAST_TRACES=perhaps", "must be true or false"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, ["OTEL_EXPORTER_OTLP_ENDPOINT=", "http://"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://:4318"}, ["OTEL_EXPORTER_OTLP_ENDPOINT=http://:4318", "http://"]),
        ({"HOLDFAST_TRACES": "1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["PROTOCOL=grpc", "http/protobuf"]),
        ({"HOLDFAST_TRACES": "1", "OTEL_TRACES_SAMPLER": "some"}, ["OTEL_TRACES_SAMPLER=some", "traceidratio"]),
        ({"HOLDFAST_TRACES": "1", "OTEL_TRACES_EXPORTER": "zipkin"}, ["OTEL_TRACES_EXPORTER=zipkin", "otlp"]),
        (
            {"HOLDFAST_TRACES": "1", "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"},
            ["OTEL_TRACES_SAMPLER_ARG=2", "0 to 1"],
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_the_setting_the_value_and_the_rule(
    environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(environ)
    for word in words:
        assert word in str(error.value)


def test_span_that_cannot_be_encoded_is_lost_and_no_other(collector: Collector) -> None:
    """Names and messages may come from graph code, and a batch has spans of many runs."""
    with sending(load_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})), capture_logs() as logs:
        assert tracing.recorder is not None
        tracer = tracing.recorder._provider.get_tracer("graph code")
        tracer.start_span("before").end()
        tracer.start_span("half a \ud83d character").end()
        late = tracer.start_span("late", start_time=2**70)
        late.end()
        tracer.start_span("after").end()
        tracing.recorder._provider.force_flush()
        assert tracing.recorder.losses.dropped == 2
    assert sorted(span.name for span in collector.spans) == ["after", "before"]
    assert [entry["event"] for entry in logs if entry["event"] == "traces.dropped"] == ["traces.dropped"]


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error",
    [Speechless(), ValueError("half a \ud83d character"), ValueError("x" * 10_000_000)],
    ids=lambda e: type(e).__name__,
)
def test_attempt_that_fails_with_a_hostile_error_is_traced(collector: Collector, error: Exception) -> None:
    subject = TracedRun(run_id=uuid4(), thread_id=uuid4(), graph_id="line")
    with sending(load_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})):
        assert tracing.recorder is not None
        begun = tracing.recorder.attempt_span(
            subject, {}, attempt=1, worker_id=None, graph_name="line", given_back=1.0, claim_began=2**62
        )
        AttemptTrace(begun).crashed(error)
    [attempt] = collector.named("holdfast.attempt")
    assert attempt.attributes["holdfast.outcome"] == "crashed"


# What this version does not write into a run's kwargs.
TRACE_KWARG = {
    "number": 5,
    "traceparent is a number": {"traceparent": 5},
    "traceparent is a list": {"traceparent": [[]]},
    "traceparent in words": {"traceparent": "half a \ud83d character", "tracestate": "\ud83d"},
    "queued at the end of time": {"queued_at": 2**70},
    "queued before time": {"queued_at": -(2**70)},
    "queued in words": {"queued_at": "now"},
}


@pytest.mark.parametrize("stored", TRACE_KWARG)
async def test_run_with_a_hostile_trace_is_executed_and_so_are_its_neighbours(
    database_url: str, database: Database, collector: Collector, stored: str
) -> None:
    async def answer(state: Words) -> dict[str, Any]:
        return {"words": ["done"]}

    settings = quick_settings(database_url, otlp_endpoint=collector.url)
    kwargs = {"input": GO, "config": {"run_name": "half a \ud83d character"}, "trace": TRACE_KWARG[stored]}
    hostile = await post_run(database, "graph", input=GO)
    # As escapes.
    await query(database, "UPDATE run SET kwargs = %s RETURNING 1", json.dumps(kwargs))
    usual = await post_run(database, "graph", input=GO)
    with sending(settings):
        async with running_worker(settings, catalog_of(graph=line(answer))):
            for created in (hostile, usual):
                assert (await run_ended(database, created.run["run_id"]))["status"] == "success"
    ended = {span.run_id for span in collector.named("holdfast.attempt")}
    assert ended == {str(created.run["run_id"]) for created in (hostile, usual)}


async def test_webhook_of_a_run_of_another_shape_is_sent_without_a_span(collector: Collector) -> None:
    class Sender:
        async def send(self, delivery: Any) -> str:
            return "sent"

    delivery: Any = SimpleNamespace(run={}, run_id=uuid4(), delivery_id=uuid4(), attempts=1, url="http://[::1")
    sender: Any = Sender()
    with sending(load_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})):
        sent: Any = await send_traced(sender, delivery)
    assert sent == "sent"

"""Creates the spans of Holdfast.

    POST /threads/{thread_id}/runs/stream        the request, below the client's own span if it sent one
    └── holdfast.create                          its context is stored with the run
        ├── holdfast.queue                       from created, or handed back, to claimed
        ├── holdfast.claim
        ├── holdfast.attempt                     and one for each further attempt, linked to the one before
        │   ├── (the graph)                      by OpenInference: steps, models, tools
        │   │   └── holdfast.create              of a child, below the step that spawned it
        │   └── holdfast.journal.commit
        └── holdfast.webhook                     one for each try

The ids of the spans of an attempt and its graph are computed from the run and the number of the attempt. So the next
attempt can link to them, and the upkeep can write these spans for a worker that was killed.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from openinference.instrumentation.langchain import LangChainInstrumentor
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import holdfast
from holdfast.telemetry.exceptions import message_of, replace_surrogates, run_traceback, type_and_place
from holdfast.telemetry.otlp import RUN_ATTRIBUTES, DroppedSpans
from holdfast.telemetry.steps import ATTEMPT, NEXT_SPAN_ID, NEXT_TRACE_ID, AttemptContext, current_step
from holdfast.telemetry.tracing import QUEUED_AT, TRACE_KWARG, TracedRun, stored_trace

NANOSECONDS = 1_000_000_000
Attributes = Mapping[str, str | int | float | bool]
W3C = TraceContextTextMapPropagator()
NO_CONTEXT = Context()
GRAPH = b"graph"


class Recorder:
    """Creates the spans of one process."""

    def __init__(self, provider: TracerProvider, losses: DroppedSpans, *, langchain: bool) -> None:
        self._provider = provider
        self.losses = losses
        self._tracer = provider.get_tracer("holdfast", holdfast.__version__)
        self._langchain = LangChainInstrumentor() if langchain else None
        if self._langchain is not None:
            _instrument(self._langchain, provider)
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            # For graph code that records spans itself. A provider that the project has configured is kept.
            trace.set_tracer_provider(provider)

    def close(self, timeout_seconds: float) -> None:
        """Export the remaining spans within the timeout."""
        if self._langchain is not None:
            self._langchain.uninstrument()
        # `shutdown` waits for a collector that does not answer, and has no timeout.
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(timeout_seconds)
        self.losses.end_outage(ending=True)

    # --- requests ---------------------------------------------------------------------------------

    @contextmanager
    def request_span(self, method: str, path: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        """The span of a request, below the span that the client has sent, if any."""
        attributes = {"http.request.method": method, "url.path": path}
        if agent := headers.get("user-agent"):
            attributes["user_agent.original"] = agent
        parent = W3C.extract(headers, context=NO_CONTEXT)
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes)
        with trace.use_span(span, end_on_exit=True):
            yield RequestSpan(span, method)

    @contextmanager
    def continue_trace(self, headers: Mapping[str, str]) -> Iterator[None]:
        """Place the spans of this block directly below the client's span. A WebSocket, which may be open for days, has
        no span itself."""
        token = contexts.attach(W3C.extract(headers, context=NO_CONTEXT))
        try:
            yield
        finally:
            contexts.detach(token)

    def outgoing_headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        W3C.inject(carrier)
        return carrier

    def current_ids(self) -> dict[str, str]:
        span_context = trace.get_current_span().get_span_context()
        if not span_context.is_valid:
            return {}
        return {
            "trace_id": trace.format_trace_id(span_context.trace_id),
            "span_id": trace.format_span_id(span_context.span_id),
        }

    # --- the life of a run ------------------------------------------------------------------------

    @contextmanager
    def creation_span(
        self, subject: TracedRun, kwargs: Mapping[str, Any], after_seconds: float
    ) -> Iterator[dict[str, Any]]:
        """The span of a run's creation. Yields the kwargs of the run with the context of the span, which connects it to
        the spans of the processes that execute the run.

        Its parent is the step of a graph that spawns a child, or the current request. Without them, a run with the
        kwargs of an earlier run (the default answer to an interrupt, for example) continues the trace of that run.
        """
        parent = self._current_context() or self._stored_context(stored_trace(kwargs))
        attributes = {**subject.attributes(), "holdfast.after_seconds": after_seconds}
        # The span describes the new run, not the run that spawns it.
        bound = RUN_ATTRIBUTES.set({})
        try:
            span = self._tracer.start_span("holdfast.create", parent, SpanKind.PRODUCER, attributes)
        finally:
            RUN_ATTRIBUTES.reset(bound)
        with trace.use_span(span, end_on_exit=True, record_exception=False):
            stored: dict[str, Any] = {}
            W3C.inject(stored)
            stored[QUEUED_AT] = time.time_ns() + int(after_seconds * NANOSECONDS)
            yield {**kwargs, TRACE_KWARG: stored}

    def attempt_span(
        self,
        subject: TracedRun,
        stored: Mapping[str, Any],
        *,
        attempt: int,
        worker_id: UUID | None,
        graph_name: str,
        given_back: float,
        claim_began: int,
    ) -> AttemptSpan:
        """Start the span of an attempt, and write those of its wait in the queue and of its claim.

        `graph_name`: LangChain's name of the graph. `given_back`: seconds since an earlier attempt ended.
        `claim_began`: when the claim began.
        """
        now = time.time_ns()
        attributes = subject.attributes() | {"holdfast.attempt": attempt, "holdfast.worker_id": str(worker_id or "")}
        created = stored.get(QUEUED_AT) if attempt == 1 else None
        queued_at = created if isinstance(created, int) else now - int(given_back * NANOSECONDS)
        queued_at = min(queued_at, claim_began)
        parent = self._stored_context(stored)
        span = self._start_attempt_span(subject, parent, attempt, attributes, now)
        around = parent or trace.set_span_in_context(span, NO_CONTEXT)
        for name, begin, end in (("holdfast.queue", queued_at, claim_began), ("holdfast.claim", claim_began, now)):
            part = self._tracer.start_span(name, around, attributes=attributes, start_time=begin)
            part.end(end)
        place = AttemptContext(span, graph_name, _attempt_id(subject.run_id, attempt, GRAPH))
        return AttemptSpan(self._tracer, place, attributes)

    @contextmanager
    def suppress_errors(self) -> Iterator[None]:
        """Count an exception in the block as a dropped span. An error in tracing must not fail a loop or a run."""
        try:
            yield
        except Exception as error:
            self.losses.add(1, type_and_place(error))

    def lost_attempt(
        self,
        subject: TracedRun,
        stored: Mapping[str, Any],
        *,
        attempt: int,
        graph_name: str,
        claimed_at: datetime,
        poisoned: bool,
    ) -> None:
        """Write the spans of an attempt whose worker was lost. `claimed_at`: when the attempt began."""
        now = time.time_ns()
        attributes = subject.attributes() | {"holdfast.attempt": attempt, "holdfast.outcome": "lost"}
        begun = min(int(claimed_at.timestamp() * 1_000_000) * 1000, now)
        span = self._start_attempt_span(subject, self._stored_context(stored), attempt, attributes, begun)
        if poisoned:
            span.set_attribute("holdfast.dead_letter", "poison")
        wanted = NEXT_SPAN_ID.set(_attempt_id(subject.run_id, attempt, GRAPH))
        try:
            graph = self._tracer.start_span(
                replace_surrogates(graph_name),
                trace.set_span_in_context(span, NO_CONTEXT),
                attributes={**attributes, "openinference.span.kind": "CHAIN"},
                start_time=begun,
            )
        finally:
            NEXT_SPAN_ID.reset(wanted)
        for lost in (graph, span):
            lost.set_status(Status(StatusCode.ERROR, "The worker was lost."))
            lost.end(now)

    @contextmanager
    def delivery_span(
        self, subject: TracedRun, stored: Mapping[str, Any], attributes: Attributes
    ) -> Iterator[DeliverySpan]:
        """The span of one attempt to deliver a webhook."""
        parent = self._stored_context(stored) or NO_CONTEXT
        wanted = NEXT_TRACE_ID.set(subject.run_id.int)
        try:
            span = self._tracer.start_span(
                "holdfast.webhook", parent, SpanKind.CLIENT, {**subject.attributes(), **attributes}
            )
        finally:
            NEXT_TRACE_ID.reset(wanted)
        with trace.use_span(span, end_on_exit=True):
            yield DeliverySpan(span)

    def _start_attempt_span(
        self, subject: TracedRun, parent: Context | None, attempt: int, attributes: Attributes, begun: int
    ) -> Span:
        # A run that was created without traces gets a computed trace id, so that all its attempts are in one trace.
        trace_id = NEXT_TRACE_ID.set(subject.run_id.int)
        span_id = NEXT_SPAN_ID.set(_attempt_id(subject.run_id, attempt))
        try:
            links = []
            if attempt > 1:
                span_context = trace.get_current_span(parent or NO_CONTEXT).get_span_context()
                trace_id_before = span_context.trace_id if span_context.is_valid else subject.run_id.int
                before = SpanContext(
                    trace_id_before,
                    _attempt_id(subject.run_id, attempt - 1),
                    is_remote=True,
                    trace_flags=TraceFlags(TraceFlags.SAMPLED),
                )
                links.append(Link(before, {"holdfast.attempt": attempt - 1}))
            about = {**attributes, "openinference.span.kind": "CHAIN"}
            return self._tracer.start_span(
                "holdfast.attempt", parent or NO_CONTEXT, SpanKind.CONSUMER, about, links, start_time=begun
            )
        finally:
            NEXT_SPAN_ID.reset(span_id)
            NEXT_TRACE_ID.reset(trace_id)

    def _current_context(self) -> Context | None:
        """The context of the caller: the current step of a graph, or the current span."""
        if (step := current_step()) is not None:
            return step
        return contexts.get_current() if trace.get_current_span().get_span_context().is_valid else None

    def _stored_context(self, stored: Mapping[str, Any]) -> Context | None:
        found = W3C.extract(stored, context=NO_CONTEXT)
        return found if trace.get_current_span(found).get_span_context().is_valid else None


class RequestSpan:
    """The span of a request while it is answered."""

    def __init__(self, span: Span, method: str) -> None:
        self._span = span
        self._method = method

    def routed(self, route: str) -> None:
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attribute("http.route", route)

    def answered(self, status: int, request_id: str | None) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if request_id is not None:
            self._span.set_attribute("holdfast.request_id", request_id)
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))


class DeliverySpan:
    """The span of a webhook while it is sent."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def answered(self, status: int | None, error: str | None) -> None:
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))


class AttemptSpan:
    """The span of a running attempt. If the worker is lost, it is not exported; the upkeep writes it instead."""

    def __init__(self, tracer: trace.Tracer, place: AttemptContext, attributes: dict[str, str | int]) -> None:
        self._tracer = tracer
        self._span = place.span
        self._attributes = attributes
        self._inside = contexts.set_value(ATTEMPT, place, trace.set_span_in_context(place.span, NO_CONTEXT))
        self._commits = 0

    def enter(self) -> None:
        """Place all further spans of this task, and of the tasks that it starts, below this span, and give them the
        attributes of the run."""
        contexts.attach(self._inside)
        RUN_ATTRIBUTES.set(self._attributes)

    def committed(self, began: int, attributes: Attributes, *, shown: bool) -> None:
        """Count a commit of the journal that contains data of the run. `shown`: also write a span."""
        self._commits += 1
        if shown:
            span = self._tracer.start_span(
                "holdfast.journal.commit", self._inside, attributes={**self._attributes, **attributes}, start_time=began
            )
            span.end()

    def failed(self, error: BaseException) -> None:
        """Record the error of an attempt that will be retried."""
        # `record_exception` is not used: it calls the `__str__` of the error, which may fail or return a huge text.
        details = {"exception.type": type(error).__qualname__, "exception.message": message_of(error)}
        self._span.add_event("exception", {**details, "exception.stacktrace": run_traceback(error)})
        self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {message_of(error)}"))

    def end(
        self,
        outcome: str,
        attributes: Attributes,
        *,
        error: Mapping[str, str] | None = None,
        traceback: str | None = None,
        failed: bool = False,
    ) -> None:
        span = self._span
        span.set_attributes({"holdfast.outcome": outcome, "holdfast.journal.commits": self._commits, **attributes})
        if error is not None and failed:
            details = {"exception.type": error["error"], "exception.message": error["message"]}
            span.add_event(
                "exception", details if traceback is None else {**details, "exception.stacktrace": traceback}
            )
            span.set_status(Status(StatusCode.ERROR, f"{error['error']}: {error['message']}"))
        elif failed:
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end()


def _attempt_id(run_id: UUID, attempt: int, part: bytes = b"") -> int:
    digest = hashlib.sha256(run_id.bytes + attempt.to_bytes(8) + part).digest()
    return int.from_bytes(digest[:8]) or 1


def _instrument(instrumentor: LangChainInstrumentor, provider: TracerProvider) -> None:
    """Record LangChain's calls, and with them the steps of graphs. OpenInference's variables, such as
    `OPENINFERENCE_HIDE_INPUTS`, hide the data of these calls."""
    from openinference.instrumentation.langchain import _tracer as details

    # A step that waits for its children has not failed.
    for expected in (r"^WaitsForChildren\(", r"^GraphDrained\("):
        if expected not in details.IGNORED_EXCEPTION_PATTERNS:
            details.IGNORED_EXCEPTION_PATTERNS.append(expected)
    instrumentor.instrument(tracer_provider=provider)
    handler = getattr(instrumentor, "_tracer", None)
    if handler is not None:
        # Call the handler directly in the task of the graph, so that events stay in order, and not in the thread pool,
        # which plain nodes need.
        handler.run_inline = True

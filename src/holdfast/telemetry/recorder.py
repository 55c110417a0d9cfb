"""The spans of Holdfast, and how they hang together.

    POST /threads/{thread_id}/runs/stream        the request, below the client's own span if it sent one
    └── holdfast.create                          its place is stored with the run
        ├── holdfast.queue                       from created, or given back, to claimed
        ├── holdfast.claim
        ├── holdfast.attempt                     and one for each further attempt, linked to the one before
        │   ├── (the graph)                      by OpenInference: steps, models, tools
        │   │   └── holdfast.create              of a child, below the step that spawned it
        │   └── holdfast.journal.commit
        └── holdfast.webhook                     one for each try

The ids of an attempt's span and of its graph's are computed from the run and the number of the attempt. So the next
attempt can point at it, and whoever finds that its worker is gone can write the spans that the worker could not.
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
from holdfast.telemetry.exceptions import clean, kind_and_place, message_of, run_traceback
from holdfast.telemetry.otlp import BOUND, Losses
from holdfast.telemetry.steps import ATTEMPT, WANTED_SPAN, WANTED_TRACE, Place, step_here
from holdfast.telemetry.tracing import QUEUED_AT, STORED, Subject, stored_trace

NANOSECONDS = 1_000_000_000
Attributes = Mapping[str, str | int | float | bool]
W3C = TraceContextTextMapPropagator()
NOWHERE = Context()
GRAPH = b"graph"


class Recorder:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider, losses: Losses, *, langchain: bool) -> None:
        self._provider = provider
        self.losses = losses
        self._tracer = provider.get_tracer("holdfast", holdfast.__version__)
        self._langchain = LangChainInstrumentor() if langchain else None
        if self._langchain is not None:
            _instrument(self._langchain, provider)
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            # For graph code that records spans of its own. A project that has set up tracing keeps what it has.
            trace.set_tracer_provider(provider)

    def close(self, patience: float) -> None:
        """Send what is left, for as long as the patience lasts."""
        if self._langchain is not None:
            self._langchain.uninstrument()
        # It waits for a collector that does not answer, and cannot be told how long.
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(patience)
        self.losses.over(ending=True)

    # --- requests ---------------------------------------------------------------------------------

    @contextmanager
    def serving(self, method: str, path: str, headers: Mapping[str, str]) -> Iterator[Served]:
        """The span of a request, below the client's if it says which that is."""
        attributes = {"http.request.method": method, "url.path": path}
        if agent := headers.get("user-agent"):
            attributes["user_agent.original"] = agent
        parent = W3C.extract(headers, context=NOWHERE)
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, attributes)
        with trace.use_span(span, end_on_exit=True):
            yield Served(span, method)

    @contextmanager
    def going_on(self, headers: Mapping[str, str]) -> Iterator[None]:
        """What is done in here hangs below the client's span, without one in between: a socket may be open for days."""
        token = contexts.attach(W3C.extract(headers, context=NOWHERE))
        try:
            yield
        finally:
            contexts.detach(token)

    def outgoing_headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        W3C.inject(carrier)
        return carrier

    def current_ids(self) -> dict[str, str]:
        place = trace.get_current_span().get_span_context()
        if not place.is_valid:
            return {}
        return {
            "trace_id": trace.format_trace_id(place.trace_id),
            "span_id": trace.format_span_id(place.span_id),
        }

    # --- the life of a run ------------------------------------------------------------------------

    @contextmanager
    def creating(self, subject: Subject, kwargs: Mapping[str, Any], after_seconds: float) -> Iterator[dict[str, Any]]:
        """The span of a run's creation. Gives the run's kwargs with the span's place in them: that is all that connects
        this process with those that will execute the run.

        Below the step of a graph that spawns a child, or the request at hand. A run that nobody asks for at this moment
        and that has the kwargs of another, as the answer to a question that has run out of time, goes on with that
        one's trace.
        """
        parent = self._here() or self._place(stored_trace(kwargs))
        attributes = {**subject.attributes(), "holdfast.after_seconds": after_seconds}
        # It is about another run than the one that spawns it.
        bound = BOUND.set({})
        try:
            span = self._tracer.start_span("holdfast.create", parent, SpanKind.PRODUCER, attributes)
        finally:
            BOUND.reset(bound)
        with trace.use_span(span, end_on_exit=True, record_exception=False):
            stored: dict[str, Any] = {}
            W3C.inject(stored)
            stored[QUEUED_AT] = time.time_ns() + int(after_seconds * NANOSECONDS)
            yield {**kwargs, STORED: stored}

    def attempt(
        self,
        subject: Subject,
        stored: Mapping[str, Any],
        *,
        attempt: int,
        worker_id: UUID | None,
        graph_name: str,
        given_back: float,
        looked_at: int,
    ) -> AttemptSpan:
        """The span of an attempt that begins now, with those of its wait in the queue and of its claim, which are over.

        `graph_name`: what LangChain will call the graph; `given_back`: seconds since an earlier attempt ended;
        `looked_at`: when the worker began to look for work.
        """
        now = time.time_ns()
        attributes = subject.attributes() | {"holdfast.attempt": attempt, "holdfast.worker_id": str(worker_id or "")}
        created = stored.get(QUEUED_AT) if attempt == 1 else None
        queued_at = created if isinstance(created, int) else now - int(given_back * NANOSECONDS)
        queued_at = min(queued_at, looked_at)
        parent = self._place(stored)
        span = self._attempt_span(subject, parent, attempt, attributes, now)
        around = parent or trace.set_span_in_context(span, NOWHERE)
        for name, begin, end in (("holdfast.queue", queued_at, looked_at), ("holdfast.claim", looked_at, now)):
            part = self._tracer.start_span(name, around, attributes=attributes, start_time=begin)
            part.end(end)
        place = Place(span, graph_name, _attempt_id(subject.run_id, attempt, GRAPH))
        return AttemptSpan(self._tracer, place, attributes)

    @contextmanager
    def harmless(self) -> Iterator[None]:
        """For spans that are recorded by loops, and beside a run's own failure: what raises in here is counted as a
        lost span, and is nobody else's failure."""
        try:
            yield
        except Exception as error:
            self.losses.add(1, kind_and_place(error))

    def lost_attempt(
        self,
        subject: Subject,
        stored: Mapping[str, Any],
        *,
        attempt: int,
        graph_name: str,
        claimed_at: datetime,
        poisoned: bool,
    ) -> None:
        """The spans of an attempt whose worker is gone and cannot write them. `claimed_at`: when it began."""
        now = time.time_ns()
        attributes = subject.attributes() | {"holdfast.attempt": attempt, "holdfast.outcome": "lost"}
        begun = min(int(claimed_at.timestamp() * 1_000_000) * 1000, now)
        span = self._attempt_span(subject, self._place(stored), attempt, attributes, begun)
        if poisoned:
            span.set_attribute("holdfast.dead_letter", "poison")
        wanted = WANTED_SPAN.set(_attempt_id(subject.run_id, attempt, GRAPH))
        try:
            graph = self._tracer.start_span(
                clean(graph_name),
                trace.set_span_in_context(span, NOWHERE),
                attributes={**attributes, "openinference.span.kind": "CHAIN"},
                start_time=begun,
            )
        finally:
            WANTED_SPAN.reset(wanted)
        for lost in (graph, span):
            lost.set_status(Status(StatusCode.ERROR, "The worker was lost."))
            lost.end(now)

    @contextmanager
    def delivering(self, subject: Subject, stored: Mapping[str, Any], attributes: Attributes) -> Iterator[Delivering]:
        """The span of one try to deliver a webhook."""
        parent = self._place(stored) or NOWHERE
        wanted = WANTED_TRACE.set(subject.run_id.int)
        try:
            span = self._tracer.start_span(
                "holdfast.webhook", parent, SpanKind.CLIENT, {**subject.attributes(), **attributes}
            )
        finally:
            WANTED_TRACE.reset(wanted)
        with trace.use_span(span, end_on_exit=True):
            yield Delivering(span)

    def _attempt_span(
        self, subject: Subject, parent: Context | None, attempt: int, attributes: Attributes, begun: int
    ) -> Span:
        # A run that was created before traces were on has a trace all the same, and the same for all its attempts.
        trace_id = WANTED_TRACE.set(subject.run_id.int)
        span_id = WANTED_SPAN.set(_attempt_id(subject.run_id, attempt))
        try:
            links = []
            if attempt > 1:
                place = trace.get_current_span(parent or NOWHERE).get_span_context()
                trace_id_before = place.trace_id if place.is_valid else subject.run_id.int
                before = SpanContext(
                    trace_id_before,
                    _attempt_id(subject.run_id, attempt - 1),
                    is_remote=True,
                    trace_flags=TraceFlags(TraceFlags.SAMPLED),
                )
                links.append(Link(before, {"holdfast.attempt": attempt - 1}))
            about = {**attributes, "openinference.span.kind": "CHAIN"}
            return self._tracer.start_span(
                "holdfast.attempt", parent or NOWHERE, SpanKind.CONSUMER, about, links, start_time=begun
            )
        finally:
            WANTED_SPAN.reset(span_id)
            WANTED_TRACE.reset(trace_id)

    def _here(self) -> Context | None:
        """Where the caller is: in the step of a graph, or in a span of whatever kind."""
        if (step := step_here()) is not None:
            return step
        return contexts.get_current() if trace.get_current_span().get_span_context().is_valid else None

    def _place(self, stored: Mapping[str, Any]) -> Context | None:
        found = W3C.extract(stored, context=NOWHERE)
        return found if trace.get_current_span(found).get_span_context().is_valid else None


class Served:
    """A request while it is answered."""

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


class Delivering:
    """A webhook while it is sent."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def answered(self, status: int | None, error: str | None) -> None:
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))


class AttemptSpan:
    """An attempt while it is made. Nothing is sent of one that is not ended: that is for whoever takes the run over."""

    def __init__(self, tracer: trace.Tracer, place: Place, attributes: dict[str, str | int]) -> None:
        self._tracer = tracer
        self._span = place.span
        self._attributes = attributes
        self._inside = contexts.set_value(ATTEMPT, place, trace.set_span_in_context(place.span, NOWHERE))
        self._commits = 0

    def enter(self) -> None:
        """From here on, in this task and in all that it starts, spans are below this one and say which run they are
        about."""
        contexts.attach(self._inside)
        BOUND.set(self._attributes)

    def committed(self, began: int, attributes: Attributes, *, shown: bool) -> None:
        """A commit of the journal that has written something of the run."""
        self._commits += 1
        if shown:
            span = self._tracer.start_span(
                "holdfast.journal.commit", self._inside, attributes={**self._attributes, **attributes}, start_time=began
            )
            span.end()

    def failed(self, error: BaseException) -> None:
        """What the attempt failed of, when there will be another."""
        # Not `record_exception`: it asks the error for its message, which may fail or be of any size.
        told = {"exception.type": type(error).__qualname__, "exception.message": message_of(error)}
        self._span.add_event("exception", {**told, "exception.stacktrace": run_traceback(error)})
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
            told = {"exception.type": error["error"], "exception.message": error["message"]}
            span.add_event("exception", told if traceback is None else {**told, "exception.stacktrace": traceback})
            span.set_status(Status(StatusCode.ERROR, f"{error['error']}: {error['message']}"))
        elif failed:
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end()


def _attempt_id(run_id: UUID, attempt: int, part: bytes = b"") -> int:
    digest = hashlib.sha256(run_id.bytes + attempt.to_bytes(8) + part).digest()
    return int.from_bytes(digest[:8]) or 1


def _instrument(instrumentor: LangChainInstrumentor, provider: TracerProvider) -> None:
    """Have LangChain's calls recorded, and with them the steps of graphs. What is in them is hidden by OpenInference's
    own switches, `OPENINFERENCE_HIDE_INPUTS` and others."""
    from openinference.instrumentation.langchain import _tracer as details

    # A step that waits for its children has not failed.
    for expected in (r"^WaitsForChildren\(", r"^GraphDrained\("):
        if expected not in details.IGNORED_EXCEPTION_PATTERNS:
            details.IGNORED_EXCEPTION_PATTERNS.append(expected)
    instrumentor.instrument(tracer_provider=provider)
    handler = getattr(instrumentor, "_tracer", None)
    if handler is not None:
        # At once and in the order of events, where the graph is; and not in a thread of the pool that plain nodes need.
        handler.run_inline = True

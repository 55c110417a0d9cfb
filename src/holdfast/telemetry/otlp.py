"""Exports spans over OTLP: in batches, from a separate thread.

Code that records a span never waits for the export. Spans that are not exported in time are dropped and counted, and
the first drop of an outage is logged.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased

import holdfast
from holdfast.settings import Settings
from holdfast.telemetry.steps import StepProvider

log = structlog.get_logger(__name__)

# The attributes of the run, for all spans that start in this context, also those of libraries and graph code.
RUN_ATTRIBUTES: ContextVar[dict[str, str | int]] = ContextVar("holdfast_span_attributes", default={})  # noqa: B039 (never changed)


class BindAttributes(SpanProcessor):
    """Adds the attributes of the run to all spans in it, also those of LangChain and of graph code."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if bound := RUN_ATTRIBUTES.get():
            span.set_attributes({name: value for name, value in bound.items() if name not in (span.attributes or {})})


class DroppedSpans:
    """Counts dropped spans, and logs the begin and the end of an outage of the collector."""

    def __init__(self) -> None:
        self.dropped = 0
        self._since_outage = 0
        self._process_ends = False
        self._lock = threading.Lock()

    def add(self, number: int, reason: str) -> None:
        with self._lock:
            first = self._since_outage == 0 and not self._process_ends
            self.dropped += number
            self._since_outage += number
        if first:
            log.warning("traces.dropped", spans=number, error=reason)

    def end_outage(self, *, ending: bool = False) -> None:
        """End the outage: an export has succeeded or, with `ending`, the process ends."""
        with self._lock:
            lost, self._since_outage = self._since_outage, 0
            # Exports that fail after this are not logged.
            self._process_ends = self._process_ends or ending
        if lost:
            log.info("traces.ended" if ending else "traces.recovered", dropped=lost)


class CountedExporter(SpanExporter):
    """Wraps the OTLP exporter and counts its results. Keeps its last log line as the reason of a failure."""

    def __init__(self, exporter: SpanExporter, losses: DroppedSpans) -> None:
        self._exporter = exporter
        self._losses = losses
        self.exported = 0
        self._last_log = _LastMessage()
        logger = logging.getLogger("opentelemetry.exporter.otlp")
        logger.addHandler(self._last_log)
        logger.propagate = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans. If one of them cannot be encoded, the exporter fails the whole batch: then export the
        others."""
        self.exported += len(spans)
        result, reason = self._send(spans)
        if result is not SpanExportResult.SUCCESS:
            fit = [span for span in spans if _is_encodable(span)]
            if 0 < len(fit) < len(spans):
                self._losses.add(len(spans) - len(fit), reason)
                spans = fit
                result, reason = self._send(spans)
        if result is SpanExportResult.SUCCESS:
            self._losses.end_outage()
        else:
            self._losses.add(len(spans), reason)
        return result

    def _send(self, spans: Sequence[ReadableSpan]) -> tuple[SpanExportResult, str]:
        try:
            return self._exporter.export(spans), self._last_log.message
        except Exception as error:
            return SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class SpanQueue(BatchSpanProcessor):
    """A bounded queue of spans before the exporter. If it is full, the oldest spans are dropped."""

    def __init__(self, exporter: CountedExporter, losses: DroppedSpans, **options: Any) -> None:
        self._counted = exporter
        self._losses = losses
        self._max_spans: int = options.get("max_queue_size") or BatchSpanProcessor._default_max_queue_size()  # type: ignore[no-untyped-call]
        self._received = 0
        self._overflowed = 0
        self._counting = threading.Lock()
        # The SDK logs each dropped span.
        logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.CRITICAL)
        super().__init__(exporter, **options)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            with self._counting:
                self._received += 1
                full = self._received - self._overflowed - self._counted.exported > self._max_spans
                self._overflowed += full
            if full:
                self._losses.add(1, f"more than {self._max_spans} spans wait to be sent (OTEL_BSP_MAX_QUEUE_SIZE)")
        super().on_end(span)


def _is_encodable(span: ReadableSpan) -> bool:
    """Whether a span can be encoded. Graph code may use a lone surrogate in a name."""
    try:
        encode_spans([span]).SerializePartialToString()
    except Exception:
        return False
    return True


class _LastMessage(logging.Handler):
    message = "the collector did not take them"

    def emit(self, record: logging.LogRecord) -> None:
        self.message = " ".join(record.getMessage().split())[:300]


def open_provider(settings: Settings, role: str) -> tuple[TracerProvider, DroppedSpans]:
    """Create the tracer provider of the process, with a thread that exports its spans. OpenTelemetry reads the limits
    of the queue, and everything else that is not a setting of Holdfast, from the environment."""
    provider = StepProvider(_resource(settings, role), _sampler(settings))
    provider.add_span_processor(BindAttributes())
    losses = DroppedSpans()
    sender = OTLPSpanExporter(endpoint=settings.traces_url, headers=settings.traces_headers or None)
    exporter = CountedExporter(sender, losses)
    provider.add_span_processor(SpanQueue(exporter, losses))
    return provider, losses


def _sampler(settings: Settings) -> Sampler:
    """The configured sampler. With a parent-based one, the client's decision about its trace applies."""
    name = (settings.otel_sampler or "parentbased_always_on").lower()
    root: Sampler
    if name.endswith("traceidratio"):
        root = TraceIdRatioBased(float(settings.otel_sampler_arg or 1.0))
    else:
        root = ALWAYS_ON if name.endswith("always_on") else ALWAYS_OFF
    return ParentBased(root) if name.startswith("parentbased_") else root


def _resource(settings: Settings, role: str) -> Resource:
    found = Resource.create(
        {
            "service.version": holdfast.__version__,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            "holdfast.role": role,
        }
    )
    name = settings.otel_service_name
    if name is None and str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        name = "holdfast"
    return found if name is None else found.merge(Resource({SERVICE_NAME: name}))

"""How spans leave the process: in batches, from a thread of their own, over OTLP.

Whoever records a span never waits for whoever takes it. What is not taken in time is dropped, counted, and said once.
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

# What every span says that is begun in this context, whoever begins it.
BOUND: ContextVar[dict[str, str | int]] = ContextVar("holdfast_span_attributes", default={})  # noqa: B039 (never changed)


class BindAttributes(SpanProcessor):
    """Puts the run's identity on every span within it: LangChain's, and those of graph code itself."""

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if bound := BOUND.get():
            span.set_attributes({name: value for name, value in bound.items() if name not in (span.attributes or {})})


class Losses:
    """Spans that nobody will see: counted, and said once until some arrive again."""

    def __init__(self) -> None:
        self.dropped = 0
        self._since_outage = 0
        self._ended = False
        self._lock = threading.Lock()

    def add(self, number: int, reason: str) -> None:
        with self._lock:
            first = self._since_outage == 0 and not self._ended
            self.dropped += number
            self._since_outage += number
        if first:
            log.warning("traces.dropped", spans=number, error=reason)

    def over(self, *, ending: bool = False) -> None:
        """They arrive again; or, at the end of the process, nobody waits for that any more."""
        with self._lock:
            lost, self._since_outage = self._since_outage, 0
            # What is still under way then may fail at leisure.
            self._ended = self._ended or ending
        if lost:
            log.info("traces.ended" if ending else "traces.recovered", dropped=lost)


class CountedExporter(SpanExporter):
    """The OTLP exporter, and what comes of it. Its own log lines, one for each try, are kept for the reason."""

    def __init__(self, exporter: SpanExporter, losses: Losses) -> None:
        self._exporter = exporter
        self._losses = losses
        self.taken = 0
        self._heard = _LastMessage()
        logger = logging.getLogger("opentelemetry.exporter.otlp")
        logger.addHandler(self._heard)
        logger.propagate = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them. The exporter drops a batch in which one span cannot be encoded: then the others are sent."""
        self.taken += len(spans)
        result, reason = self._send(spans)
        if result is not SpanExportResult.SUCCESS:
            fit = [span for span in spans if _is_encodable(span)]
            if 0 < len(fit) < len(spans):
                self._losses.add(len(spans) - len(fit), reason)
                spans = fit
                result, reason = self._send(spans)
        if result is SpanExportResult.SUCCESS:
            self._losses.over()
        else:
            self._losses.add(len(spans), reason)
        return result

    def _send(self, spans: Sequence[ReadableSpan]) -> tuple[SpanExportResult, str]:
        try:
            return self._exporter.export(spans), self._heard.message
        except Exception as error:
            return SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Outbox(BatchSpanProcessor):
    """A bounded queue of spans before the exporter. When it is full, the oldest go."""

    def __init__(self, exporter: CountedExporter, losses: Losses, **options: Any) -> None:
        self._counted = exporter
        self._losses = losses
        self._room: int = options.get("max_queue_size") or BatchSpanProcessor._default_max_queue_size()  # type: ignore[no-untyped-call]
        self._given = 0
        self._overflowed = 0
        self._counting = threading.Lock()
        # It says that for every span.
        logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.CRITICAL)
        super().__init__(exporter, **options)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            with self._counting:
                self._given += 1
                full = self._given - self._overflowed - self._counted.taken > self._room
                self._overflowed += full
            if full:
                self._losses.add(1, f"more than {self._room} spans wait to be sent (OTEL_BSP_MAX_QUEUE_SIZE)")
        super().on_end(span)


def _is_encodable(span: ReadableSpan) -> bool:
    """Whether its names, times and status can be sent. Graph code may use half of a surrogate pair in a name."""
    try:
        encode_spans([span]).SerializePartialToString()
    except Exception:
        return False
    return True


class _LastMessage(logging.Handler):
    message = "the collector did not take them"

    def emit(self, record: logging.LogRecord) -> None:
        self.message = " ".join(record.getMessage().split())[:300]


def open_provider(settings: Settings, role: str) -> tuple[TracerProvider, Losses]:
    """The process's source of spans, with a thread that sends them. OpenTelemetry reads the limits of the queue
    and whatever else is not a setting of ours from the environment."""
    provider = StepProvider(_resource(settings, role), _sampler(settings))
    provider.add_span_processor(BindAttributes())
    losses = Losses()
    sender = OTLPSpanExporter(endpoint=settings.traces_url, headers=settings.traces_headers or None)
    exporter = CountedExporter(sender, losses)
    provider.add_span_processor(Outbox(exporter, losses))
    return provider, losses


def _sampler(settings: Settings) -> Sampler:
    """What the client has decided about its trace counts, unless a sampler is named that does not ask."""
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

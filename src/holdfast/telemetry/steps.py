"""Places the spans of graph code and of its libraries below the step that creates them.

OpenInference does not make the span of a step the current span, because a callback cannot reliably undo that. So if the
current span is still the attempt's, the step is looked up through LangChain.

Some spans have computed ids instead of random ones; see `recorder.py`.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from openinference.instrumentation.langchain import get_current_span
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import Span, Tracer

# The ids of the next span, if they must be certain ones.
NEXT_TRACE_ID: ContextVar[int | None] = ContextVar("holdfast_trace_id", default=None)
NEXT_SPAN_ID: ContextVar[int | None] = ContextVar("holdfast_span_id", default=None)
# The key of the `AttemptContext` in OpenTelemetry's context.
ATTEMPT = contexts.create_key("holdfast-attempt")


class IdGenerator(RandomIdGenerator):
    """Generates random ids, unless NEXT_TRACE_ID or NEXT_SPAN_ID is set."""

    def generate_trace_id(self) -> int:
        return NEXT_TRACE_ID.get() or super().generate_trace_id()

    def generate_span_id(self) -> int:
        return NEXT_SPAN_ID.get() or super().generate_span_id()


class AttemptContext:
    """The span of an attempt, and the id of the span that its graph will get."""

    def __init__(self, span: Span, graph_name: str, graph_span_id: int) -> None:
        self.span = span
        self._graph_name = graph_name
        self._graph_span_id: int | None = graph_span_id

    def id_for(self, name: str) -> int | None:
        """The id for the next span, if it is the graph's: the first one below the attempt with the graph's name. The id
        is known in advance, so that another worker can write this span if the worker is killed: the spans of the steps
        that had ended refer to it."""
        if name != self._graph_name:
            return None
        wanted, self._graph_span_id = self._graph_span_id, None
        return wanted


def current_attempt() -> AttemptContext | None:
    """The attempt that the caller is in. None outside an attempt, and inside a span below it."""
    here = contexts.get_current()
    place = here.get(ATTEMPT)
    return place if isinstance(place, AttemptContext) and trace.get_current_span(here) is place.span else None


def current_step() -> Context | None:
    """The context of the step that the caller is in; None if `current_attempt` is None or there is no step."""
    step = None if current_attempt() is None else get_current_span()
    return None if step is None else trace.set_span_in_context(step)


class StepTracer(SdkTracer):
    """The tracer of graph code and libraries. It places spans without an explicit parent below the current step."""

    def start_span(self, name: str, context: Context | None = None, *args: Any, **options: Any) -> Span:
        if context is not None or (place := current_attempt()) is None:
            return super().start_span(name, context, *args, **options)
        if (step := current_step()) is not None:
            return super().start_span(name, step, *args, **options)
        token = NEXT_SPAN_ID.set(place.id_for(name))
        try:
            return super().start_span(name, None, *args, **options)
        finally:
            NEXT_SPAN_ID.reset(token)


class StepProvider(TracerProvider):
    """A tracer provider that creates StepTracers."""

    def __init__(self, resource: Resource, sampler: Sampler | None = None) -> None:
        super().__init__(sampler, resource, id_generator=IdGenerator(), shutdown_on_exit=False)

    def get_tracer(self, *args: Any, **options: Any) -> Tracer:
        tracer = super().get_tracer(*args, **options)
        if type(tracer) is SdkTracer:
            # The SDK's provider has no parameter for the class of its tracers.
            tracer.__class__ = StepTracer
        return tracer

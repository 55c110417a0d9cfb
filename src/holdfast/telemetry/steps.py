"""Spans of graph code itself, and of the libraries it uses: below the step that makes them.

OpenInference records steps without making them the current span, because a callback cannot be sure to undo that. So
where the current span is still the attempt's, the step is looked up as LangChain knows it.

Some spans have ids that are computed and not a matter of chance; see `recorder.py`.
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

# The ids of the next span, where somebody wants certain ones.
WANTED_TRACE: ContextVar[int | None] = ContextVar("holdfast_trace_id", default=None)
WANTED_SPAN: ContextVar[int | None] = ContextVar("holdfast_span_id", default=None)
# Where an attempt's context has its `Place`.
ATTEMPT = contexts.create_key("holdfast-attempt")


class Ids(RandomIdGenerator):
    """Random, unless somebody wants a certain one."""

    def generate_trace_id(self) -> int:
        return WANTED_TRACE.get() or super().generate_trace_id()

    def generate_span_id(self) -> int:
        return WANTED_SPAN.get() or super().generate_span_id()


class Place:
    """The attempt that a context belongs to, and the span that its graph will have."""

    def __init__(self, span: Span, graph_name: str, graph_span_id: int) -> None:
        self.span = span
        self._graph_name = graph_name
        self._graph_span_id: int | None = graph_span_id

    def id_for(self, name: str) -> int | None:
        """The graph is the first below the attempt that has its name. Its id is known in advance: should the worker be
        killed, whoever takes the run over writes that span too, and the steps that had ended are below it."""
        if name != self._graph_name:
            return None
        wanted, self._graph_span_id = self._graph_span_id, None
        return wanted


def place_here() -> Place | None:
    """The attempt that the caller is in; None outside of one, and within a span that is below it already."""
    here = contexts.get_current()
    place = here.get(ATTEMPT)
    return place if isinstance(place, Place) and trace.get_current_span(here) is place.span else None


def step_here() -> Context | None:
    """The step of the graph that the caller is in; None where `place_here` is, too."""
    step = None if place_here() is None else get_current_span()
    return None if step is None else trace.set_span_in_context(step)


class StepTracer(SdkTracer):
    """A tracer of somebody else's spans."""

    def start_span(self, name: str, context: Context | None = None, *args: Any, **options: Any) -> Span:
        if context is not None or (place := place_here()) is None:
            return super().start_span(name, context, *args, **options)
        if (step := step_here()) is not None:
            return super().start_span(name, step, *args, **options)
        token = WANTED_SPAN.set(place.id_for(name))
        try:
            return super().start_span(name, None, *args, **options)
        finally:
            WANTED_SPAN.reset(token)


class StepProvider(TracerProvider):
    """OpenTelemetry's own, whose tracers know of steps."""

    def __init__(self, resource: Resource, sampler: Sampler | None = None) -> None:
        super().__init__(sampler, resource, id_generator=Ids(), shutdown_on_exit=False)

    def get_tracer(self, *args: Any, **options: Any) -> Tracer:
        tracer = super().get_tracer(*args, **options)
        if type(tracer) is SdkTracer:
            # The provider cannot be told what to make its tracers of.
            tracer.__class__ = StepTracer
        return tracer

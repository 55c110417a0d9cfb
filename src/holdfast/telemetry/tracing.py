"""Traces, as far as the rest of Holdfast has to know of them: whether there are any.

`recorder` is None unless traces are on, and nothing of OpenTelemetry is imported then. Whoever has something to tell
asks for it with `is None`; that is all that a run pays when traces are off. What a span is made of, and how spans are
sent, is in `recorder.py` and `otlp.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import structlog

from holdfast.errors import SettingsError
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import Recorder

log = structlog.get_logger(__name__)

# What `holdfast[traces]` installs, by the modules that are used.
PACKAGES = {
    "opentelemetry.sdk.trace": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter": "opentelemetry-exporter-otlp-proto-http",
    "openinference.instrumentation.langchain": "openinference-instrumentation-langchain",
}
# Where a run's kwargs have the place in a trace that it was created at. Clients do not see it.
STORED = "trace"
# Seconds that a process which ends waits for its last spans to be taken.
PATIENCE = 2.0

recorder: Recorder | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The run that a span is about."""

    run_id: UUID
    thread_id: UUID
    assistant_id: UUID | None = None
    graph_id: str | None = None
    tenant: str = ""

    def attributes(self) -> dict[str, str | int]:
        """What every span about the run says. `session.id` is what Langfuse and Phoenix group by."""
        found: dict[str, str | int] = {
            "holdfast.run_id": str(self.run_id),
            "holdfast.thread_id": str(self.thread_id),
            "session.id": str(self.thread_id),
        }
        if self.assistant_id is not None:
            found["holdfast.assistant_id"] = str(self.assistant_id)
        if self.graph_id is not None:
            found["holdfast.graph_id"] = self.graph_id
        if self.tenant:
            found["holdfast.tenant"] = self.tenant
        return found


def require_packages(settings: Settings) -> None:
    """Raise SettingsError when traces are on and cannot be sent because something is not installed."""
    if settings.tracing and (missing := [package for module, package in PACKAGES.items() if not _installed(module)]):
        said = "HOLDFAST_TRACES=true" if settings.traces else "OTEL_EXPORTER_OTLP_ENDPOINT is set"
        raise SettingsError(
            f"{said}: traces need what is not installed: {', '.join(missing)}. "
            "Install it with `pip install 'holdfast[traces]'`, or set HOLDFAST_TRACES=false."
        )


def configure_tracing(settings: Settings, role: Literal["web", "worker"]) -> None:
    """Begin to record spans and send them, if the settings say so. Once per process, before it does anything; after
    the project's own environment has been read, for OpenTelemetry reads some of its settings from there."""
    global recorder
    if not settings.tracing:
        return
    require_packages(settings)
    from holdfast.telemetry.otlp import open_provider
    from holdfast.telemetry.recorder import Recorder

    recorder = Recorder(*open_provider(settings, role), langchain=role == "worker")
    log.info("traces.sending", url=settings.traces_url.rpartition("@")[2], role=role)


def end_tracing() -> None:
    """Send what is left, if somebody takes it within seconds, and record nothing more."""
    global recorder
    ending, recorder = recorder, None
    if ending is not None:
        ending.close(PATIENCE)


def stored_trace(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Where in a trace a run was created; empty when it was not traced then."""
    stored = kwargs.get(STORED)
    return stored if isinstance(stored, dict) else {}


def outgoing_headers() -> dict[str, str]:
    """What a request to somebody else carries, so that they can go on with the trace at hand."""
    return {} if recorder is None else recorder.outgoing_headers()


def add_trace_ids(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor for structlog: a line that is logged within a span can be found from it, and the other way round."""
    if recorder is not None:
        event.update(recorder.current_ids())
    return event


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False

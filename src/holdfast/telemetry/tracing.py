"""The interface of traces for the rest of Holdfast.

`recorder` is None while traces are off, and OpenTelemetry is not imported then. Callers check `recorder is None`, which
is the whole cost of a run without traces. `recorder.py` creates the spans, and `otlp.py` exports them.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import structlog

from holdfast.errors import SettingsError
from holdfast.settings import Settings, environment_names

if TYPE_CHECKING:
    from holdfast.telemetry.recorder import Recorder

log = structlog.get_logger(__name__)

# The packages of `holdfast[traces]`, by the modules that Holdfast imports.
PACKAGES = {
    "opentelemetry.sdk.trace": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter": "opentelemetry-exporter-otlp-proto-http",
    "openinference.instrumentation.langchain": "openinference-instrumentation-langchain",
}
# The key of a run's kwargs that holds the trace context of its creation. Clients do not see it.
TRACE_KWARG = "trace"
# A key in that context: the time from which the run is due, in nanoseconds.
QUEUED_AT = "queued_at"
# How long a process that ends waits for the export of its last spans.
CLOSE_TIMEOUT_SECONDS = 2.0

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
# A longer timeout cannot be set on a socket.
MAX_TIMEOUT_SECONDS = 1e9


def _is_timeout(value: str) -> bool:
    try:
        return 0 < float(value) < MAX_TIMEOUT_SECONDS
    except ValueError:
        return False


# By the ends of the variables' names: a check of the values that the exporter supports, and the rule as text.
EXPORTER_VALUES: dict[str, tuple[Callable[[str], bool], str]] = {
    "TIMEOUT": (
        _is_timeout,
        f"must be a number of seconds, more than 0 and less than {MAX_TIMEOUT_SECONDS:,.0f}",
    ),
    "COMPRESSION": (
        lambda value: value.strip().lower() in ("none", "gzip", "deflate"),
        "must be none, gzip or deflate",
    ),
}
OWN_VARIABLES = frozenset(variable for field in Settings.model_fields.values() for variable in environment_names(field))
"""The variables that `Settings` has checked already."""

recorder: Recorder | None = None


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """The run that a span is about."""

    run_id: UUID
    thread_id: UUID
    assistant_id: UUID | None = None
    graph_id: str | None = None
    tenant: str = ""

    def attributes(self) -> dict[str, str | int]:
        """The attributes of all spans of the run. Langfuse and Phoenix group by `session.id`."""
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
    """Raise SettingsError if traces are on and a package for them is not installed."""
    if settings.tracing and (missing := [package for module, package in PACKAGES.items() if not _installed(module)]):
        said = "HOLDFAST_TRACES=true" if settings.traces else "OTEL_EXPORTER_OTLP_ENDPOINT is set"
        raise SettingsError(
            f"{said}: traces need what is not installed: {', '.join(missing)}. "
            "Install it with `pip install 'holdfast[traces]'`, or set HOLDFAST_TRACES=false."
        )


def configure_tracing(settings: Settings, role: Literal["web", "worker"]) -> None:
    """Start to record and export spans if the settings say so. Call this once in a process, before its work begins, but
    after the project's environment was loaded: OpenTelemetry reads some of its settings from there. Raises
    SettingsError."""
    global recorder
    if not settings.tracing:
        return
    recorder = _open_recorder(settings, role)
    log.info("traces.sending", url=settings.traces_url.rpartition("@")[2], role=role)


def check_tracing(settings: Settings) -> None:
    """Raise SettingsError if a process could not record or export spans with these settings and this environment. Only
    for a process that does nothing else, because OpenTelemetry reads its environment only once."""
    if settings.tracing:
        _check_collector(settings)
        _open_recorder(settings, "worker").close(CLOSE_TIMEOUT_SECONDS)


def _open_recorder(settings: Settings, role: Literal["web", "worker"]) -> Recorder:
    require_packages(settings)
    try:
        # OpenTelemetry reads variables when it is imported, and when a provider is made.
        from holdfast.telemetry.otlp import open_provider
        from holdfast.telemetry.recorder import Recorder

        return Recorder(*open_provider(settings, role), langchain=role == "worker")
    except Exception as error:
        given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _may_be_shown(name)]
        raise SettingsError(
            f"{', '.join(given) or 'OTEL_*'}: OpenTelemetry refuses this ({type(error).__name__}: {error}). Correct "
            "the variable that it is about, or set HOLDFAST_TRACES=false."
        ) from error


def _may_be_shown(name: str) -> bool:
    """Whether a message may show the variable: it is one of OpenTelemetry, not a setting, and cannot contain a
    secret."""
    secret = ("HEADERS", "ENDPOINT", "ATTRIBUTES")
    return name.startswith("OTEL_") and not name.endswith(secret) and name not in OWN_VARIABLES


def _check_collector(settings: Settings) -> None:
    """Raise SettingsError for headers and certificates with which all requests to the collector would fail, and for
    values that OpenTelemetry would replace by defaults."""
    for name, value in settings.traces_headers.items():
        if not HEADER_NAME.fullmatch(name) or not HEADER_VALUE.fullmatch(value):
            raise SettingsError(
                "OTEL_EXPORTER_OTLP_HEADERS=(secret): must be name=value, percent-encoded, with commas between them; a "
                "name must be letters, digits and hyphens, a value must be Latin-1 without control characters"
            )
    for kind, (is_valid, rule) in EXPORTER_VALUES.items():
        value, name = _exporter_variable(kind)
        if value and not is_valid(value):
            raise SettingsError(f"{name}={value}: {rule}. HOLDFAST_TRACES=false starts without traces.")
    if not settings.traces_url.startswith("https:"):
        return
    authority, authority_name = _file_of("CERTIFICATE")
    certificate, certificate_name = _file_of("CLIENT_CERTIFICATE")
    key, key_name = _file_of("CLIENT_KEY")
    context = ssl.create_default_context()
    if authority is not None:
        with _refused(f"{authority_name}={authority}", "must be a file with certificates (PEM)"):
            context.load_verify_locations(authority)
    if certificate is not None:
        given = f"{certificate_name}={certificate}" + (f", {key_name}={key}" if key is not None else "")
        with _refused(given, "must be files with a certificate and its key (PEM), the key without a password"):
            context.load_cert_chain(certificate, key, password="")


def _exporter_variable(kind: str) -> tuple[str, str]:
    """The value that OpenTelemetry uses, and its variable. An empty variable counts as unset."""
    names = (f"OTEL_EXPORTER_OTLP_TRACES_{kind}", f"OTEL_EXPORTER_OTLP_{kind}")
    return next(((value, name) for name in names if (value := os.environ.get(name))), ("", ""))


def _file_of(kind: str) -> tuple[str | None, str]:
    """The file that OpenTelemetry reads, and the variable that names it."""
    for name in (f"OTEL_EXPORTER_OTLP_TRACES_{kind}", f"OTEL_EXPORTER_OTLP_{kind}"):
        if name in os.environ:
            return os.environ[name], name
    return None, ""


@contextmanager
def _refused(given: str, rule: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise SettingsError(f"{given}: {rule} ({error}). HOLDFAST_TRACES=false starts without traces.") from None


def end_tracing() -> None:
    """Stop recording, and export the remaining spans within CLOSE_TIMEOUT_SECONDS."""
    global recorder
    ending, recorder = recorder, None
    if ending is not None:
        ending.close(CLOSE_TIMEOUT_SECONDS)


def stored_trace(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The trace context in which a run was created; empty without traces. Contains only values of the expected types:
    the loops that claim and create runs read it, and must not fail."""
    stored = kwargs.get(TRACE_KWARG)
    fields = stored.items() if isinstance(stored, dict) else ()
    return {name: value for name, value in fields if isinstance(value, str) or (name == QUEUED_AT and _is_time(value))}


def _is_time(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


def suppress_errors() -> AbstractContextManager[None]:
    """Count an exception in the block as a dropped span instead of raising it."""
    return nullcontext() if recorder is None else recorder.suppress_errors()


def outgoing_headers() -> dict[str, str]:
    """The headers that let the receiver of a request continue the current trace."""
    return {} if recorder is None else recorder.outgoing_headers()


def add_trace_ids(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that adds the ids of the current trace and span to a line."""
    if recorder is not None:
        event.update(recorder.current_ids())
    return event


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except ValueError:
        # An enclosing package refuses an environment variable. `check_tracing` reports which one.
        return True

"""An OTLP collector in the test's own process: a small HTTP server that decodes what it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from tests.support.waiting import until


@dataclass(frozen=True)
class Recorded:
    """A span as it arrived."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    failed: bool
    message: str
    attributes: dict[str, Any]
    events: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    trace_state: str
    resource: dict[str, Any]
    scope: str

    @property
    def run_id(self) -> str | None:
        return self.attributes.get("holdfast.run_id")


@dataclass
class Collector:
    """Takes what it is sent, unless `status` is another than 200."""

    port: int = 0
    status: int = 200
    spans: list[Recorded] = field(default_factory=list)
    requests: list[dict[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """What has a process send its spans here, at once."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    def of(self, trace_id: str) -> list[Recorded]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def named(self, name: str, trace_id: str | None = None) -> list[Recorded]:
        return [span for span in self.spans if span.name == name and trace_id in (None, span.trace_id)]

    async def until(self, condition: Callable[[list[Recorded]], bool], what: str) -> list[Recorded]:
        """The spans, once what has come fulfils the condition."""

        async def enough() -> list[Recorded]:
            found = list(self.spans)
            return found if condition(found) else []

        try:
            return await until(enough, what, patience=60)
        except AssertionError:
            raise AssertionError(f"{what}; there are:\n{tree(self.spans)}") from None


def tree(spans: list[Recorded]) -> str:
    """Spans, indented below their parents."""
    lines: list[str] = []

    def below(parent: str, depth: int) -> None:
        for span in sorted((span for span in spans if span.parent_id == parent), key=lambda span: span.start):
            outcome = span.attributes.get("holdfast.outcome", "")
            lines.append(f"{'  ' * depth}{span.name} {outcome} {span.attributes.get('holdfast.attempt', '')}".rstrip())
            below(span.span_id, depth + 1)

    known = {span.span_id for span in spans}
    for parent in sorted({span.parent_id for span in spans if span.parent_id not in known}):
        lines.append(f"[{parent or 'root'}]")
        below(parent, 1)
    return "\n".join(lines)


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _plain(pair.value) for pair in pairs}


def _recorded(span: SpanMessage, resource: dict[str, Any], scope: str) -> Recorded:
    return Recorded(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        failed=span.status.code == 2,
        message=span.status.message,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        trace_state=span.trace_state,
        resource=resource,
        scope=scope,
    )


def decoded(body: bytes) -> list[Recorded]:
    """The spans of a request."""
    request = ExportTraceServiceRequest.FromString(body)
    return [
        _recorded(span, _attributes(of_resource.resource.attributes), of_scope.scope.name)
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector, for the length of the block."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.requests.append({"path": self.path, **{key.lower(): self.headers[key] for key in self.headers}})
            if collector.status == 200:
                collector.spans += decoded(body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.port = server.server_port
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    serving.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        serving.join()

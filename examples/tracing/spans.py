"""A collector that fits on a page: takes spans over OTLP and prints each trace as a tree, once nothing more comes.

    python examples/tracing/spans.py [port]
    HOLDFAST_TRACES=true holdfast dev --config examples/tracing/langgraph.json
    holdfast run almanac --input '{"harbour": "Ostend"}'

For looking at what Holdfast sends, without installing anything else. Real ones are in docs/traces.md.
"""

import sys
import threading
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

QUIET = 1.5
"""Seconds without a new span after which a trace is printed."""
SHOWN = ("holdfast.attempt", "holdfast.outcome", "llm.token_count.total", "http.response.status_code")


class Traces:
    def __init__(self) -> None:
        self._spans: dict[str, list[Any]] = defaultdict(list)
        self._timers: dict[str, threading.Timer] = {}
        self._lock = threading.Lock()

    def take(self, body: bytes) -> None:
        with self._lock:
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for span in (span for of_scope in of_resource.scope_spans for span in of_scope.spans):
                    trace_id = span.trace_id.hex()
                    self._spans[trace_id].append(span)
                    if trace_id in self._timers:
                        self._timers[trace_id].cancel()
                    self._timers[trace_id] = timer = threading.Timer(QUIET, self._print, (trace_id,))
                    timer.daemon = True
                    timer.start()

    def _print(self, trace_id: str) -> None:
        with self._lock:
            spans = self._spans.pop(trace_id, [])
        known = {span.span_id for span in spans}
        print(f"\ntrace {trace_id}")
        for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
            if span.parent_span_id not in known:
                show(span, spans, 1)
        sys.stdout.flush()


def show(span: Any, spans: list[Any], depth: int) -> None:
    milliseconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
    said = {pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes}
    about = ", ".join(f"{name.split('.', 1)[1]}={said[name]}" for name in SHOWN if name in said)
    failed = "  FAILED" if span.status.code == 2 else ""
    print(f"{'  ' * depth}{span.name}  {milliseconds:.0f} ms  {about}{failed}".rstrip())
    below = [child for child in spans if child.parent_span_id == span.span_id]
    for child in sorted(below, key=lambda child: child.start_time_unix_nano):
        show(child, spans, depth + 1)


def main(port: int) -> None:
    traces = Traces()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            traces.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print(f"Receiving at http://127.0.0.1:{server.server_port}", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4318)

"""An HTTP server that plays a script: what `holdfast run` and `runs` meet, dropped connections included."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

THREAD = "018f0000-0000-7000-8000-0000000000aa"
RUN = "018f0000-0000-7000-8000-0000000000bb"


@dataclass
class Script:
    """The events of the one run there is, and where connections break off."""

    events: list[tuple[str, Any]]
    status: str | None = "success"
    drop_after: list[int] = field(default_factory=list)
    """How many events each connection delivers before it breaks; afterwards they are complete."""
    seen: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    finished: bool = False

    def requests(self, method: str) -> list[str]:
        return [path for verb, path, _, _ in self.seen if verb == method]


@contextmanager
def serving(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._note(None)
            path = urlsplit(self.path).path
            if path.endswith("/stream"):
                last = int(self.headers.get("Last-Event-ID", "-1"))
                self._stream(max(0, last))
            elif path == "/runs":
                self._json(200, [run()])
            elif path.endswith(f"/runs/{RUN}") and script.status is not None:
                self._json(200, run())
            else:
                self._json(404, {"detail": "no such run"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._note(json.loads(body) if body else None)
            path = urlsplit(self.path).path
            if path == "/threads":
                self._json(200, {"thread_id": THREAD})
            elif path.endswith("/runs/stream"):
                if script.seen[-1][3]["assistant_id"] == "nonesuch":
                    self._json(404, {"detail": "No assistant or graph 'nonesuch'"})
                else:
                    self._stream(0)
            else:
                self._json(202, {})

        def _note(self, body: Any) -> None:
            script.seen.append((self.command, self.path, dict(self.headers), body))

        def _json(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, after: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Location", f"/threads/{THREAD}/runs/{RUN}")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            limit = script.drop_after.pop(0) if script.drop_after else None
            for number, (name, data) in list(enumerate(script.events, 1))[after:]:
                if limit == 0:
                    self.close_connection = True
                    return  # Without the last chunk: the client sees the connection break.
                if limit is not None:
                    limit -= 1
                frame = f": heartbeat\r\n\r\nevent: {name}\r\ndata: {json.dumps(data)}\r\nid: {number}\r\n\r\n".encode()
                self.wfile.write(f"{len(frame):x}\r\n".encode() + frame + b"\r\n")
            script.finished = True
            self.wfile.write(b"0\r\n\r\n")

    def run() -> dict[str, Any]:
        return {
            "run_id": RUN,
            "thread_id": THREAD,
            "assistant_id": "a",
            "created_at": "2026-01-02T03:04:05.000000+00:00",
            "updated_at": "2026-01-02T03:04:05.000000+00:00",
            "status": script.status if script.finished or script.status == "pending" else "running",
            "metadata": {},
            "kwargs": {"config": {"configurable": {"graph_id": "echo"}}},
            "multitask_strategy": "enqueue",
            "attempt": 1,
        }

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""`holdfast top`: one frame for scripts, and a live screen that outlives the server."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from holdfast.cli.client import Client
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.top import Screen

from .processes import DEADLINE, holdfast

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

WORKER = {
    "worker_id": "018f0000-0000-4000-8000-00000000cafe",
    "status": "online",
    "host": "box-1",
    "pid": 4711,
    "version": "0",
    "graphs": ["echo", "steps"],
    "capacity": 10,
    "active": 1,
    "run_ids": [],
    "claims_last_minute": 30,
    "lease_left": 27.5,
    "started_at": "2026-01-02T03:04:05+00:00",
    "stopped_at": None,
    "problem": None,
}
RUN = {
    "run_id": "018f0000-0000-7000-8000-0000000000bb",
    "thread_id": "018f0000-0000-7000-8000-0000000000aa",
    "graph_id": "steps",
    "attempt": 2,
    "worker_id": WORKER["worker_id"],
    "seconds": 90.0,
}
ANSWERS: dict[str, Any] = {
    "/queue": {
        "ready": 7,
        "scheduled": 2,
        "waiting": 3,
        "running": 1,
        "oldest_seconds": 120.0,
        "claims_per_second": 0.5,
        "capacity": 10,
        "workers_online": 1,
        "workers_draining": 0,
        "unserved": {"gone": 4},
    },
    "/workers": [WORKER, {**WORKER, "status": "lost", "pid": 4712}],
    "/activity": {
        "window_seconds": 60,
        "created": 60,
        "finished": {"success": 50, "error": 3},
        "created_per_second": 1.0,
        "finished_per_second": 53 / 60,
        "median_seconds": {"success": 1.25},
        "running": [RUN],
    },
}

STYLING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@contextmanager
def answering(answers: dict[str, Any], port: int = 0) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            body = json.dumps(answers.get(path, {"detail": "Not Found"})).encode()
            self.send_response(200 if path in answers else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    ThreadingHTTPServer.allow_reuse_address = True
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def command(port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOLDFAST_URL": f"http://127.0.0.1:{port}", "COLUMNS": "160"}
    return subprocess.run(holdfast("top", *arguments), env=environ, capture_output=True, text=True, timeout=60)


def drawn(screen: Screen, height: int | None = None, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen.frame(height))
    return console.export_text()


def seen(answers: dict[str, Any]) -> Screen:
    with answering(answers) as port, Client(f"http://127.0.0.1:{port}") as client:
        screen = Screen(client.url)
        screen.look(client)
    return screen


def test_one_frame() -> None:
    with answering(ANSWERS) as port:
        done = command(port, "--once")
    assert done.returncode == ExitCode.OK, done.stderr
    for part in (
        *("7 ready", "2 scheduled", "3 behind others", "2.0 min oldest", "1/10 running", "1 online"),
        *("0.50/s claimed", "1.00/s created", "0.88/s finished", "3 failed/min", "1.2 s median"),
        *("no online worker has: gone (4)", "00000000cafe", "box-1", "4711", "27.5 s", "echo, steps"),
        *(str(RUN["run_id"]), "1.5 min"),
    ):
        assert part in done.stdout, part
    assert re.search(r"lost +box-1 +4712", done.stdout)


def test_a_worker_that_cannot_work_is_shown_with_the_reason() -> None:
    worker = {**WORKER, "problem": "graph code blocks the event loop"}
    shown = drawn(seen({**ANSWERS, "/workers": [worker]}), width=80)
    assert re.search(r"00000000cafe +unable", shown)
    assert "00000000cafe claims nothing: graph code blocks the event loop" in shown


LONG_GRAPHS = [f"quarterly_report_writer_for_region_{number}" for number in range(12)]


@pytest.mark.parametrize("host", ["box-1", "holdfast-worker-7d9f8b6c5d-x2x4z"])
@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_graph_names_leave_room_for_all_other_columns(width: int, host: str) -> None:
    worker = {**WORKER, "host": host, "pid": 4194303, "active": 10, "graphs": LONG_GRAPHS}
    run = {**RUN, "graph_id": LONG_GRAPHS[0]}
    activity = {**ANSWERS["/activity"], "running": [run]}
    screen = seen({**ANSWERS, "/workers": [worker], "/activity": activity})
    lines = drawn(screen, width=width).splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("worker"))
    assert lines[header].split() == ["worker", "status", "host", "pid", "busy", "claims/min", "lease", "graphs"]
    shown = lines[header + 1].split()
    assert [shown[0], shown[1], *shown[3:8]] == ["00000000cafe", "online", "4194303", "10/10", "30", "27.5", "s"]
    assert shown[2][:5] == host[:5]
    assert "quart" in lines[header + 1]
    assert not lines[header + 2].strip(), "a worker takes one line"
    [line] = [line for line in lines if str(RUN["run_id"]) in line]
    assert line.split()[2:] == ["2", "1.5", "min", "00000000cafe"], "the name of the graph is shortened, nothing else"
    assert any("3 failed/min" in line and "median" in line for line in lines), "the figures are on one line"


def test_graphs_without_a_worker_leave_room_for_workers_and_runs() -> None:
    queue = {**ANSWERS["/queue"], "unserved": dict.fromkeys(LONG_GRAPHS, 4)}
    lines = drawn(seen({**ANSWERS, "/queue": queue}), height=24, width=80).splitlines()
    assert len(lines) <= 24
    told = " ".join(line.strip() for line in lines)
    named = ", ".join(f"{graph} (4)" for graph in LONG_GRAPHS[:3])
    assert f"no online worker has: {named} and 9 more" in told
    assert str(RUN["run_id"]) in told


def test_one_frame_as_json() -> None:
    with answering(ANSWERS) as port:
        done = command(port, "--once", "--json")
    told = json.loads(done.stdout)
    assert {key: told[key] for key in ("queue", "workers", "activity")} == {
        "queue": ANSWERS["/queue"],
        "workers": ANSWERS["/workers"],
        "activity": ANSWERS["/activity"],
    }


def test_one_frame_of_a_server_that_is_not_there() -> None:
    done = command(9, "--once")
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "cannot be reached" in done.stderr


def test_a_server_without_activity() -> None:
    screen = seen({path: answer for path, answer in ANSWERS.items() if path != "/activity"})
    assert screen.problem is None
    assert "7 ready" in drawn(screen)


@pytest.mark.parametrize("answers", [{}, {"/queue": [], "/workers": {}}], ids=["nothing", "something else"])
def test_something_that_is_not_holdfast(answers: dict[str, Any]) -> None:
    screen = seen(answers)
    assert screen.problem is not None
    assert screen.seen_at is None
    assert "refused" in drawn(screen)


def test_a_small_screen_shows_what_fits() -> None:
    many = {
        **ANSWERS,
        "/workers": [{**WORKER, "pid": number} for number in range(150)],
        "/activity": {**ANSWERS["/activity"], "running": [RUN] * 50},
        "/queue": {**ANSWERS["/queue"], "running": 1500},
    }
    screen = seen(many)
    assert len(drawn(screen, 24).splitlines()) <= 24
    assert "and 145 more" in drawn(screen, 24)
    assert len(drawn(screen).splitlines()) > 200


class Terminal:
    """`holdfast top` on a terminal of its own."""

    def __init__(self, port: int) -> None:
        self._master, slave = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            holdfast("top", "--every", "0.2", "--url", f"http://127.0.0.1:{port}"),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""

    def expect(self, text: str) -> None:
        """Wait for text that is drawn from now on."""
        deadline = time.monotonic() + DEADLINE
        self._seen = ""
        while text not in STYLING.sub("", self._seen):
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self._seen[-3000:]}"
            try:
                self._seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended before {text!r}:\n{self._seen[-3000:]}") from None

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def close(self) -> int:
        """The exit code; what is still drawn is read, or nobody could write it."""
        reader = threading.Thread(target=self._drain, daemon=True)
        reader.start()
        try:
            return self.process.wait(DEADLINE)
        finally:
            self.kill()
            reader.join(DEADLINE)
            os.close(self._master)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _drain(self) -> None:
        try:
            while os.read(self._master, 65536):
                pass
        except OSError:
            pass


def test_it_outlives_the_server_and_ends_with_q() -> None:
    with answering(ANSWERS) as port:
        terminal = Terminal(port)
        try:
            terminal.expect("7 ready")
        except BaseException:
            terminal.kill()
            raise
    try:
        terminal.expect("the server cannot be reached")
        terminal.expect("7 ready")
        with answering({**ANSWERS, "/queue": {**ANSWERS["/queue"], "ready": 11}}, port):
            terminal.expect("11 ready")
            terminal.press("q")
            assert terminal.close() == ExitCode.OK
    finally:
        terminal.kill()


def test_it_ends_with_ctrl_c() -> None:
    with answering(ANSWERS) as port:
        terminal = Terminal(port)
        try:
            terminal.expect("7 ready")
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.close() == ExitCode.OK
        finally:
            terminal.kill()

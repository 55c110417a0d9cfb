"""Code of a project has started a thread that never ends, and the process is told to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from holdfast.cli.exit_codes import ExitCode
from tests.cli.processes import holdfast
from tests.support.servers import free_port

# Longer than a process takes to start and to end.
LIMIT_SECONDS = 120.0
GRAPH = """
import threading
from typing import TypedDict
from langgraph.graph import START, StateGraph

class State(TypedDict):
    x: int

threading.Thread(target=threading.Event().wait, name="endless").start()
graph = StateGraph(State).add_node("node", lambda state: state).add_edge(START, "node").compile()
"""


@pytest.mark.parametrize("role", ["worker", "web"])
def test_process_ends_although_a_thread_of_the_project_does_not(tmp_path: Path, database_url: str, role: str) -> None:
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}))
    environ = {**os.environ, "DATABASE_URL": database_url, "HOLDFAST_LOG_FORMAT": "json"}
    ready = "worker.online" if role == "worker" else "web.listening"
    command = holdfast(role, *([] if role == "worker" else ["--port", str(free_port())]))
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as process:
        # A process that does not end would keep its end of the pipe open, too.
        limit = threading.Timer(LIMIT_SECONDS, process.kill)
        limit.start()
        try:
            assert process.stderr is not None
            while json.loads(process.stderr.readline())["event"] != ready:
                pass
            process.send_signal(signal.SIGTERM)
            rest = [json.loads(line) for line in process.stderr]
            assert process.wait(60) == ExitCode.OK
        finally:
            limit.cancel()
            process.kill()
    [left] = [line["threads"] for line in rest if line["event"] == "process.threads_left"]
    assert "endless" in left

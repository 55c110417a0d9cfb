"""What a user does first, with an installed Holdfast: `holdfast dev` in a folder with a graph, a run, a stream, stop.

Run by the Python under test, in an empty folder, and imports nothing of the repository.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
from langgraph_sdk import get_sync_client

TIMEOUT_SECONDS = 600
GRAPH = """
from typing import TypedDict
from langgraph.graph import START, StateGraph

class State(TypedDict, total=False):
    question: str
    answer: str

def reply(state: State) -> State:
    return {"answer": state["question"].upper()}

graph = StateGraph(State).add_node("reply", reply).add_edge(START, "reply").compile()
"""


def main() -> None:
    Path("graph.py").write_text(GRAPH)
    Path("langgraph.json").write_text(json.dumps({"dependencies": ["."], "graphs": {"agent": "./graph.py:graph"}}))
    program = Path(sys.executable).parent / "holdfast"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        [program, "dev", "--port", "0"],
        env=environ | {"HOLDFAST_LOG_FORMAT": "console", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Without it, a server that never gets ready would never be stopped.
    alarm = threading.Timer(TIMEOUT_SECONDS, server.kill)
    alarm.start()
    try:
        use(url_of(server))
    finally:
        server.send_signal(signal.SIGTERM)
        printed, _ = server.communicate()
        alarm.cancel()
    assert server.returncode == 0, f"holdfast dev ended with {server.returncode}:\n{printed}"
    assert Path(".holdfast/postgres/PG_VERSION").exists()
    print("smoke test passed")


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    printed = []
    for line in server.stdout:
        printed.append(line)
        if found := re.search(r"Holdfast is ready: (http://[\w.:]+)", line):
            return found[1]
    raise AssertionError(f"holdfast dev did not get ready:\n{''.join(printed)}")


def use(url: str) -> None:
    healthy = httpx.get(f"{url}/ok")
    assert healthy.is_success, healthy.text
    client = get_sync_client(url=url)
    thread = client.threads.create()
    state = client.runs.wait(thread["thread_id"], "agent", input={"question": "ready?"})
    assert state == {"question": "ready?", "answer": "READY?"}, state
    parts = list(client.runs.stream(None, "agent", input={"question": "and now?"}, stream_mode="updates"))
    assert [part.event for part in parts] == ["metadata", "updates"], parts
    assert parts[1].data == {"reply": {"answer": "AND NOW?"}}, parts


if __name__ == "__main__":
    main()

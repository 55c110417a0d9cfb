"""`dev`, `serve` and `demo` with the real web process, the real workers and the embedded Postgres."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.cli.exit_codes import ExitCode

from .processes import Program, alive, holdfast, postmaster, processes_naming, wait_for

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

EXAMPLES = Path(__file__).parents[2] / "examples" / "langgraph.json"
HELLO = json.dumps({"messages": [{"role": "user", "content": "hello there"}]})

GRAPH = """
from typing import TypedDict
from langgraph.graph import START, StateGraph

class State(TypedDict, total=False):
    answer: str

def node(state: State) -> State:
    return {{"answer": "{answer}"}}

graph = StateGraph(State).add_node("node", node).add_edge(START, "node")
"""


@contextmanager
def started(role: str, data_dir: Path, *arguments: str | Path) -> Iterator[tuple[Program, str]]:
    """A running server and its URL. At the end it must be gone, with everything that belongs to it."""
    environ = {"HOLDFAST_DATA_DIR": str(data_dir), "HOLDFAST_LOG_FORMAT": "console", "COLUMNS": "300"}
    with Program(holdfast(role, "--port", "0", *arguments), environ=environ) as program:
        yield program, program.expect(r"Holdfast is ready: (http://[\w.:]+)")[1]
    wait_for(lambda: not processes_naming(str(data_dir)), "everything has ended")


def client(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOLDFAST_URL": url, "COLUMNS": "200"}
    return subprocess.run(holdfast(*arguments), env=environ, capture_output=True, text=True, timeout=60)


def roles(supervisor: int) -> dict[int, str]:
    """The children of a supervisor by process id: web, worker, or the guard's module."""
    found = {}
    for child in psutil.Process(supervisor).children():
        command = child.cmdline()
        found[child.pid] = command[command.index("-m") + 2] if "holdfast" in command else "guard"
    return found


def test_serve_runs_replaces_and_stops(tmp_path: Path) -> None:
    with started("serve", tmp_path, "--workers", "2", "--config", EXAMPLES) as (program, url):
        done = client(url, "run", "echo", "--input", HELLO)
        assert done.returncode == ExitCode.OK, done.stdout + done.stderr
        assert "hello there" in done.stdout
        assert client(url, "runs", "list").stdout.count("success") == 1

        children = roles(program.pid)
        assert sorted(children.values()) == ["guard", "web", "worker", "worker"]
        victim = next(pid for pid, role in children.items() if role == "worker")
        os.kill(victim, signal.SIGKILL)
        program.expect(rf"child.ended .*child_pid={victim} .*ending=SIGKILL")
        wait_for(lambda: sorted(roles(program.pid).values()) == sorted(children.values()), "another worker")
        assert client(url, "run", "echo", "--input", HELLO).returncode == ExitCode.OK

        program.process.send_signal(signal.SIGTERM)
        assert program.wait() == ExitCode.OK
        assert not any(alive(pid) for pid in children)
        assert not postmaster(tmp_path)


def test_nothing_survives_a_killed_supervisor(tmp_path: Path) -> None:
    with started("serve", tmp_path, "--workers", "1", "--config", EXAMPLES) as (program, _):
        children, server = roles(program.pid), postmaster(tmp_path)
        assert len(children) == 3
        program.process.kill()
        program.wait()
        wait_for(lambda: not any(alive(pid) for pid in (*children, server)), "children, guard and Postgres end")


def test_a_second_server_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    with started("serve", tmp_path, "--workers", "1", "--config", EXAMPLES) as (program, url):
        environ = {**os.environ, "HOLDFAST_DATA_DIR": str(tmp_path)}
        command = holdfast("serve", "--port", url.rpartition(":")[2], "--config", EXAMPLES)
        second = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert second.returncode == ExitCode.CONFIG
        assert f"in use by another Holdfast (process {program.pid})" in second.stderr


def test_dev_says_what_to_try_and_takes_up_new_code(tmp_path: Path) -> None:
    project, data_dir = tmp_path / "project", tmp_path / "data"
    project.mkdir()
    graph, config = project / "graph.py", project / "langgraph.json"
    graph.write_text(GRAPH.format(answer="one"))
    config.write_text(json.dumps({"dependencies": ["."], "graphs": {"g": "./graph.py:graph"}}))

    with started("dev", data_dir, "--config", config) as (program, url):
        program.expect(rf"holdfast run g --input '\{{.*\}}' --url {url}")
        program.expect("Stop with Ctrl-C; twice to stop at once")

        def answers(word: str) -> bool:
            return word in client(url, "run", "g", "--input", "{}").stdout

        assert answers("one")
        (worker,) = (pid for pid, role in roles(program.pid).items() if role == "worker")

        graph.write_text("this is not Python")
        program.expect(r"project.broken .*files=graph.py")
        assert answers("one"), "the worker goes on with the old code"
        assert alive(worker)

        graph.write_text(GRAPH.format(answer="two"))
        program.expect(r"project.changed .*files=graph.py")
        wait_for(lambda: not alive(worker), "the old worker ends")
        assert answers("two")

        program.process.send_signal(signal.SIGINT)
        assert program.wait() == ExitCode.OK


def test_the_demonstration_succeeds(tmp_path: Path) -> None:
    command = holdfast("demo", "--config", EXAMPLES)
    # A database of somebody's in the environment must not be touched.
    environ = {**os.environ, "DATABASE_URL": "postgresql://127.0.0.1:9/precious", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    assert "another worker goes on (attempt 2)" in done.stdout
    assert "steps: s1 x1, s2 x1, s3 x1, s4 x1, s5 x1" in done.stdout
    assert not list(tmp_path.glob("holdfast-demo-*"))

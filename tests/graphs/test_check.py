from __future__ import annotations

import json
import subprocess
import sys

import pytest

from holdfast.graphs.check import main

from .conftest import EXAMPLES, Project


def test_a_broken_project_is_explained_on_stderr(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.path.write_text(json.dumps({"graphs": {"a": "./gone.py:graph"}}))
    assert main([str(project.path)], {}) == 78
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"{project.path}: graphs.a: ./gone.py:graph: the file {project.root}/gone.py does not exist\n"
    )


def test_graphs_of_the_environment_are_checked(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project.root)
    project.module("target = build()")
    environ = {"LANGSERVE_GRAPHS": '{"a": "./agent.py:target", "b": "./agent.py:State"}'}
    assert main(["langgraph.json"], environ) == 78
    assert "LANGSERVE_GRAPHS: graphs.b: ./agent.py:State is the class State" in capsys.readouterr().err


def test_as_a_command() -> None:
    command = [sys.executable, "-m", "holdfast.graphs.check", str(EXAMPLES / "langgraph.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_command_ends_though_user_code_left_a_thread_running(project: Project) -> None:
    project.module(
        """
        import threading
        threading.Thread(target=threading.Event().wait).start()
        print("unfinished line", end="")
        target = 3
        """
    )
    project.path.write_text(json.dumps({"graphs": {"a": "./agent.py:target"}}))
    command = [sys.executable, "-m", "holdfast.graphs.check", str(project.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78
    assert done.stdout == "unfinished line"
    assert "graphs.a: ./agent.py:target is an int" in done.stderr


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"store": {"ttl": 5}}, "store.ttl"),
        ({"store": {"index": {"dims": "x", "embed": "y"}}}, "store.index.dims"),
        ({"store": {"index": {"dims": 3, "embed": "./agent.py:gone"}}}, "store.index.embed"),
        ({"checkpointer": {"ttl": 5}}, "checkpointer.ttl"),
        ({"webhooks": {"url": 5}}, "webhooks.url"),
        ({"http": {"cors": 5}}, "http.cors"),
        ({"auth": {"path": "./agent.py:gone"}}, "auth.path"),
    ],
)
def test_every_section_is_checked(
    project: Project, capsys: pytest.CaptureFixture[str], section: dict[str, object], key: str
) -> None:
    # What is not refused here is refused by each process of a fleet, and the supervisor starts it again and again.
    project.module("target = build()")
    project.path.write_text(json.dumps({"graphs": {"a": "./agent.py:target"}, **section}))
    assert main([str(project.path)], {}) == 78
    assert f": {key}: " in capsys.readouterr().err

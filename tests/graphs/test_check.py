from __future__ import annotations

import json
import subprocess
import sys

import pytest

from holdfast.cli.check_project import main

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


@pytest.mark.servers
def test_as_a_command() -> None:
    command = [sys.executable, "-m", "holdfast.cli.check_project", str(EXAMPLES / "langgraph.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.servers
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
    command = [sys.executable, "-m", "holdfast.cli.check_project", str(project.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78
    assert done.stdout == "unfinished line"
    assert "graphs.a: ./agent.py:target is an int" in done.stderr


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"store": {"ttl": 5}}, "store.ttl"),
        ({"store": {"path": "./agent.py:gone"}}, "store.path"),
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


@pytest.mark.parametrize(
    ("middleware", "cause"),
    [
        ('app.add_middleware(CORSMiddleware, allow_origin_regex="[")', "unterminated character set"),
        ("app.add_middleware(CORSMiddleware, origins=[])", "TypeError: "),
        ("app.add_middleware(lambda app: sys.exit(3))", "SystemExit: 3"),
        ("app.add_middleware(lambda app: fail(Silent()))", "Silent: (no message: its __str__ fails)"),
    ],
)
def test_middleware_that_cannot_be_built_is_refused(
    project: Project, capsys: pytest.CaptureFixture[str], middleware: str, cause: str
) -> None:
    assert _checked_app(project, middleware) == 78
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{project.path}: http.app: ./agent.py:app: its middleware cannot be built\n  ")
    assert cause in captured.err


def test_middleware_may_need_the_running_event_loop(project: Project) -> None:
    # As it has in a server, which builds it in a coroutine.
    assert _checked_app(project, "app.add_middleware(lambda app: asyncio.get_running_loop() and app)") == 0


def _checked_app(project: Project, middleware: str) -> int:
    project.module(
        f"""
        import asyncio
        import sys
        from starlette.applications import Starlette
        from starlette.middleware.cors import CORSMiddleware

        class Silent(Exception):
            def __str__(self):
                raise RuntimeError("no words")

        def fail(error):
            raise error

        target = build()
        app = Starlette()
        {middleware}
        """
    )
    document = {"graphs": {"a": "./agent.py:target"}, "http": {"app": "./agent.py:app"}}
    project.path.write_text(json.dumps(document))
    return main([str(project.path)], {})

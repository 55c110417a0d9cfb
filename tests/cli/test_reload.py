"""What `dev` does when files change."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from holdfast.cli.reload import ProjectWatch
from holdfast.graphs.config import load_config

from .processes import DEADLINE, wait_for


@pytest.fixture(autouse=True)
def usual_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


class Watching:
    """A project being watched, and what came of it, in order."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.loads = True
        self.hangs = False
        self._happened: queue.Queue[str] = queue.Queue()
        structlog.configure(processors=[self._log], cache_logger_on_first_use=False)
        self.watch = ProjectWatch(
            load_config(directory / "langgraph.json"),
            problem=self._problem,
            restart=lambda name: self._happened.put(f"restart {name}"),
        )
        self.watch.start()
        assert self.watch.watching.wait(DEADLINE)

    def _problem(self, outdated: Callable[[], bool]) -> str | None:
        if self.hangs:
            self._happened.put("hangs")
            wait_for(outdated, "the file has changed again")
            return "outdated"
        return None if self.loads else "SyntaxError"

    def _log(self, logger: object, method: str, line: Any) -> Any:
        self._happened.put(f"{line['event']} {line['files']}")
        raise structlog.DropEvent

    def next(self) -> str:
        return self._happened.get(timeout=DEADLINE)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    project = tmp_path / "project"
    (project / ".venv").mkdir(parents=True)
    (tmp_path / "library").mkdir()
    document = {"dependencies": [".", "../library"], "graphs": {"g": "./graph.py:graph"}, "env": "dev.env"}
    (project / "dev.env").write_text("A=1")
    (project / "graph.py").write_text("graph = None")
    (project / "langgraph.json").write_text(json.dumps(document))
    watching = Watching(project)
    yield watching
    watching.watch.stop()


def test_code_restarts_the_worker(watching: Watching) -> None:
    (watching.directory / "graph.py").write_text("graph = 1")
    assert watching.next() == "project.changed graph.py"
    assert watching.next() == "restart worker"


def test_local_dependencies_count(watching: Watching) -> None:
    (watching.directory.parent / "library" / "part.py").write_text("x = 1")
    assert watching.next() == "project.changed part.py"


@pytest.mark.parametrize("name", ["langgraph.json", "dev.env"])
def test_change_of_project_files_restarts_the_web_process_too(watching: Watching, name: str) -> None:
    file = watching.directory / name
    file.write_text(file.read_text() + "\n")
    assert watching.next() == f"project.changed {name}"
    assert {watching.next(), watching.next()} == {"restart web", "restart worker"}


@pytest.mark.parametrize("section", [{"http": {"app": "./webapp.py:app"}}, {"auth": {"path": "./auth.py:auth"}}])
def test_code_of_the_web_process_restarts_it_too(tmp_path: Path, section: dict[str, dict[str, str]]) -> None:
    (tmp_path / "langgraph.json").write_text(json.dumps({"graphs": {"g": "./graph.py:graph"}, **section}))
    watching = Watching(tmp_path)
    (tmp_path / "webapp.py").write_text("app = None")
    assert watching.next() == "project.changed webapp.py"
    assert {watching.next(), watching.next()} == {"restart web", "restart worker"}
    watching.watch.stop()


def test_code_that_does_not_load_waits_for_the_next_change(watching: Watching) -> None:
    watching.loads = False
    (watching.directory / "graph.py").write_text("graph =")
    assert watching.next() == "project.broken graph.py"
    watching.loads = True
    (watching.directory / "graph.py").write_text("graph = 2")
    assert watching.next() == "project.changed graph.py"


def test_next_change_ends_the_wait_for_code_that_hangs_when_it_is_imported(watching: Watching) -> None:
    watching.hangs = True
    (watching.directory / "graph.py").write_text("while True: pass")
    assert watching.next() == "hangs"
    watching.hangs = False
    (watching.directory / "graph.py").write_text("graph = 2")
    assert watching.next() == "project.broken graph.py"
    assert watching.next() == "project.changed graph.py"
    assert watching.next() == "restart worker"


def test_other_files_do_not_count(watching: Watching) -> None:
    (watching.directory / "notes.txt").write_text("x")
    (watching.directory / ".venv" / "module.py").write_text("x")
    (watching.directory / "last.py").write_text("x")
    assert watching.next() == "project.changed last.py"

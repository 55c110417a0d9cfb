"""Small projects in a temporary directory, and a process that forgets them again."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig

from holdfast.errors import ConfigError
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import ProjectConfig, load_config

EXAMPLES = Path(__file__).parents[2] / "examples"

BUILDER = """
from typing import Annotated
import operator
from typing_extensions import TypedDict
from langgraph.graph import START, StateGraph

class State(TypedDict):
    seen: Annotated[list[str], operator.add]

def build(word="node"):
    builder = StateGraph(State)
    builder.add_node("node", lambda state: {"seen": [word]})
    builder.add_edge(START, "node")
    return builder
"""
"""A module's opening that defines `build(word)`, a StateGraph whose only node writes the word."""


CONFIG: RunnableConfig = {"configurable": {"thread_id": "t", "colour": "red"}}


class Project:
    """A project to load graphs from; `root` holds its langgraph.json."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "langgraph.json"

    def write(self, name: str, text: str) -> Path:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def configure(self, **document: Any) -> ProjectConfig:
        self.path.write_text(json.dumps(document))
        return load_config(self.path)

    def load(self, **document: Any) -> GraphCatalog:
        return GraphCatalog.load(self.configure(**document))

    def module(self, text: str, name: str = "agent.py") -> Path:
        return self.write(name, BUILDER + textwrap.dedent(text))

    def failure(self, **document: Any) -> str:
        """The message with which loading this configuration fails."""
        with pytest.raises(ConfigError) as caught:
            self.load(**document)
        message = str(caught.value)
        assert message.startswith(f"{self.path}: ")
        assert message.count("\n") <= 1
        return message.removeprefix(f"{self.path}: ")


async def run(catalog: GraphCatalog, graph_id: str = "a", **options: Any) -> Any:
    """The words that the graph's nodes wrote."""
    options.setdefault("access_context", "threads.create_run")
    async with catalog.open(graph_id, config=CONFIG, **options) as graph:
        return (await graph.ainvoke({"seen": []}, CONFIG))["seen"]


def single(project: Project, text: str, name: str = "target") -> GraphCatalog:
    """A catalog whose graph `a` is the variable `name` of a module with this text."""
    project.module(text)
    return project.load(graphs={"a": f"./agent.py:{name}"})


@pytest.fixture(autouse=True)
def process_restored(tmp_path: Path) -> Iterator[None]:
    """Undo what loading a project does to the process."""
    path, modules, environ = list(sys.path), set(sys.modules), dict(os.environ)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        # Only the project's: a second copy of a library that was imported first here would be another library.
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path) | Path(file).is_relative_to(EXAMPLES):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environ)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)

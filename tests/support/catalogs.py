"""Catalogs of graphs that a test builds itself, so that each has its own counters and switches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from langgraph.pregel import Pregel

from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.config import GraphTarget, ProjectConfig
from holdfast.graphs.loading import LoadedTarget


def catalog_of(**graphs: Pregel[Any, Any, Any, Any] | Callable[..., Any]) -> GraphCatalog:
    """A catalog of the given graphs and factories, without a project on disk."""
    targets = {name: GraphTarget(name, f"tests:{name}", None, "tests", name) for name in graphs}
    config = ProjectConfig(
        path=Path("langgraph.json"),
        directory=Path(),
        graphs=targets,
        dependencies=(),
        env={},
        raw={},
        warnings=(),
        source="langgraph.json",
    )
    module = ModuleType("tests")
    return GraphCatalog(config, {name: LoadedTarget(targets[name], module, graph) for name, graph in graphs.items()})

"""Which types may be loaded from a checkpoint.

A checkpoint stores the type of every value that is not plain data, and LangGraph's serializer would import and call any
type that a row names. Holdfast uses its strict mode: a value of a type that is not allowed is loaded as plain data, and
nothing is imported for it. Allowed are

- the types that LangGraph considers harmless: messages, documents, dates and the like;
- the types in the schemas of a graph, which LangGraph collects when it compiles the graph;
- the project's own data types, because values of them are also stored where no schema names them: results of tasks,
  subclasses, fields of type `Any`;
- the types in `checkpointer.serde.allowed_msgpack_modules` of langgraph.json.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel
from pydantic.v1 import BaseModel as BaseModelV1

from holdfast.graphs.checkpointer import TypeName, checkpointer_section
from holdfast.graphs.config import ProjectConfig
from holdfast.graphs.dependencies import import_directories
from holdfast.graphs.loading import installed_directories


def allowed_types(config: ProjectConfig) -> frozenset[TypeName]:
    """The types of the project, and those that langgraph.json names. Call it after the graphs were imported."""
    directories = _prefixes(import_directories(config))
    installed = _prefixes(installed_directories())
    own = {
        (name, attribute)
        # copy() copies in one step. While a list of pairs is built, a finalizer may import a module.
        for name, module in sys.modules.copy().items()
        if (file := _file(module)).startswith(directories) and not file.startswith(installed)
        for attribute, value in vars(module).copy().items()
        if is_data_type(value) and (value.__module__, value.__name__) == (name, attribute)
    }
    return frozenset(own) | checkpointer_section(config).allowed_types


def is_data_type(value: object) -> bool:
    """Whether a value is a class that the serializer stores: a pydantic model, a dataclass, an enum or a named tuple.
    Not pydantic settings, because creating an instance would read the secrets of the process into the state."""
    if not isinstance(value, type) or hasattr(value, "settings_customise_sources"):
        return False
    named_tuple = issubclass(value, tuple) and hasattr(value, "_fields")
    return named_tuple or issubclass(value, (BaseModel, BaseModelV1, Enum)) or dataclasses.is_dataclass(value)


def _prefixes(directories: list[Path]) -> tuple[str, ...]:
    return tuple(f"{directory}{os.sep}" for directory in directories)


def _file(module: ModuleType) -> str:
    """The file of a module. Reads `vars()`, because getattr() on some modules imports others."""
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else ""

"""Reading langgraph.json into one frozen object. Nothing here imports user code."""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dotenv import dotenv_values

from holdfast.errors import ConfigError

DEFAULT_PATH = Path("langgraph.json")

GRAPHS_VARIABLE = "LANGSERVE_GRAPHS"

KNOWN_KEYS = frozenset(
    {
        "$schema",
        "api_version",
        "auth",
        "base_image",
        "checkpointer",
        "dependencies",
        "dockerfile_lines",
        "encryption",
        "env",
        "graphs",
        "http",
        "image_distro",
        "keep_pkg_tools",
        "node_version",
        "pip_config_file",
        "pip_installer",
        "python_version",
        "source",
        "store",
        "ui",
        "webhooks",
    }
)


@dataclass(frozen=True, slots=True)
class GraphTarget:
    """Where one graph lives: exactly one of `file` and `module` is set."""

    graph_id: str
    spec: str
    """The target as it was written, for messages."""
    file: Path | None
    module: str | None
    attribute: str
    description: str | None = None

    @property
    def key(self) -> str:
        """The place in langgraph.json, as messages name it."""
        return f"graphs.{self.graph_id}"


@dataclass(frozen=True, slots=True)
class ProjectConfig:
    """A langgraph.json whose shape is known to be right; what it names has not been looked at yet."""

    path: Path
    directory: Path
    """Absolute. Every relative path of the file starts here."""
    graphs: dict[str, GraphTarget]
    dependencies: tuple[str, ...]
    env: dict[str, str]
    raw: Mapping[str, Any]
    """The whole document, for the sections that other modules read."""
    warnings: tuple[str, ...]
    source: str
    """What messages call the file: its path as given, or LANGSERVE_GRAPHS."""

    def error(self, key: str, cause: str) -> ConfigError:
        return _error(self.source, key, cause)


def load_config(path: Path = DEFAULT_PATH, environ: Mapping[str, str] | None = None) -> ProjectConfig:
    """Read and check the shape of `path`.

    When `path` is the default langgraph.json and does not exist, the graphs come from LANGSERVE_GRAPHS in
    `environ` and their paths are relative to the current directory. A file named explicitly must exist.

    Raises ConfigError naming the file, the key and the cause.
    """
    source = str(path)
    if path == DEFAULT_PATH and not path.exists() and (environ or {}).get(GRAPHS_VARIABLE):
        source = GRAPHS_VARIABLE
        document: Any = {"graphs": _parse(source, (environ or {})[GRAPHS_VARIABLE])}
    else:
        document = _parse(source, _read(path))
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: must hold a JSON object, not {_kind(document)}")

    directory = path.absolute().parent
    warnings = [
        f'{source}: unknown key "{key}"{suggestion(key, KNOWN_KEYS)}' for key in document if key not in KNOWN_KEYS
    ]
    return ProjectConfig(
        path=path.absolute(),
        directory=directory,
        graphs=_graphs(source, document, directory, warnings),
        dependencies=_dependencies(source, document.get("dependencies", [])),
        env=_env(source, document.get("env", {}), directory),
        raw=MappingProxyType(document),
        warnings=tuple(warnings),
        source=source,
    )


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean "x"?`, or nothing when no candidate is near."""
    near = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(candidate) for candidate in near)}?" if near else ""


def _error(source: str, key: str, cause: str) -> ConfigError:
    return ConfigError(f"{source}: {key}: {cause}")


def _kind(value: object) -> str:
    """What a JSON value is called in JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: the file does not exist") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(source: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}: not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None


def _graphs(source: str, document: dict[str, Any], directory: Path, warnings: list[str]) -> dict[str, GraphTarget]:
    if "graphs" not in document:
        raise _error(source, "graphs", "missing; name at least one graph")
    graphs = document["graphs"]
    if not isinstance(graphs, dict):
        raise _error(source, "graphs", f"must be an object of graph ids, not {_kind(graphs)}")
    if not graphs:
        raise _error(source, "graphs", "empty; name at least one graph")
    return {graph_id: _graph(source, graph_id, value, directory, warnings) for graph_id, value in graphs.items()}


def _graph(source: str, graph_id: str, value: object, directory: Path, warnings: list[str]) -> GraphTarget:
    if problem := _id_problem(graph_id):
        raise _error(source, f"graphs.{graph_id!r}", f"a graph id {problem}")
    key = f"graphs.{graph_id}"
    description = None
    if isinstance(value, dict):
        warnings.extend(
            f'{source}: unknown key "{key}.{name}"{suggestion(name, ("path", "description"))}'
            for name in value
            if name not in ("path", "description")
        )
        description = value.get("description")
        if description is not None and not isinstance(description, str):
            raise _error(source, f"{key}.description", f"must be a string, not {_kind(description)}")
        if "path" not in value:
            raise _error(source, f"{key}.path", "missing")
        key, value = f"{key}.path", value["path"]
    if not isinstance(value, str):
        raise _error(source, key, f"must be a string or an object with a path, not {_kind(value)}")

    location, separator, attribute = value.rpartition(":")
    if not separator or not location or not attribute.isidentifier():
        raise _error(source, key, f'{value!r} must look like "./file.py:variable" or "package.module:variable"')
    if re.search(r"\.[cm]?[jt]sx?$", location):
        raise _error(source, key, f"{value!r} is not Python; only Python graphs can be served")
    if location.endswith(".py") or "/" in location or "\\" in location:
        return GraphTarget(graph_id, value, directory / location, None, attribute, description)
    if not all(part.isidentifier() for part in location.split(".")):
        raise _error(source, key, f"{location!r} is neither a .py file nor a module name")
    return GraphTarget(graph_id, value, None, location, attribute, description)


def _id_problem(graph_id: str) -> str | None:
    if not graph_id:
        return "must not be empty"
    if graph_id != graph_id.strip():
        return "must not begin or end with a space"
    # Ids become path segments of URLs and lines of logs.
    if "/" in graph_id:
        return 'must not contain "/"'
    if any(unicodedata.category(character).startswith("C") for character in graph_id):
        return "must not contain control characters"
    return None


def _dependencies(source: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _error(source, "dependencies", f"must be an array of strings, not {_kind(value)}")
    for index, dependency in enumerate(value):
        if not isinstance(dependency, str):
            raise _error(source, f"dependencies[{index}]", f"must be a string, not {_kind(dependency)}")
        if not dependency.strip():
            raise _error(source, f"dependencies[{index}]", "must not be empty")
    return tuple(dependency.strip() for dependency in value)


def _env(source: str, value: object, directory: Path) -> dict[str, str]:
    if isinstance(value, str):
        file = directory / value
        if not file.is_file():
            raise _error(source, "env", f"the file {value!r} does not exist in {directory}")
        try:
            parsed = dotenv_values(file, encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise _error(source, "env", f"the file {value!r} is not UTF-8 text") from None
        # A bare `NAME` line says that the variable exists elsewhere; there is nothing to set.
        return {name: text for name, text in parsed.items() if text is not None}
    if not isinstance(value, dict):
        raise _error(source, "env", f"must be the path of a file or an object of strings, not {_kind(value)}")
    for name, text in value.items():
        if not name or "=" in name or "\0" in name:
            raise _error(source, f"env.{name!r}", "not a usable name of a variable")
        if not isinstance(text, str):
            raise _error(source, f"env.{name}", f"must be a string, not {_kind(text)}")
        if "\0" in text:
            raise _error(source, f"env.{name}", "must not contain a NUL character")
    return dict(value)

"""Reads langgraph.json into one frozen object. Imports no user code."""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dotenv import dotenv_values

from holdfast.errors import ConfigError

DEFAULT_PATH = Path("langgraph.json")

GRAPHS_VARIABLE = "LANGSERVE_GRAPHS"
# Each variable holds a section as JSON, which replaces the section of the file.
SECTION_VARIABLES = {
    "auth": "LANGGRAPH_AUTH",
    "checkpointer": "LANGGRAPH_CHECKPOINTER",
    "http": "LANGGRAPH_HTTP",
    "store": "LANGGRAPH_STORE",
    "webhooks": "LANGGRAPH_WEBHOOKS",
}

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

# The keys of the objects within sections. Other keys lead to a warning.
KNOWN_INSIDE: Mapping[str, frozenset[str]] = {
    "checkpointer": frozenset({"backend", "path", "serde", "ttl"}),
    "checkpointer.serde": frozenset({"allowed_json_modules", "allowed_msgpack_modules", "pickle_fallback"}),
    "checkpointer.ttl": frozenset({"default_ttl", "strategy", "sweep_interval_minutes", "sweep_limit"}),
    "http": frozenset(
        {
            "app",
            "configurable_headers",
            "cors",
            "disable_a2a",
            "disable_assistants",
            "disable_event_streaming",
            "disable_mcp",
            "disable_meta",
            "disable_runs",
            "disable_store",
            "disable_threads",
            "disable_ui",
            "disable_webhooks",
            "enable_custom_route_auth",
            "logging_headers",
            "middleware_order",
            "mount_prefix",
        }
    ),
    "http.configurable_headers": frozenset({"excludes", "includes"}),
    "http.cors": frozenset(
        {
            "allow_credentials",
            "allow_headers",
            "allow_methods",
            "allow_origin_regex",
            "allow_origins",
            "expose_headers",
            "max_age",
        }
    ),
    "http.logging_headers": frozenset({"excludes", "includes"}),
    "store": frozenset({"index", "path", "ttl"}),
    "store.index": frozenset({"dims", "embed", "fields"}),
    "store.ttl": frozenset({"default_ttl", "refresh_on_read", "sweep_interval_minutes"}),
    "webhooks": frozenset({"allowed_fields", "env_prefix", "headers", "url"}),
    "webhooks.url": frozenset(
        {"allowed_domains", "allowed_ports", "disable_loopback", "max_url_length", "require_https"}
    ),
}

# Keys that LangGraph's own server knows and that have no effect here. A warning says so.
WITHOUT_EFFECT = {
    "checkpointer.serde.allowed_json_modules": "types are allowed by checkpointer.serde.allowed_msgpack_modules",
    "checkpointer.serde.pickle_fallback": "checkpoints are not pickled",
    "ui": "components of a user interface are not served",
}


@dataclass(frozen=True, slots=True)
class GraphTarget:
    """Where the code of one graph is. Exactly one of `file` and `module` is set."""

    graph_id: str
    spec: str
    """The target as written in langgraph.json, for messages."""
    file: Path | None
    module: str | None
    attribute: str
    description: str | None = None

    @property
    def key(self) -> str:
        """The key in langgraph.json, for messages."""
        return f"graphs.{self.graph_id}"


@dataclass(frozen=True, slots=True)
class ProjectConfig:
    """The content of a langgraph.json with a valid shape. The files and modules that it names are not read yet."""

    path: Path
    directory: Path
    """The absolute path of the directory that relative paths in the file refer to."""
    graphs: dict[str, GraphTarget]
    dependencies: tuple[str, ...]
    env: dict[str, str]
    raw: Mapping[str, Any]
    """The whole document, for the sections that other modules read."""
    warnings: tuple[str, ...]
    source: str
    """The name of the file in messages: its path as given, or LANGSERVE_GRAPHS."""
    overridden: Mapping[str, str] = field(default_factory=dict)
    """The sections that come from environment variables, with the variable of each."""

    def error(self, key: str, cause: str) -> ConfigError:
        return _error(self.overridden.get(key.partition(".")[0], self.source), key, cause)


def load_config(path: Path = DEFAULT_PATH, environ: Mapping[str, str] | None = None) -> ProjectConfig:
    """Read `path` and validate its shape.

    If `path` is the default langgraph.json and does not exist, the graphs come from LANGSERVE_GRAPHS in `environ`, with
    paths relative to the current directory. Any other file must exist. Each variable of SECTION_VARIABLES replaces a
    whole section of the file.

    Raises ConfigError with the file or variable, the key and the cause.
    """
    source = str(path)
    if path == DEFAULT_PATH and not path.exists() and (environ or {}).get(GRAPHS_VARIABLE):
        source = GRAPHS_VARIABLE
        document: Any = {"graphs": _parse(source, (environ or {})[GRAPHS_VARIABLE])}
    else:
        document = _parse(source, _read(path))
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: must hold a JSON object, not {_kind(document)}")

    overridden = {}
    for section, variable in SECTION_VARIABLES.items():
        if (environ or {}).get(variable):
            document[section] = _parse(variable, (environ or {})[variable])
            if document[section] is not None and not isinstance(document[section], dict):
                raise ConfigError(f"{variable}: must hold a JSON object, not {_kind(document[section])}")
            overridden[section] = variable

    directory = path.absolute().parent
    warnings = [
        f'{source}: unknown key "{key}"{suggestion(key, KNOWN_KEYS)}' for key in document if key not in KNOWN_KEYS
    ]
    warnings += _unknown_inside(source, document, overridden)
    warnings += _without_effect(source, document, overridden)
    _refuse_encryption(source, document.get("encryption"))
    return ProjectConfig(
        path=path.absolute(),
        directory=directory,
        graphs=_graphs(source, document, directory, warnings),
        dependencies=_dependencies(source, document.get("dependencies", [])),
        env=_env(source, document.get("env", {}), directory),
        raw=MappingProxyType(document),
        warnings=tuple(warnings),
        source=source,
        overridden=MappingProxyType(overridden),
    )


def missing_file(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: the file does not exist. Holdfast looked for {path.absolute()}. Name the project's langgraph.json "
        f"with --config FILE, or start Holdfast in the directory that has one."
    )


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or an empty string if no candidate is similar."""
    near = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(candidate) for candidate in near)}?" if near else ""


def _error(source: str, key: str, cause: str) -> ConfigError:
    return ConfigError(f"{source}: {key}: {cause}")


def _kind(value: object) -> str:
    """The JSON type of a value, for messages."""
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
        raise missing_file(path) from None
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


def _unknown_inside(source: str, document: Mapping[str, Any], overridden: Mapping[str, str]) -> list[str]:
    found = []
    for place, known in KNOWN_INSIDE.items():
        value = _at(document, place)
        for key in value if isinstance(value, dict) else ():
            if key not in known:
                where = overridden.get(place.partition(".")[0], source)
                found.append(f'{where}: unknown key "{place}.{key}"{suggestion(key, known)}')
    return found


def _without_effect(source: str, document: Mapping[str, Any], overridden: Mapping[str, str]) -> list[str]:
    return [
        f'{overridden.get(place.partition(".")[0], source)}: "{place}" has no effect: {reason}'
        for place, reason in WITHOUT_EFFECT.items()
        if _at(document, place)
    ]


def _at(document: Mapping[str, Any], place: str) -> Any:
    value: Any = document
    for part in place.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _refuse_encryption(source: str, section: object) -> None:
    """Refuse a project that asks for encryption: its data must not be stored unencrypted without notice."""
    if section:
        raise _error(source, "encryption", "not supported: state is stored as it is, so remove the section to go on")


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
        if description is not None and (problem := text_problem(description)):
            raise _error(source, f"{key}.description", problem)
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


def text_problem(text: str) -> str | None:
    """Why Postgres cannot store a text; None if it can."""
    if "\0" in text:
        return "must not contain NUL characters, which cannot be stored"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "must not contain half a surrogate pair, which cannot be stored"
    return None


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
        # A line with only a `NAME` sets nothing: the variable is expected in the environment.
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

"""Imports user code, with the project's variables in os.environ and its directories in sys.path."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import site
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from holdfast.errors import ConfigError
from holdfast.graphs.config import GraphTarget, ProjectConfig, suggestion
from holdfast.graphs.dependencies import import_directories
from holdfast.telemetry.exceptions import message_of


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target and its value, which may be of any type."""

    target: GraphTarget
    module: ModuleType
    value: object


def prepare_environment(config: ProjectConfig) -> None:
    """Set the variables of `env` and make local dependencies importable. Idempotent.

    Variables that are already set keep their values, so that an operator can override the file. Directories go to the
    front of sys.path, where Python puts a script's own directory.

    Raises ConfigError for a dependency that is missing or has the wrong version.
    """
    directories = [str(directory) for directory in import_directories(config)]
    for name, value in config.env.items():
        os.environ.setdefault(name, value)
    _prepend(directories)


def load_targets(config: ProjectConfig) -> dict[str, LoadedTarget]:
    """Import every target, each file once. Call `prepare_environment` first.

    Raises ConfigError with the graph and, if user code failed, its line.
    """
    # Python caches the listing of directories, and files may have been written since.
    importlib.invalidate_caches()
    return {graph_id: _load(config, target) for graph_id, target in config.graphs.items()}


def load_object(config: ProjectConfig, key: str, spec: str) -> object:
    """Import an object that another section of langgraph.json names, at `key`: "./file.py:name" or
    "package.module:name".

    Raises ConfigError with the key and, if user code failed, its line.
    """
    location, separator, attribute = spec.rpartition(":")
    if not separator or not location or not attribute.isidentifier():
        raise config.error(key, f'{spec!r} must look like "./file.py:variable" or "package.module:variable"')
    is_file = location.endswith(".py") or "/" in location or "\\" in location
    file, module = (config.directory / location, None) if is_file else (None, location)
    importlib.invalidate_caches()
    return _load(config, _NamedTarget(key, spec, file, module, attribute)).value


class _NamedTarget(GraphTarget):
    """A target in another section than `graphs`. Its id is the key in langgraph.json."""

    __slots__ = ()

    @property
    def key(self) -> str:
        return self.graph_id


def _prepend(directories: list[str]) -> None:
    sys.path[:0] = [directory for directory in directories if directory not in sys.path]


def _load(config: ProjectConfig, target: GraphTarget) -> LoadedTarget:
    if target.file is not None and not target.file.is_file():
        raise config.error(target.key, f"{target.spec}: the file {target.file} does not exist")
    try:
        if target.file is not None:
            module = _import_file(config, target.file.resolve())
        else:
            assert target.module is not None
            module = importlib.import_module(target.module)
    # SystemExit, too: a script without a __main__ guard must not end the server without a message.
    except (Exception, SystemExit) as error:
        raise _import_error(config, target, error) from error
    try:
        value = getattr(module, target.attribute)
    except AttributeError:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise config.error(
            target.key,
            f"{target.spec}: {module.__file__ or module.__name__} has no {target.attribute!r}"
            f"{suggestion(target.attribute, names)}",
        ) from None
    # A module may compute its variables in __getattr__.
    except (Exception, SystemExit) as error:
        raise _import_error(config, target, error) from error
    return LoadedTarget(target, module, value)


def _import_file(config: ProjectConfig, file: Path) -> ModuleType:
    """Import `file` under the name that Python would give it, or else under a name that Holdfast makes.

    Checkpoints store this name with every value of a class of the module. So it must be the same on every machine, not
    made from an absolute path unless the file is outside the project. It must also be the name by which other user code
    imports the module, or there would be two copies of each class.
    """
    root, parts = _package_of(file)
    top = file
    if file.parent != root:
        top = root / parts[0] / "__init__.py"
        _prepend([str(root)])
    if _is_importable_as(parts[0], top):
        return importlib.import_module(".".join(parts))

    generated_name = _generated_name(config, top)
    if generated_name not in sys.modules:
        _execute(generated_name, top)
    return importlib.import_module(".".join([generated_name, *parts[1:]]))


def _package_of(file: Path) -> tuple[Path, list[str]]:
    """The directory from which `file` is imported, and the parts of its dotted name."""
    parts = [] if file.stem == "__init__" else [file.stem]
    directory = file.parent
    while (directory / "__init__.py").exists() and directory.parent != directory:
        parts.insert(0, directory.name)
        directory = directory.parent
    return directory, parts


def _is_importable_as(name: str, file: Path) -> bool:
    """Whether `import name` imports this file, and not an installed or built-in module of the same name."""
    if not name.isidentifier():
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _generated_name(config: ProjectConfig, file: Path) -> str:
    try:
        place = file.relative_to(config.directory.resolve()).as_posix()
    except ValueError:
        place = file.as_posix()
    name = _name_from_path(place)
    taken = sys.modules.get(name)
    if taken is not None and taken.__file__ != str(file):
        return _name_from_path(file.as_posix())
    return name


def _name_from_path(place: str) -> str:
    words = re.sub(r"\W+", "_", place.removesuffix(".py").removesuffix("/__init__"))
    digest = hashlib.sha256(place.encode()).hexdigest()[:8]
    return f"graph_module_{words.strip('_')}_{digest}"


def _execute(name: str, file: Path) -> None:
    is_package = file.name == "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)] if is_package else None
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before the module is executed: dataclasses and get_type_hints look their module up meanwhile.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _import_error(config: ProjectConfig, target: GraphTarget, error: BaseException) -> ConfigError:
    place = _place(error)
    if place is None and isinstance(error, ModuleNotFoundError) and _names_part_of(error.name, target.module):
        return config.error(
            target.key,
            f"{target.spec}: there is no module {error.name!r}; it must be installed, "
            f"or lie in {config.directory} or in a local dependency",
        )
    failed = f"importing {target.spec} failed{f' at {place}' if place else ''}"
    return config.error(target.key, f"{failed}\n  {summary_of(error)}")


def summary_of(error: BaseException) -> str:
    """The type and the message of an exception of the project's code, on one line."""
    message = error.msg if isinstance(error, SyntaxError) else message_of(error)
    summary = " ".join(f"{type(error).__name__}: {message}".split()) if message else type(error).__name__
    # Messages of some libraries are pages long. The cause is in the first lines.
    return summary if len(summary) <= 500 else summary[:500] + "…"


def _names_part_of(missing: str | None, module: str | None) -> bool:
    return bool(missing and module) and f"{module}.".startswith(f"{missing}.")


def _place(error: BaseException) -> str | None:
    """`file:line` where user code failed; None if the traceback has no such line."""
    if isinstance(error, SyntaxError) and error.filename is not None and Path(error.filename).is_file():
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen ")
    ]
    installed = installed_directories()
    own = [
        frame for frame in frames if not any(Path(frame.filename).is_relative_to(directory) for directory in installed)
    ]
    # Prefer the innermost line of the user's code to one of a library, and a library's line to none. Skip importlib,
    # which is in the traceback of every import.
    for frame in reversed(own or frames):
        if Path(frame.filename).parent.name != "importlib":
            return f"{frame.filename}:{frame.lineno}"
    return None


def installed_directories() -> list[Path]:
    """The directories of Python and of installed packages. Code in them is not the user's."""
    paths = sysconfig.get_paths()
    found = {
        paths["stdlib"],
        paths["platstdlib"],
        paths["purelib"],
        paths["platlib"],
        site.getusersitepackages(),
    }
    return [Path(path) for path in found]

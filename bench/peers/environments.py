"""The peers' environments: built once from the package index, with pinned versions, in a folder git does not see."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[1] / ".peers"
BUILD_TIMEOUT = 900.0
NEWER = ("3.12", "3.13")
"""Aegra runs on nothing older. The other peer gets the same, where it is found: newer Pythons are the faster ones."""
ASK = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys.executable)"


class Missing(Exception):
    """A peer cannot run on this machine; says why."""


def python_for(versions: tuple[str, ...], *, given: Path | None = None) -> Path | None:
    """The first Python found of one of these versions. A name alone proves nothing: a shim of pyenv may stand for a
    Python that is not chosen here, so each candidate is asked."""
    candidates = [given] if given is not None else _candidates(versions)
    for candidate in candidates:
        try:
            asked = subprocess.run([candidate, "-c", ASK], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if asked.returncode == 0:
            version, executable = asked.stdout.split("\n")[:2]
            if version in versions:
                return Path(executable)
    return None


def _candidates(versions: tuple[str, ...]) -> Iterator[Path]:
    yield Path(sys.executable)
    for version in versions:
        for folder in (*os.get_exec_path(), "/usr/bin", "/usr/local/bin", "/opt/homebrew/bin"):
            yield Path(folder) / f"python{version}"
        yield from sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    if uv := shutil.which("uv"):
        for order in ("find", "install", "find"):
            said = subprocess.run([uv, "python", order, versions[0]], capture_output=True, text=True, timeout=300)
            if said.returncode == 0 and order == "find":
                yield Path(said.stdout.strip())


def build(name: str, versions: tuple[str, ...], say: Callable[[str], None], *, python: Path | None = None) -> Path:
    """The folder with the peer's programs, made or made anew when its pins have changed. Raises Missing."""
    pins = Path(__file__).parent / f"requirements-{name}.txt"
    place = ENVIRONMENTS / name
    stamp = place / ".installed"
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return place / "bin"
    found = python_for(versions, given=python)
    if found is None:
        raise Missing(f"{name} needs Python {' or '.join(versions)}, and none was found (--python names one)")
    say(f"{name}: building its environment in {place} with {found}")
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    if uv := shutil.which("uv"):
        _install([[uv, "venv", "--quiet", "--python", str(found), str(place)]], name)
        installer = [uv, "pip", "install", "--quiet", "--python", str(place / "bin" / "python")]
    else:
        _install([[str(found), "-m", "venv", str(place)]], name)
        installer = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _install([[*installer, "-r", str(pins)]], name)
    stamp.write_text(digest)
    return place / "bin"


def _install(commands: list[list[str]], name: str) -> None:
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Missing(f"{name}: {error}") from None
        if done.returncode:
            raise Missing(f"{name} could not be installed: {done.stderr.strip()[-600:]}")


def pinned(name: str, package: str) -> str:
    """The version of a package in a peer's pins."""
    pins = (Path(__file__).parent / f"requirements-{name}.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in pins if line.partition("==")[0] == package)

"""Node and the packages that the JavaScript tests need.

`python -m tests.support.node FOLDER...` installs them beforehand, so that `make test` does it in the open and not
inside the first test that needs them.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

PROGRAMS = ("node", "npm")
MISSING = "Node (20 or later) with npm is not installed"
STAMP = ".installed"
# Written by `npm install --package-lock-only --omit-lockfile-registry-resolved` beside a changed package.json.
LOCK = "package-lock.json"
NOTHING_MORE: Mapping[str, str] = MappingProxyType({})


class InstallationFailed(Exception):
    pass


def node_found() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


def node_modules(folder: Path) -> Path:
    """The folder's node_modules, with what its package.json names. Without Node the test fails in CI, and is skipped
    elsewhere."""
    if not node_found():
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    try:
        return install(folder)
    except InstallationFailed as error:
        pytest.fail(str(error))


def install(folder: Path) -> Path:
    """Install what package-lock.json pins. Does nothing if it has been done since that or package.json last changed."""
    modules = folder / "node_modules"
    stamp = modules / STAMP
    with (folder / "package.json").open("rb") as package:
        # Several pytest processes come here at once: the first installs, the others wait for it.
        fcntl.flock(package, fcntl.LOCK_EX)
        wanted = hashlib.sha256(package.read() + (folder / LOCK).read_bytes()).hexdigest()
        if not stamp.exists() or stamp.read_text() != wanted:
            stamp.unlink(missing_ok=True)
            done = subprocess.run(
                ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                raise InstallationFailed(f"npm ci in {folder} ended with {done.returncode}:\n{done.stdout}")
            modules.mkdir(exist_ok=True)
            stamp.write_text(wanted)
    return modules


async def run_node(script: Path, *arguments: str, env: Mapping[str, str] = NOTHING_MORE, timeout: float = 120) -> str:
    """What the script printed. The test fails, with that, if the script fails or needs more than `timeout` seconds."""
    process = await asyncio.create_subprocess_exec(
        "node",
        str(script),
        *arguments,
        cwd=script.parent,
        env={**os.environ, **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    output = bytearray()
    try:
        async with asyncio.timeout(timeout):
            while chunk := await process.stdout.read(65536):
                output += chunk
            code = await process.wait()
    except TimeoutError:
        pytest.fail(f"{script.name} did not end within {timeout:g} s:\n{output.decode(errors='replace')}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    printed = output.decode(errors="replace")
    assert code == 0, f"{script.name} ended with {code}:\n{printed}"
    return printed


def main(folders: list[str]) -> None:
    if not node_found():
        print(f"The JavaScript tests will be skipped: {MISSING}")
        return
    for folder in folders:
        if not (Path(folder) / "node_modules" / STAMP).exists():
            print(f"Installing the packages of {folder}, which the JavaScript tests need", flush=True)
        try:
            install(Path(folder))
        except InstallationFailed as error:
            # The tests that need them will fail with this; it is no reason to withhold the others.
            print(error, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])

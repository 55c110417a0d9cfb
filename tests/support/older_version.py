"""The sources of an earlier version, from the history of the repository, to be executed beside the present ones."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Processes of this version may be running in production while they are replaced. To be moved on with each release.
COMMIT = "288b38ff4e3a05d4e5480143fcec209b6760bffd"
GIT_TIMEOUT_SECONDS = 60


def unpack_older_version(directory: Path, root: Path = ROOT, commit: str = COMMIT) -> dict[str, str]:
    """Put the sources there. Returns the environment of processes that execute them.

    A source archive and a shallow clone do not hold the commit: there the test is skipped. In CI the commit is fetched
    instead, and the test fails if that fails: a skipped test would look like a rolling deploy that works.
    """
    archive = _archive(root, commit)
    if archive is None and os.environ.get("CI"):
        _git(root, "fetch", "--depth", "1", "origin", commit)
        archive = _archive(root, commit)
        if archive is None:
            pytest.fail(f"commit {commit} is neither in the repository nor at its origin")
    if archive is None:
        pytest.skip(f"commit {commit} is not in the repository: this is no full clone")
    with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
        sources.extractall(directory, filter="data")
    return {"PYTHONPATH": str(directory / "src")}


def _archive(root: Path, commit: str) -> bytes | None:
    return _git(root, "archive", "--format=tar", commit, "src")


def _git(root: Path, *command: str) -> bytes | None:
    """What git printed, or None if it failed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *command],
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
            capture_output=True,
            timeout=GIT_TIMEOUT_SECONDS,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

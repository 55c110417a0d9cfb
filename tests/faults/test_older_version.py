"""The older version of the rolling deploy is found in any clone that CI makes, or CI fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.older_version import ROOT, unpack_older_version


def git(directory: Path, *command: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *command], capture_output=True, check=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """A repository of two commits."""
    directory = tmp_path / "origin"
    (directory / "src").mkdir(parents=True)
    git(directory, "init", "--quiet")
    for version in ("1", "2"):
        (directory / "src" / "version").write_text(version)
        git(directory, "add", ".")
        git(directory, "commit", "--quiet", "--message", version)
    return directory


@pytest.fixture
def first_commit(origin: Path) -> str:
    return git(origin, "rev-parse", "HEAD~1")


@pytest.fixture
def shallow_clone(origin: Path, tmp_path: Path) -> Path:
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{origin}", "shallow")
    return tmp_path / "shallow"


def test_ci_fetches_the_commit_that_its_shallow_clone_lacks(
    shallow_clone: Path, first_commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    environ = unpack_older_version(tmp_path / "older", shallow_clone, first_commit)
    assert (Path(environ["PYTHONPATH"]) / "version").read_text() == "1"


@pytest.mark.parametrize("ci", ["true", "1"])
def test_ci_fails_if_the_commit_is_nowhere(
    ci: str, shallow_clone: Path, first_commit: str, origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    shutil.rmtree(origin)
    with pytest.raises(pytest.fail.Exception, match="neither in the repository nor at its origin"):
        unpack_older_version(tmp_path / "older", shallow_clone, first_commit)


def test_shallow_clone_skips_the_test_outside_ci(
    shallow_clone: Path, first_commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        unpack_older_version(tmp_path / "older", shallow_clone, first_commit)


def test_ci_script_sets_ci() -> None:
    """Without it, a test whose program is missing is skipped instead of failing."""
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("a source archive has no script of CI")
    assert "export CI=true" in script.read_text().splitlines()

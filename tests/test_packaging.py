"""What the package says about itself: the versions it is for, its dependencies and their pins, and the commit hooks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from holdfast.db.connect import MINIMUM_SERVER
from holdfast.db.embedded_server import MAJOR_VERSION
from tests.matrix import postgres, pythons

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


def pins(*files: str) -> dict[str, str]:
    lines = [line for file in files for line in (ROOT / file).read_text().splitlines()]
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def test_matrix_has_every_version_that_is_promised(project: dict[str, Any]) -> None:
    allowed = SpecifierSet(project["requires-python"])
    versions = pythons.versions()
    assert f">={versions[0]}" == str(allowed)
    assert all(version in allowed for version in versions)
    servers = [int(version) for version in postgres.versions()]
    assert servers == list(range(MINIMUM_SERVER // 10_000, MAJOR_VERSION + 1))
    promise = f"Python {versions[0]} to {versions[-1]} and Postgres {servers[0]} to {servers[-1]}"
    assert promise in (ROOT / "docs" / "operations.md").read_text()
    assert promise in (ROOT / "CHANGELOG.md").read_text()


def test_matrix_names_tests_that_exist() -> None:
    named = (*postgres.TESTS, *postgres.MORE_TESTS, *postgres.NOT_HERE)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_pins_are_in_the_ranges_of_the_package(project: dict[str, Any]) -> None:
    pinned = pins("requirements.txt")
    extras = [each for group in project["optional-dependencies"].values() for each in group]
    for requirement in map(Requirement, (*project["dependencies"], *extras)):
        assert requirement.specifier.contains(pinned[requirement.name]), f"{requirement} and {pinned[requirement.name]}"


def test_pins_of_development_repeat_none_of_the_package() -> None:
    assert pins("requirements.txt").keys() & pins("requirements-dev.txt").keys() == set()


@pytest.mark.parametrize(
    ("subject", "refused"),
    [
        ("Merge branch 'main' of /tmp/w_web", True),
        ("Read the settings from /home/me/.holdfast", True),
        ("Find Python in C:\\Users\\me", True),
        ("Serve GET /runs and /threads/{id}/state", False),
        ("Describe https://example.com/home/page and docs/tmp/notes", False),
    ],
)
def test_hook_refuses_the_path_of_a_machine_in_a_commit_message(subject: str, refused: bool) -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "a hook of another repository would be downloaded"
    (hook,) = (hook for hook in repository["hooks"] if hook["id"] == "machine-path")
    assert (hook["language"], hook["stages"]) == ("pygrep", ["commit-msg"])
    assert bool(re.search(hook["entry"], subject)) == refused

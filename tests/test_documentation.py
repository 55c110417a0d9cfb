"""What the documents say is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.settings.reference import reference

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_page_is_generated_from_the_settings() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target
    for path in re.findall(r"`((?:src|tests|docs|bench|examples|deploy)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path


def test_every_dependency_is_explained() -> None:
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    declared = (ROOT / "pyproject.toml").read_text().split("dependencies = [", 1)[1].split("]\n", 1)[0]
    for name in re.findall(r'"([a-z-]+)', declared):
        assert f"`{name}" in explained, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_curl_examples_declare_their_bodies_as_json(document: Path) -> None:
    text = document.read_text().replace("\\\n", " ")
    for command in re.findall(r"^\s*(curl .* -d .*)$", text, re.MULTILINE):
        assert "content-type: application/json" in command, command

"""The documents are true: links lead somewhere, generated pages are current, paths exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from holdfast.api import reference as api_reference
from holdfast.engine.states import MOVES
from holdfast.settings.reference import reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]

FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(document: Path) -> str:
    """The text without its blocks of code."""
    return FENCE.sub("", document.read_text())


def links(document: Path) -> list[tuple[Path, str]]:
    """The links to files, each with its anchor."""
    targets = [target for target in LINK.findall(CODE.sub("", prose(document))) if "://" not in target]
    parts = [target.partition("#") for target in targets]
    return [((document.parent / path).resolve() if path else document, anchor) for path, _, anchor in parts]


def anchor_on_forge(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchor_on_site(heading: str) -> str:
    """As MkDocs makes them."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def anchors(document: Path) -> set[str]:
    """The anchors that are the same on a forge and on a site of MkDocs, and that only one heading has."""
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(prose(document))]
    found = Counter(anchor_on_forge(heading) for heading in headings)
    same = {anchor_on_forge(heading) for heading in headings if anchor_on_forge(heading) == anchor_on_site(heading)}
    return {anchor for anchor in same if found[anchor] == 1}


def test_configuration_page_is_current() -> None:
    assert (DOCS / "configuration.md").read_text() == reference(), "run `make docs`"


def test_api_page_is_current() -> None:
    assert (DOCS / "api.md").read_text() == api_reference.page(api_reference.document()), "run `make docs`"


def test_api_page_has_every_operation_and_object() -> None:
    page, document = (DOCS / "api.md").read_text(), api_reference.document()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"\n`{method.upper()} {path}`\n" in page
    for name in document["components"]["schemas"]:
        assert f"\n### {name}\n" in page


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for path, anchor in links(document):
        assert path.exists(), path
        if anchor:
            assert anchor in anchors(path), f"{path.name}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_pages_stay_among_the_pages(page: Path) -> None:
    """A static site has the pages and nothing else. Other files are named as code."""
    for path, _ in links(page):
        assert path.is_relative_to(DOCS), path


def test_every_page_is_reachable_from_the_index() -> None:
    reached, next_ones = set[Path](), {DOCS / "index.md"}
    while next_ones:
        page = next_ones.pop()
        reached.add(page)
        next_ones |= {path for path, _ in links(page) if path.suffix == ".md"} - reached
    assert set(PAGES) == reached
    assert DOCS / "index.md" in {path for path, _ in links(ROOT / "README.md")}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_paths_of_files_exist(document: Path) -> None:
    for path in re.findall(r"`((?:src|tests|docs|bench|examples|deploy)/[\w./-]*)`", document.read_text()):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`([a-z_]+/[\w/]+\.py)`", document.read_text()):
        roots = (ROOT, ROOT / "src" / "holdfast")
        assert any((root / path).exists() for root in roots), path


def test_every_dependency_is_explained() -> None:
    explained = (DOCS / "dependencies.md").read_text()
    declared = (ROOT / "pyproject.toml").read_text().split("dependencies = [", 1)[1].split("]\n", 1)[0]
    for name in re.findall(r'"([a-z-]+)', declared):
        assert f"`{name}" in explained, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_curl_examples_declare_their_bodies_as_json(document: Path) -> None:
    text = document.read_text().replace("\\\n", " ")
    for command in re.findall(r"^\s*(curl .* -d .*)$", text, re.MULTILINE):
        assert "content-type: application/json" in command, command


def test_architecture_lists_the_moves_of_the_state_machine() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == {(start.value, end.value) for start, ends in MOVES.items() for end in ends}


def test_architecture_lists_the_packages_in_the_order_of_the_layers() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    layers = re.findall(r'"holdfast\.([\w. |:]+)"', project.split("layers = [", 1)[1].split("\n]", 1)[0])
    declared = [name.removeprefix("holdfast.") for layer in layers for name in re.split(r" [|:] ", layer)]
    text = (DOCS / "architecture.md").read_text().split("## The packages", 1)[1].split("\n## ", 1)[0]
    listed = [
        name for cell in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    ]
    assert listed == declared


def test_architecture_is_short() -> None:
    assert len(re.findall(r"\S*\w\S*", (DOCS / "architecture.md").read_text())) < 900

"""The figures in the documents are those that bench/results holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench.report import RESULTS, Finding, Measure, write_findings

from bench import figures


@pytest.mark.parametrize("block", list(figures.BLOCKS))
def test_figures_in_documents_are_those_of_the_results(block: str) -> None:
    _, inside, _ = figures.split(figures.BLOCKS[block].read_text(), block)
    assert inside == figures.content(block), f"run `make figures ONLY={block} WRITE=1`"


def test_page_of_the_comparison_is_that_of_its_result() -> None:
    """But for who took part: what is said of their settings may be written better, and the result stays."""
    kept, made = (text.partition("## Who took part") for text in (figures.PEERS_PAGE.read_text(), figures.peers_page()))
    assert kept[:2] == made[:2], "run `make figures ONLY=peers WRITE=1`"


@pytest.mark.parametrize("document", sorted(set(figures.BLOCKS.values())), ids=lambda path: path.name)
def test_numbers_beside_the_blocks_say_when_they_were_measured(document: Path) -> None:
    """Nobody refreshes them: what is measured again belongs into a block."""
    assert not undated(document.read_text())


def test_an_undated_number_beside_a_block_is_found() -> None:
    block = f"{figures.BEGINNING.format('engine')}\n| a run | 2.5 ms |\n{figures.END}"
    dated, older = "A heartbeat costs 20 µs (2026-11-15).", "Without the index\nit took 250 and 540 ms."
    assert undated(f"# Speed\n\n{dated}\n\n{block}\n\n- {older}\n- {dated}\n") == [f"- {older}"]
    assert undated(f"# Speed\n\n{block}\n\nFour workers do 0.83 of what two do.\n")
    assert undated(f"# Speed\n\n{block}\n\nIt touches 774 pages.\n\n## History\n\n{older}\n") == [
        "It touches 774 pages."
    ]


UNITS = r"(?:ms|µs|[KMG]B|%|pages|statements|commits|runs a second|times|of them)"
PYTHON = r"3\.1\d"
MEASURED = re.compile(rf"\b(?!{PYTHON})\d+\.\d+\b|\b\d[\d.,]*\s{UNITS}(?!\w)")
DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")


def undated(document: str) -> list[str]:
    """Paragraphs and points of lists that state what looks measured and no date, in the sections that have a block."""
    sections = re.split(r"^(?=## )", document, flags=re.MULTILINE)
    prose = [
        re.sub(r"<!-- figures: .*?<!-- end of figures -->", "", section, flags=re.DOTALL)
        for section in sections
        if "<!-- figures: " in section
    ]
    parts = [part.strip() for text in prose for part in re.split(r"\n\n|\n(?=- )", text)]
    return [part for part in parts if MEASURED.search(part) and not DATE.search(part)]


def test_every_block_and_every_result_is_of_a_figure() -> None:
    texts = "".join(path.read_text() for path in sorted(set(figures.BLOCKS.values())))
    assert sorted(re.findall(r"<!-- figures: (\S+) -->", texts)) == sorted(figures.BLOCKS)
    assert {figure.programme for figure in figures.FIGURES} == set(figures.BLOCKS)
    kept = {path for path in RESULTS.glob("*.json") if not path.stem.endswith("-quick")}
    assert kept == {figure.path for figure in figures.FIGURES}, "only the newest result of each figure is kept"


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ([], [figure.name for figure in figures.FIGURES]),
        (["takeover"], ["takeover"]),
        (["streams", "memory"], ["streams-idle", "fanout", "throughput", "first-event", "memory"]),
    ],
    ids=["all", "one", "programme"],
)
def test_figures_are_chosen_by_name_or_programme(only: list[str], names: list[str]) -> None:
    assert [figure.name for figure in figures.chosen(only)] == names


def test_figure_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no figure speed"):
        figures.chosen(["takeover", "speed"])


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("bench.report.RESULTS", tmp_path)
    measures = [
        Measure(name="kept", target=2, rule="at most", measured=1.234, unit=" s", note="of 20"),
        Measure(name="missed", target=10_000, rule="at least", measured=9_999.5),
    ]
    [path] = write_findings("engine", [Finding(figure="claim", measures=measures)])
    [again] = write_findings("engine", [Finding(figure="claim", measures=measures)])
    assert path == again == tmp_path / "engine-claim.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.servers
def test_a_result_says_which_version_it_is_of_and_when(result: dict[str, Any]) -> None:
    rows = list(figures._measures([{**result, "tree": "1.2.3 (abc1234)", "at": "2026-11-18T09:00:00+00:00"}]))
    assert rows[2:] == [
        "| claim: kept | at most 2 s | 1.23 s (of 20) | 1.2.3 (abc1234), 2026-11-18 |",
        "| claim: missed | at least 10,000 | **10,000** | 1.2.3 (abc1234), 2026-11-18 |",
    ]
    assert re.match(r"\d+\.\d+\.\d+", result["tree"])


@pytest.mark.servers
def test_asides_of_a_result_stand_below_the_table(result: dict[str, Any]) -> None:
    rows = list(figures._measures([{**result, "asides": ["0.93 ms without a saver"]}]))
    assert rows[-2:] == ["", "- claim: 0.93 ms without a saver"]

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


def test_a_result_says_which_version_it_is_of_and_when(result: dict[str, Any]) -> None:
    rows = list(figures._measures([{**result, "tree": "1.2.3 (abc1234)", "at": "2026-11-18T09:00:00+00:00"}]))
    assert rows[2:] == [
        "| claim: kept | at most 2 s | 1.23 s (of 20) | 1.2.3 (abc1234), 2026-11-18 |",
        "| claim: missed | at least 10,000 | **10,000** | 1.2.3 (abc1234), 2026-11-18 |",
    ]
    assert re.match(r"\d+\.\d+\.\d+", result["tree"])

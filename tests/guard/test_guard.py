"""What a run makes everybody do, against what was accepted; and that the comparison notices what it is there for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from bench.guard import count
from bench.guard.accepted import ACCEPTED, accept, compare, load, python_version
from bench.guard.counting import CASES, read_statements

FIGURES: dict[str, Any] = {
    "one step": {
        "statements": {"journal": {"BEGIN": 2, "COMMIT": 2}, "web": {"BEGIN": 1, "SELECT 1": 3, "COMMIT": 1}},
        "waits": {"web": 50, "worker": 76},
        "wal": 12_000,
        "calls": {"web": {"holdfast": 2_000, "fastapi": 5_000}, "worker": {"holdfast": 1_000, "langgraph": 9_000}},
    }
}


@pytest.fixture
def figures() -> dict[str, Any]:
    """Of a run as it is measured."""
    return copy.deepcopy(FIGURES)


@pytest.fixture
def accepted(tmp_path: Path) -> dict[str, Any]:
    return load(accept(FIGURES, tmp_path / "accepted.json", "3.11"))


def test_a_run_costs_no_more_than_was_accepted() -> None:
    comparison = compare(count(), load())
    assert not comparison.grown, "\n" + "\n".join(comparison.grown)
    if not comparison.calls:
        pytest.skip("\n".join(comparison.notes))


def test_every_case_is_accepted() -> None:
    assert set(load()) == set(CASES)
    for figures in load().values():
        assert {"journal", "web", "worker"} <= set(figures["statements"])
        assert all(sum(calls["worker"].values()) > 1_000 for calls in figures["calls"].values())


def test_what_is_as_it_was_has_not_grown(figures: dict[str, Any], accepted: dict[str, Any]) -> None:
    comparison = compare(figures, accepted, "3.11")
    assert (comparison.grown, comparison.notes, comparison.calls) == ([], [], True)


def test_one_statement_more_is_told_with_what_it_is(figures: dict[str, Any], accepted: dict[str, Any]) -> None:
    figures["one step"]["statements"]["journal"]["UPDATE run SET colour = 'red'"] = 1
    [line, how] = compare(figures, accepted, "3.11").grown
    assert "one step: journal sends 5 statements, 4 were accepted" in line
    assert "+1  UPDATE run SET colour = 'red'" in line
    assert "python -m bench guard --accept" in how


def test_a_part_that_was_silent_is_told(figures: dict[str, Any], accepted: dict[str, Any]) -> None:
    figures["one step"]["statements"]["upkeep"] = {"SELECT 1": 1}
    assert "upkeep sends 1 statements, 0 were accepted" in compare(figures, accepted, "3.11").grown[0]


def test_another_statement_instead_of_one_has_not_grown(figures: dict[str, Any], accepted: dict[str, Any]) -> None:
    web = figures["one step"]["statements"]["web"]
    web["SELECT 2"] = web.pop("SELECT 1")
    assert not compare(figures, accepted, "3.11").grown


@pytest.mark.parametrize(("more", "told"), [(1.03, False), (1.15, True)])
def test_calls_may_vary_but_not_grow(
    figures: dict[str, Any], accepted: dict[str, Any], more: float, told: bool
) -> None:
    calls = figures["one step"]["calls"]["web"]
    calls["fastapi"] += round((more - 1) * sum(calls.values()))
    grown = compare(figures, accepted, "3.11").grown
    assert bool(grown) is told
    if told:
        assert "calls of functions in the web: 8,050, 7,000 were accepted (+15 %): fastapi +1,050" in grown[0]


@pytest.mark.parametrize("what", ["waits", "wal"])
def test_waits_and_bytes_may_not_grow_either(figures: dict[str, Any], accepted: dict[str, Any], what: str) -> None:
    one = figures["one step"]
    if what == "waits":
        one["waits"]["worker"] += 10
    else:
        one["wal"] += 1_800
    assert len(compare(figures, accepted, "3.11").grown) == 2


def test_less_is_no_growth_but_is_told(figures: dict[str, Any], accepted: dict[str, Any]) -> None:
    del figures["one step"]["statements"]["web"]["SELECT 1"]
    figures["one step"]["calls"]["worker"]["langgraph"] -= 2_000
    comparison = compare(figures, accepted, "3.11")
    assert not comparison.grown
    assert len(comparison.notes) == 2


def test_calls_of_another_python_are_not_compared_and_that_is_said(
    figures: dict[str, Any], accepted: dict[str, Any]
) -> None:
    figures["one step"]["calls"]["web"]["fastapi"] *= 2
    comparison = compare(figures, accepted, "3.99")
    assert not comparison.grown
    assert not comparison.calls
    assert "No calls are accepted for Python 3.99" in comparison.notes[0]
    figures["one step"]["statements"]["web"]["SELECT 2"] = 1
    assert compare(figures, accepted, "3.99").grown


def test_accepting_leaves_what_other_pythons_count(figures: dict[str, Any], tmp_path: Path) -> None:
    path = accept(figures, tmp_path / "accepted.json", "3.11")
    accept(figures, path, "3.12")
    assert list(load(path)["one step"]["calls"]) == ["3.11", "3.12"]


def test_a_case_that_nobody_accepted_fails(figures: dict[str, Any]) -> None:
    assert compare(figures, {}).grown


def test_statements_are_read_whole_and_only_holdfasts(tmp_path: Path) -> None:
    log = tmp_path / "postgres.log"
    lines = [
        "bench-guard bench_guard holdfast web | LOG:  duration: 0.1 ms  parse _pg3_1: SELECT 1",
        "bench-guard bench_guard holdfast web | LOG:  duration: 0.1 ms  bind _pg3_1: ",
        "\tSELECT a",
        "\tFROM b",
        "bench-guard bench_guard holdfast web | LOG:  duration: 0.1 ms  execute _pg3_1: SELECT a",
        "bench-guard bench_guard holdfast journal | LOG:  duration: 0.1 ms  statement: BEGIN",
        "bench-guard other holdfast web | LOG:  duration: 0.1 ms  statement: BEGIN",
        "bench-guard bench_guard bench | LOG:  duration: 0.1 ms  statement: BEGIN",
    ]
    log.write_text("\n".join(lines) + "\n")
    found = read_statements(log, 0, log.stat().st_size)
    assert found == {("web", "SELECT a FROM b"): 1, ("journal", "BEGIN"): 1}


def test_the_accepted_file_is_of_this_repository() -> None:
    assert ACCEPTED.exists()
    assert python_version().count(".") == 1

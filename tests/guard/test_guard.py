"""What requests make everybody do, against what was accepted; and that the comparison notices what it is there for."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from bench.guard import count, counted
from bench.guard.accepted import ACCEPTED, accept, compare, load, python_version
from bench.guard.cases import CASES, EVENTS_ONE_BY_ONE
from bench.guard.counted import SLEEPS, SLOW_FRAMES, CountingLoop
from bench.guard.counting import Counting, read_statements, typical
from bench.stage import Stage

SHARING = ("one step", "runs at once")
FIGURES: dict[str, Any] = {
    "one step": {
        "statements": {"journal": {"BEGIN": 2, "COMMIT": 2}, "web": {"BEGIN": 1, "SELECT 1": 3, "COMMIT": 1}},
        "waits": {"web": 50, "worker": 76},
        "wal": 12_000,
        "timers": {"web": 12, "worker": 60},
        "slept": {"web": 0, "worker": 0},
        "cpu": {"web": 400, "worker": 500},
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


@pytest.mark.servers
def test_a_run_costs_no_more_than_was_accepted() -> None:
    comparison = compare(count(), load())
    assert not comparison.grown, "\n" + "\n".join(comparison.grown)
    if not comparison.calls:
        pytest.skip("\n".join(comparison.notes))


def test_every_case_is_accepted() -> None:
    assert set(load()) == set(CASES)
    for figures in load().values():
        assert {"web"} <= set(figures["statements"]) or {"journal", "worker"} <= set(figures["statements"])
        for calls in figures["calls"].values():
            assert sum(calls["web"].values()) > 1_000
    assert load()["first event"]["delays"]


def test_runs_at_once_share_their_statements() -> None:
    alone, together = (sum(sum(part.values()) for part in load()[case]["statements"].values()) for case in SHARING)
    assert together < 2 * alone, "thirty runs at once send hardly more statements than one"


@pytest.mark.servers
@pytest.mark.parametrize(
    ("case", "how", "told"),
    [
        ("events at once", "sleep", "milliseconds that the web sleeps: 1,0"),
        ("events at once", "busy", "CPU of the web"),
        ("events at once", "later", "milliseconds that the web sleeps"),
        ("first event", "sleep", "milliseconds that the web sleeps"),
        ("first event", "later", "milliseconds that the web sleeps"),
    ],
)
def test_frames_that_take_5_ms_longer_are_noticed(
    case: str, how: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one call more for each frame they would not be: of calls, seven per cent pass for chance."""
    grown = grown_with_slow_frames(monkeypatch, case, f"{how} 0.005", repetitions=3, warm_up=2)
    assert any(told in line for line in grown), "\n".join(grown)


@pytest.mark.servers
@pytest.mark.parametrize("how", ["sleep", "later"])
@pytest.mark.parametrize(
    ("case", "seconds", "least"),
    [("events one by one", 0.1, 100 * EVENTS_ONE_BY_ONE), ("first event", 1.0, 1_000)],
)
def test_long_delays_of_frames_are_noticed(
    case: str, how: str, seconds: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the sleeps of loops that run whether there is a stream or not."""
    grown = grown_with_slow_frames(monkeypatch, case, f"{how} {seconds}", repetitions=1, warm_up=1)
    label = "milliseconds that the web sleeps: "
    slept = [int(line.partition(label)[2].partition(", 0 ")[0].replace(",", "")) for line in grown if label in line]
    assert slept, "\n".join(grown)
    assert slept[0] >= least


def grown_with_slow_frames(
    monkeypatch: pytest.MonkeyPatch, case: str, slow: str, *, repetitions: int, warm_up: int
) -> list[str]:
    """What the guard says about one case when each frame of a stream is delayed."""
    monkeypatch.setenv(SLOW_FRAMES, slow)
    with Stage(say=lambda _: None) as stage:
        counting = Counting(stage)
        try:
            measured = typical(counting.count(case, repetitions, warm_up))
        finally:
            counting.close()
    measured["delays"] = load()[case].get("delays", {})
    return compare({case: measured}, load()).grown


async def tick(seconds: float) -> None:
    await asyncio.sleep(seconds)


def test_timer_is_counted_once_and_the_sleep_of_a_loop_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def set_timers() -> list[int]:
        loop, before = asyncio.get_running_loop(), SLEEPS.timers
        loop.call_later(60, print).cancel()
        loop.call_at(loop.time() + 60, print).cancel()
        found = [SLEEPS.timers - before]
        for names in (frozenset(), frozenset({f"{__name__}.tick"})):
            monkeypatch.setattr(counted, "LOOPS", names)
            sleeping = asyncio.create_task(tick(60.0))
            await asyncio.sleep(0)
            sleeping.cancel()
            found.append(SLEEPS.timers - before)
        return found

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        assert runner.run(set_timers()) == [2, 3, 3]


def test_timers_that_fire_count_as_time_slept_however_long_they_are() -> None:
    async def wait() -> float:
        loop, before = asyncio.get_running_loop(), SLEEPS.slept
        fired = loop.create_future()
        loop.call_later(0.03, fired.set_result, None)
        loop.call_later(0.02, print).cancel()
        await fired
        await asyncio.sleep(0.01)
        fired = loop.create_future()
        loop.call_at(loop.time() + 0.1, fired.set_result, None)
        await fired
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await loop.create_future()
        return SLEEPS.slept - before

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        # The clock of uvloop counts milliseconds, and a delay is the difference of two readings: each may be one less.
        assert runner.run(wait()) == pytest.approx(0.34, abs=0.004)


def test_sleeps_of_loops_and_timers_that_delay_nobody_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "UNAWAITED", {f"{__name__}.tick": 0.05})

    async def wait() -> tuple[float, int]:
        before = SLEEPS.slept, SLEEPS.timers
        await tick(0.06)
        await tick(0.04)
        monkeypatch.setattr(counted, "LOOPS", frozenset({f"{__name__}.tick"}))
        await tick(0.03)
        return SLEEPS.slept - before[0], SLEEPS.timers - before[1]

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        slept, timers = runner.run(wait())
    assert (round(slept, 3), timers) == (0.04, 2)


@pytest.mark.parametrize("name", sorted({*counted.LOOPS, *counted.UNAWAITED}))
def test_functions_whose_timers_are_left_out_exist(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def test_what_is_as_it_was_has_not_grown(figures: dict[str, Any], accepted: dict[str, Any]) -> None:
    comparison = compare(figures, accepted, "3.11")
    assert (comparison.grown, comparison.notes, comparison.calls) == ([], [], True)


def test_guard_names_an_additional_statement(figures: dict[str, Any], accepted: dict[str, Any]) -> None:
    figures["one step"]["statements"]["journal"]["UPDATE run SET colour = 'red'"] = 1
    [line, how] = compare(figures, accepted, "3.11").grown
    assert "a run of one step: journal sends 5 statements, 4 were accepted" in line
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


@pytest.mark.parametrize("what", ["waits", "wal", "timers", "slept", "cpu"])
def test_the_other_counts_may_not_grow_either(figures: dict[str, Any], accepted: dict[str, Any], what: str) -> None:
    one = figures["one step"]
    if what == "waits":
        one["waits"]["worker"] += 10
    elif what == "wal":
        one["wal"] += 2_800
    else:
        one[what]["web"] += {"timers": 30, "slept": 10, "cpu": 500}[what]
    assert len(compare(figures, accepted, "3.11").grown) == 2


def test_statements_that_requests_share_may_vary(figures: dict[str, Any], accepted: dict[str, Any]) -> None:
    figures, accepted = {"runs at once": figures["one step"]}, {"runs at once": accepted["one step"]}
    web = figures["runs at once"]["statements"]["web"]
    web["SELECT 1"] += 12
    assert not compare(figures, accepted, "3.11").grown
    web["SELECT 1"] += 1
    assert compare(figures, accepted, "3.11").grown


def test_a_longer_delay_of_the_first_event_is_told(figures: dict[str, Any], accepted: dict[str, Any]) -> None:
    figures, accepted = {"first event": figures["one step"]}, {"first event": accepted["one step"]}
    accepted["first event"]["delays"] = {"first write": 2.0}
    figures["first event"]["delays"] = {"first write": 2.5}
    assert "milliseconds of the delay of the first write: 2.5, 2.0" in compare(figures, accepted, "3.11").grown[0]


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

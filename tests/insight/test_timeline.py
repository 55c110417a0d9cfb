"""Timelines from rows as the database may hold them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import orjson
import pytest

from holdfast.insight.timeline import MAX_STEPS, Step, Timeline, build_timeline

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def row(**changed: Any) -> dict[str, Any]:
    return {
        "run_id": uuid4(),
        "thread_id": uuid4(),
        "status": "success",
        "created_at": at(0),
        "ready_at": None,
        "started_at": at(1),
        "finished_at": at(20),
        "attempt": 1,
        "retries": 0,
        "crashes": 0,
        "first_seq": 1,
        "kwargs": {},
        "freed_at": None,
        "children_ended": [],
        "worker_lost": False,
        "now": at(30),
        **changed,
    }


def begun(attempt: int, seconds: float, before: float | None = None, **about: Any) -> dict[str, Any]:
    return {
        "kind": "metadata",
        "data": orjson.dumps({"attempt": attempt, **about}),
        "created_at": at(seconds),
        "before": None if before is None else at(before),
    }


def over(seconds: float, waited: float | None = 0.0, kind: str = "end") -> dict[str, Any]:
    """The end of an attempt as its worker writes it; without `waited`, the end of a run that no worker had."""
    about = {} if waited is None else {"waited": waited}
    return {"kind": kind, "data": orjson.dumps(about), "created_at": at(seconds), "before": None}


def released(seconds: float, waited: float) -> dict[str, Any]:
    return over(seconds, waited, "released")


def step(number: int, seconds: float) -> Step:
    return Step(str(number), (f"s{number}",), at(seconds), opening=False)


def spans(told: Timeline, *kinds: str) -> list[tuple[str, float]]:
    return [(span.kind, span.seconds) for span in told.spans if span.kind in kinds]


@pytest.mark.parametrize(
    ("about", "kind"),
    [
        ({"retries": 1}, "retry"),
        ({"crashes": 1}, "takeover"),
        ({}, "handover"),
        ({"retries": 1, "crashes": 1}, "retry"),
    ],
    ids=["retry", "takeover", "handover", "both"],
)
def test_timeline_shows_why_another_attempt_followed(about: dict[str, int], kind: str) -> None:
    run = row(attempt=2, **about)
    marks = [begun(1, 1.1), begun(2, 9, before=4, **about), over(20)]
    told = build_timeline(run, marks, at(19), [step(1, 3), step(2, 12)])
    assert spans(told, "attempt", kind) == [("attempt", 3), (kind, 5), ("attempt", 11)]
    assert spans(told, "step") == [("step", 2), ("step", 3)]
    assert accounted(told)


@pytest.mark.parametrize(
    ("counted", "kind"), [({"retries": 1}, "retry"), ({"crashes": 1}, "takeover"), ({}, "handover")]
)
def test_a_run_that_waits_for_its_next_attempt(counted: dict[str, int], kind: str) -> None:
    told = build_timeline(row(status="pending", finished_at=None, ready_at=at(60), **counted), [begun(1, 1)], at(7), [])
    last = told.spans[-1]
    assert (last.kind, last.seconds, last.ended_at) == (kind, 23, None)


def accounted(told: Timeline) -> bool:
    """Whether the spans say where all of the time went."""
    outer = {"behind", "queued", "attempt", "retry", "takeover", "handover", "children"}
    whole: float = told.as_json()["seconds"]
    return sum(span.seconds for span in told.spans if span.kind in outer) == whole


def test_released_attempt_ends_when_its_worker_released_it() -> None:
    run = row(attempt=2, retries=1)
    marks = [begun(1, 1), released(6, 0.5), begun(2, 9, before=6, retries=1), over(20, 0.25)]
    told = build_timeline(run, marks, at(19), [step(1, 3), step(2, 12)])
    assert spans(told, "attempt", "retry") == [("attempt", 5), ("retry", 3), ("attempt", 11)]
    assert spans(told, "unfinished") == [("unfinished", 3)], "the step that failed was work"
    assert accounted(told)


def test_journal_waits_of_all_attempts_are_added_up() -> None:
    run = row(attempt=3, retries=2)
    marks = [begun(1, 1), released(2, 0.5), begun(2, 3, retries=1), released(4, 0.25), begun(3, 5, retries=2)]
    assert build_timeline(run, [*marks, over(20, 0.125)], at(19), [step(1, 3)]).journal_wait == 0.875
    going_on = build_timeline(row(status="running", attempt=3, finished_at=None), marks, at(19), [step(1, 3)])
    assert (going_on.journal_wait, going_on.notes) == (0.75, [])


def test_journal_waits_that_were_not_recorded_are_named() -> None:
    marks = [begun(1, 1), begun(2, 9, before=4, crashes=1), over(20, 0.25)]
    told = build_timeline(row(attempt=2, crashes=1), marks, at(19), [step(1, 3)])
    assert told.journal_wait == 0.25
    [note] = told.notes
    assert "do not include attempt 1: its worker was lost" in note


def test_input_and_what_comes_of_it_are_one_line() -> None:
    opening = [Step("-1", (), at(2), opening=True), Step("0", ("__start__",), at(3), opening=True)]
    told = build_timeline(row(), [begun(1, 1), over(20)], at(19), [*opening, step(1, 5)])
    assert spans(told, "starting", "step") == [("starting", 2), ("step", 2)]


@pytest.mark.parametrize(
    ("counted", "kind"),
    [({"crashes": 1, "dead_letter": "poison"}, "takeover"), ({"retries": 1}, "retry"), ({}, "handover")],
    ids=["poison", "cancelled before the retry", "cancelled after a drain"],
)
def test_time_after_the_last_attempt_is_not_work(counted: dict[str, Any], kind: str) -> None:
    """The run was ended by a process that was not its worker."""
    told = build_timeline(row(status="error", **counted), [begun(1, 1), over(20, None)], at(4), [step(1, 3)])
    assert spans(told, "attempt", kind) == [("attempt", 3), (kind, 16)]
    assert told.spans[-1].what.endswith("; until the run ended as error")
    assert "the next does it again" not in told.spans[-2].what
    assert accounted(told)


def test_time_of_a_lost_worker_is_not_work() -> None:
    """It is lost, and the run has not been taken over yet."""
    run = row(status="running", finished_at=None, worker_lost=True)
    told = build_timeline(run, [begun(1, 1)], at(4), [step(1, 3)])
    assert spans(told, "attempt", "takeover") == [("attempt", 3), ("takeover", 26)]
    assert told.spans[-1].ended_at is None
    assert accounted(told)


def test_lost_worker_was_at_work_until_its_session_ended() -> None:
    marks = [begun(1, 1, worker_id="w1"), begun(2, 9, before=4, crashes=1), over(20)]
    told = build_timeline(row(attempt=2, crashes=1), marks, at(19), [step(1, 3)], {"w1": at(6)})
    assert spans(told, "attempt", "takeover") == [("attempt", 5), ("takeover", 3), ("attempt", 11)]
    retried = [begun(1, 1, worker_id="w1"), released(4, 0.1), begun(2, 9, before=4, retries=1), over(20)]
    told = build_timeline(row(attempt=2, retries=1), retried, at(19), [step(1, 3)], {"w1": at(6)})
    assert spans(told, "attempt", "retry") == [("attempt", 3), ("retry", 5), ("attempt", 11)]


def test_a_run_under_way() -> None:
    told = build_timeline(row(status="running", finished_at=None), [begun(1, 1)], at(7), [step(1, 5)])
    assert [(span.kind, span.seconds, span.ended_at is None) for span in told.spans[1:]] == [
        ("attempt", 29, True),
        ("step", 4, False),
        ("unfinished", 25, True),
    ]


def test_an_attempt_that_left_no_event() -> None:
    told = build_timeline(
        row(attempt=3, crashes=2), [begun(1, 1), begun(3, 9, before=2, crashes=2), over(20)], at(19), [step(1, 2)]
    )
    assert told.notes[-1] == "1 of 3 attempts left no event: they ended before the first commit."


def test_a_worker_whose_clock_is_off() -> None:
    """Nothing is negative, and nothing is outside of the run."""
    for off in (-3600.0, 3600.0):
        told = build_timeline(row(), [begun(1, 1)], at(19), [step(1, 5 + off), step(2, 6 + off)])
        assert all(span.seconds >= 0 for span in told.spans)
        assert all(at(0) <= span.began_at <= (span.ended_at or at(30)) <= at(20) for span in told.spans)


def test_more_steps_than_anybody_reads() -> None:
    told = build_timeline(row(), [begun(1, 1)], at(19), [step(n, 2) for n in range(MAX_STEPS + 1)])
    assert len(spans(told, "step")) == MAX_STEPS
    assert f"Only the first {MAX_STEPS} steps are shown." in told.notes

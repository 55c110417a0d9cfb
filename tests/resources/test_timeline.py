"""Timelines from rows as the database may hold them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import orjson
import pytest

from holdfast.resources.timeline import MOST_STEPS, Step, Timeline, put_together

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
        "now": at(30),
        **changed,
    }


def begun(attempt: int, seconds: float, before: float | None = None, **about: int) -> dict[str, Any]:
    return {
        "kind": "metadata",
        "data": orjson.dumps({"attempt": attempt, **about}),
        "created_at": at(seconds),
        "before": None if before is None else at(before),
    }


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
def test_what_was_between_two_attempts(about: dict[str, int], kind: str) -> None:
    run = row(attempt=2, **about)
    told = put_together(run, [begun(1, 1.1), begun(2, 9, before=4, **about)], at(19), [step(1, 3), step(2, 12)])
    assert spans(told, "attempt", kind) == [("attempt", 3), (kind, 5), ("attempt", 11)]
    assert spans(told, "step") == [("step", 2), ("step", 3)]
    assert told.notes == []


@pytest.mark.parametrize(
    ("counted", "kind"), [({"retries": 1}, "retry"), ({"crashes": 1}, "takeover"), ({}, "handover")]
)
def test_a_run_that_waits_for_its_next_attempt(counted: dict[str, int], kind: str) -> None:
    told = put_together(row(status="pending", finished_at=None, ready_at=at(60), **counted), [begun(1, 1)], at(7), [])
    last = told.spans[-1]
    assert (last.kind, last.seconds, last.ended_at) == (kind, 23, None)


def test_a_run_under_way() -> None:
    told = put_together(row(status="running", finished_at=None), [begun(1, 1)], at(7), [step(1, 5)])
    assert [(span.kind, span.seconds, span.ended_at is None) for span in told.spans[1:]] == [
        ("attempt", 29, True),
        ("step", 4, False),
        ("unfinished", 25, True),
    ]


def test_an_attempt_that_left_no_event() -> None:
    told = put_together(
        row(attempt=3, crashes=2), [begun(1, 1), begun(3, 9, before=2, crashes=2)], at(19), [step(1, 2)]
    )
    assert told.notes == ["1 of 3 attempts left no event: they ended before the first commit."]


def test_a_worker_whose_clock_is_off() -> None:
    """Nothing is negative, and nothing is outside of the run."""
    for off in (-3600.0, 3600.0):
        told = put_together(row(), [begun(1, 1)], at(19), [step(1, 5 + off), step(2, 6 + off)])
        assert all(span.seconds >= 0 for span in told.spans)
        assert all(at(0) <= span.began_at <= (span.ended_at or at(30)) <= at(20) for span in told.spans)


def test_more_steps_than_anybody_reads() -> None:
    told = put_together(row(), [begun(1, 1)], at(19), [step(n, 2) for n in range(MOST_STEPS + 1)])
    assert len(spans(told, "step")) == MOST_STEPS
    assert f"Only the first {MOST_STEPS} steps are shown." in told.notes

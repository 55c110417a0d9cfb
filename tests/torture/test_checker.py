"""The checker finds runs that were given up without reason, and webhooks that never came."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.support.watching import WatchedRun
from tests.torture.checker import MAX_CRASHES, Verdict, check
from tests.torture.load import Story
from tests.torture.witness import Witness

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Record(Witness):
    """A history that was made up, in place of the database's."""

    def __init__(self, **tables: list[dict[str, Any]]) -> None:
        self._tables = tables

    def rows(self, statement: str, parameters: Any = None) -> list[dict[str, Any]]:
        found = re.search(r"FROM (\w+)", statement)
        return self._tables.get(found[1], []) if found else []


def given_up(run_id: UUID, attempts: int, *, progress: float | None, poison: bool = True) -> Record:
    """A run whose attempts begin every ten seconds and end five seconds later."""
    owned = []
    for number in range(attempts):
        begun = BEGAN + timedelta(seconds=10 * number)
        last = number == attempts - 1
        for status, at in (("running", begun), ("error" if last else "pending", begun + timedelta(seconds=5))):
            row = {"run_id": run_id, "thread_id": run_id, "status": status, "who": "p1", "at": at}
            owned.append({**row, "time": at.timestamp()})
    run = {"run_id": run_id, "status": "error", "finished_at": BEGAN, "started_at": None, "error": None}
    made = [] if progress is None else [{"run_id": run_id, "last": BEGAN + timedelta(seconds=progress)}]
    return Record(run=[{**run, "dead_letter": "poison" if poison else None}], ownership=owned, progress=made)


def judge(record: Record, run_id: UUID, logs: Path, *, told: bool = True, **story: Any) -> Verdict:
    found = Story("long", WatchedRun(run_id, run_id), **story)
    return check(record, [found], [], logs, {run_id} if told else set())


@pytest.mark.parametrize(
    ("attempts", "progress", "innocent"),
    [
        (MAX_CRASHES, None, 0),
        # Made in the first of these attempts, before its worker died.
        (MAX_CRASHES, 4.0, 0),
        (MAX_CRASHES + 2, 24.0, 0),
        (MAX_CRASHES, 14.0, 1),
        (MAX_CRASHES, 10 * MAX_CRASHES - 6.0, 1),
        (MAX_CRASHES - 1, None, 1),
    ],
    ids=["none", "in-the-first", "long-ago", "in-the-second", "in-the-last", "too-few"],
)
def test_run_given_up_although_it_made_progress_is_found(
    attempts: int, progress: float | None, innocent: int, tmp_path: Path
) -> None:
    run_id = uuid4()
    verdict = judge(given_up(run_id, attempts, progress=progress), run_id, tmp_path)
    counts = {finding.what: finding.count for finding in verdict.violations if finding.count}
    assert counts == ({"innocent runs given up as poison": 1} if innocent else {})
    assert verdict.poison == 1 - innocent


def test_run_that_fails_without_being_given_up_is_found(tmp_path: Path) -> None:
    run_id = uuid4()
    verdict = judge(given_up(run_id, 1, progress=None, poison=False), run_id, tmp_path)
    counts = {finding.what: finding.count for finding in verdict.violations if finding.count}
    assert counts == {"runs that ended otherwise than they could": 1}


@pytest.mark.parametrize("told", [True, False])
def test_webhook_that_never_came_is_found(told: bool, tmp_path: Path) -> None:
    run_id = uuid4()
    record = given_up(run_id, MAX_CRASHES, progress=None)
    verdict = judge(record, run_id, tmp_path, told=told, webhook=True)
    assert verdict.good is told, verdict.table()

"""The results of checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """`skip`: the check could not run, and the finding says why."""

    PASS = "pass"  # noqa: S105
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `fix` says what to do; it is empty when there is nothing to do."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Problem:
    """One of the problems that a check has found."""

    verdict: Verdict
    found: str
    fix: str


def passed(found: str) -> Finding:
    return Finding("", Verdict.PASS, found)


def warned(found: str, fix: str) -> Finding:
    return Finding("", Verdict.WARN, found, fix)


def failed(found: str, fix: str) -> Finding:
    return Finding("", Verdict.FAIL, found, fix)


def skipped(found: str, fix: str = "") -> Finding:
    return Finding("", Verdict.SKIP, found, fix)


def summed_up(problems: Sequence[Problem], otherwise: str) -> Finding:
    """All problems as one finding, failures first. `otherwise` is the text when there are no problems."""
    if not problems:
        return passed(otherwise)
    worst_first = sorted(problems, key=lambda problem: problem.verdict is not Verdict.FAIL)
    fixes = dict.fromkeys(problem.fix for problem in worst_first if problem.fix)
    return Finding("", worst_first[0].verdict, "; ".join(problem.found for problem in worst_first), " ".join(fixes))


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: "1 worker", "2 workers"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"

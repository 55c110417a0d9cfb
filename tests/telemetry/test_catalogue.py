"""The catalogue of events says what the code logs: all of it, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from holdfast.telemetry.catalogue import CATALOGUE, TOPICS
from holdfast.telemetry.catalogue.entry import Entry, entry
from holdfast.telemetry.catalogue.others import MESSAGE
from holdfast.telemetry.catalogue.page import page
from holdfast.telemetry.run_context import RUN_FIELDS
from tests.telemetry.log_calls import LogCall, UnreadableCall, calls_in, log_calls

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "holdfast"


def problem(call: LogCall, known: Entry | None) -> str | None:
    """What the catalogue and a log call do not agree about."""
    if known is None:
        return f"{call.place}: {call.event} is not in the catalogue: add it in src/holdfast/telemetry/catalogue"
    if call.level != known.level:
        return f"{call.place}: {call.event} is logged as {call.level}, and the catalogue says {known.level}"
    if unknown := call.fields - set(known.fields) - set(RUN_FIELDS):
        return f"{call.place}: {call.event} has fields that the catalogue does not know: {sorted(unknown)}"
    if call.open and not known.open:
        return f"{call.place}: the fields of {call.event} cannot be read there; write them out, or mark it as open"
    return None


def test_every_log_call_is_in_the_catalogue() -> None:
    problems = [problem(call, CATALOGUE.get(call.event)) for call in log_calls(SOURCE)]
    assert [one for one in problems if one is not None] == []


def test_everything_in_the_catalogue_is_logged() -> None:
    given: dict[str, set[str]] = defaultdict(set)
    for call in log_calls(SOURCE):
        given[call.event] |= call.fields
    assert set(CATALOGUE) - set(given) == {MESSAGE}, "nobody logs these"
    for known in CATALOGUE.values():
        if not known.open:
            assert set(known.fields) - given[known.name] == set(), f"nobody gives these fields of {known.name}"


def test_each_event_is_there_once() -> None:
    assert sum(len(topic.ENTRIES) for topic in TOPICS) == len(CATALOGUE)


def test_the_page_is_generated_from_the_catalogue() -> None:
    assert (ROOT / "docs" / "events.md").read_text() == page(), "run `make docs`"


KNOWN = entry("run.claimed", "info", "A run was claimed.", "seconds")
LOGGER = "log = structlog.get_logger(__name__)\n"


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ('log.info("run.new")', "not in the catalogue"),
        ('log.warning("run.claimed")', "logged as warning"),
        ('log.exception("run.claimed")', "logged as error"),
        ('log.info("run.claimed", input=1)', "['input']"),
        ('def f():\n    about = {"seconds": 1, "input": 2}\n    log.info("run.claimed", **about)', "['input']"),
        ('def f():\n    one = {"input": 2}\n    two = {**one}\n    log.info("run.claimed", **two)', "['input']"),
        ('def f(about):\n    log.info("run.claimed", **about)', "cannot be read"),
        ('log.info("run.claimed" if yes else "run.new")', "run.new is not in"),
        ('Backoff("run.away", None)', "run.away is not in"),
        ('structlog.get_logger().info("run.new")', "not in the catalogue"),
    ],
    ids=["unknown", "level", "exception", "field", "spread", "nested", "parameter", "either", "backoff", "unnamed"],
)
def test_what_does_not_agree_is_found(code: str, complaint: str) -> None:
    problems = [problem(call, {KNOWN.name: KNOWN}.get(call.event)) for call in calls_in(LOGGER + code, "module.py")]
    assert any(complaint in str(one) for one in problems), problems


@pytest.mark.parametrize(
    "code",
    [
        "logger = structlog.get_logger(__name__)",
        'log.info(f"run.{what}")',
        'log.bind(a=1).info("x")',
        'log.info("a", 1)',
    ],
    ids=["another name", "computed", "bound", "positional"],
)
def test_what_cannot_be_read_is_refused(code: str) -> None:
    with pytest.raises(UnreadableCall):
        list(calls_in(LOGGER + code, "module.py"))


def test_what_agrees_is_let_through() -> None:
    code = 'log.info("run.claimed", seconds=1, run_id="x", exc_info=True)\nlog.info("run.claimed")'
    assert [problem(call, KNOWN) for call in calls_in(LOGGER + code, "module.py")] == [None, None]
    assert list(calls_in('log = open("x")\nlog.seek(0)\nlog.info("run.new")', "module.py")) == []

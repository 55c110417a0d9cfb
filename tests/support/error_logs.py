"""Lines of level error fail the test during which they are logged, unless it is marked with `expects_errors`.

They come from servers in the test's own process, and from the processes that the fixtures start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

MARKER = "expects_errors(*events): log lines of level error with these events do not fail the test"
LEVELS = ("error", "critical")
# The event of a traceback that a process has printed and not logged.
TRACEBACK = "traceback"

_found: list[tuple[str, str]] = []
_sources: list[Callable[[], Iterable[str]]] = []


def watch_this_process() -> None:
    """Note the errors that this process logs. Before each test: some set up a logging of their own."""
    if structlog.get_config()["processors"][0] is not _note_event:
        structlog.reset_defaults()
        structlog.configure(processors=[_note_event, *structlog.get_config()["processors"]])
    if _records not in logging.getLogger().handlers:
        logging.getLogger().addHandler(_records)


def see(line: str) -> None:
    """Note a line that a process has written, if it is an error."""
    if line.startswith("Traceback (most recent call last)"):
        _found.append((TRACEBACK, line))
    if not line.startswith("{"):
        return
    try:
        entry = json.loads(line)
    except ValueError:
        return
    if isinstance(entry, dict) and entry.get("level") in LEVELS:
        _found.append((str(entry.get("event")), line))


@contextmanager
def watched_file(log: Path) -> Iterator[None]:
    """Note the errors in a file to which processes write during the block."""
    read = _new_lines(log)
    _sources.append(read)
    try:
        yield
    finally:
        _sources.remove(read)
        _see_all(read)


def fail_if_unexpected(item: pytest.Item) -> None:
    """At the end of a test."""
    for read in _sources:
        _see_all(read)
    found, _found[:] = list(_found), []
    expected = {event for marker in item.iter_markers("expects_errors") for event in marker.args}
    unexpected = [line for event, line in found if event not in expected]
    if unexpected:
        shown = "\n".join(line[:2000] for line in unexpected[:10])
        pytest.fail(f"{len(unexpected)} unexpected errors were logged:\n{shown}", pytrace=False)


def _new_lines(log: Path) -> Callable[[], Iterable[str]]:
    position = 0

    def read() -> Iterable[str]:
        nonlocal position
        with log.open("rb") as file:
            file.seek(position)
            # A line that is still being written is read the next time.
            complete, newline, _ = file.read().rpartition(b"\n")
        position += len(complete) + len(newline)
        return complete.decode(errors="replace").splitlines()

    return read


def _see_all(read: Callable[[], Iterable[str]]) -> None:
    for line in read():
        see(line)


def _note_event(logger: object, method: str, line: Any) -> Any:
    if method in (*LEVELS, "exception"):
        _found.append((str(line.get("event")), repr(line)))
    return line


class _Records(logging.Handler):
    """Lines of Python's own logging. Their event is the name of the logger."""

    def emit(self, record: logging.LogRecord) -> None:
        _found.append((record.name, self.format(record)))


_records = _Records(logging.ERROR)

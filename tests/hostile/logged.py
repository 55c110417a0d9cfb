"""What the processes of a test log, with the end of each traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from holdfast.telemetry.catalogue import CATALOGUE

FRAMES = 4
# Log events that say that a loop, or an attempt, has failed, and not only one row. The catalogue names all of them so:
# a loop that loses what it depends on has an outage, what fails again and again is failing, and a defect is a crash. An
# entry about a delivery is about one row.
FAILURES = ("outage", "failing", "crashed")
FAILED_LOOPS = frozenset(
    name for name, entry in CATALOGUE.items() if name.endswith(FAILURES) and "delivery_id" not in entry.fields
)


@contextmanager
def logged() -> Iterator[list[dict[str, Any]]]:
    """The log entries of the block. `traceback` is the end of one, where an exception was logged."""
    entries: list[dict[str, Any]] = []

    def note(_: Any, level: str, entry: MutableMapping[str, Any]) -> Any:
        if raised := entry.pop("exc_info", None):
            error = raised if isinstance(raised, BaseException) else sys.exc_info()[1]
            if error is not None:
                entry["traceback"] = "".join(traceback.format_exception(error)[-FRAMES:])
        entries.append({**entry, "level": level})
        raise structlog.DropEvent

    # In place, because loggers keep the list that they were made with.
    processors = structlog.get_config()["processors"]
    before = processors.copy()
    processors[:] = [note]
    structlog.configure(processors=processors)
    try:
        yield entries
    finally:
        processors[:] = before
        structlog.configure(processors=processors)


def is_ours(entry: dict[str, Any]) -> bool:
    """Whether Holdfast logged it, and not graph code, which can log anything."""
    return isinstance(entry["event"], str) and entry["event"] in CATALOGUE


def alarms(entries: list[dict[str, Any]]) -> list[str]:
    """Warnings and errors, each kind once, with how often it came."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["level"] in ("warning", "error", "exception", "critical") and is_ours(entry):
            key = (entry["event"], entry.get("traceback", entry.get("reason", "")))
            found.setdefault(key, []).append(entry)
    return [f"{len(same)} × {same[0]}".replace("\\n", "\n") for same in found.values()]


def failed_loops(entries: list[dict[str, Any]]) -> list[str]:
    """The entries that say that more has failed than one row, or one run."""
    return [f"log: {entry}" for entry in entries if is_ours(entry) and entry["event"] in FAILED_LOOPS]

"""Tracebacks that processes left in their logs: errors that nobody foresaw.

What a fault makes of a connection is foreseen, whoever meets it, and so is a process that is interrupted while it
starts. Everything else is a defect, even if no history shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

BEGINNING = "Traceback (most recent call last):"
# Exceptions, by the name they are shown with.
EXPLAINED = (
    # Postgres is restarted, a session terminated, a worker cut off.
    r"psycopg\.OperationalError",
    r"psycopg\.errors\.(AdminShutdown|CrashShutdown|CannotConnectNow|IdleInTransactionSessionTimeout)",
    r"psycopg_pool\.(PoolTimeout|PoolClosed)",
    # Redis is killed.
    r"redis\.exceptions\.(ConnectionError|TimeoutError|BusyLoadingError)",
    r"(ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError|BrokenPipeError)",
    # A supervisor or a process of its own is told to stop while it still imports.
    r"KeyboardInterrupt",
)
LAST_LINE = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: .*)?$")
# How the parts of an exception group are set off.
MARGIN = re.compile(r"^\s*\| ?")


@dataclass(frozen=True)
class Traceback:
    """What ended it: the last exception of a chain, or each of a group."""

    log: str
    event: str
    errors: tuple[str, ...]

    @property
    def explained(self) -> bool:
        return bool(self.errors) and all(map(_explained, self.errors))

    def __str__(self) -> str:
        return f"{self.log}: {self.event}: {'; '.join(self.errors) or 'a traceback without an end'}"


def _explained(error: str) -> bool:
    found = LAST_LINE.match(error)
    return found is not None and any(re.fullmatch(name, found["name"]) for name in EXPLAINED)


def tracebacks(directory: Path) -> Iterator[Traceback]:
    """All that are in the logs of a directory, explained or not."""
    for log in sorted(directory.glob("*.log")):
        yield from _in_lines(log.stem, log.read_text(errors="replace").splitlines())


def _in_lines(log: str, lines: Iterable[str]) -> Iterator[Traceback]:
    block: list[str] = []
    before = ""
    for line in [*lines, "{}"]:
        entry = None
        with suppress(orjson.JSONDecodeError):
            entry = orjson.loads(line)
        if not isinstance(entry, dict):
            if BEGINNING in line and not block:
                block = [before]
            if block:
                block.append(line)
            before = line or before
            continue
        if block:
            yield Traceback(log, block[0] or "on its own", tuple(_errors(block[1:])))
            block = []
        before = ""
        if BEGINNING in (told := _traceback(entry.get("exception"))):
            yield Traceback(log, str(entry.get("event")), tuple(_errors(told.splitlines())))


def _traceback(exception: object) -> str:
    """Of a log line's field, whoever wrote it: ours is an object."""
    return str(exception.get("traceback", "")) if isinstance(exception, dict) else str(exception or "")


def _errors(lines: list[str]) -> list[str]:
    """The exceptions that a traceback ends in. One that was handled, and led to another, is not among them."""
    found: list[str] = []
    inside = False
    for number, line in enumerate(lines):
        if line.rstrip().endswith(BEGINNING):
            chained = any("exception" in above and "above" in above for above in lines[max(0, number - 3) : number])
            if chained and found:
                found.pop()
            inside = True
            continue
        # Frames and their source are indented; what they end in is not.
        last = MARGIN.sub("", line)
        if inside and LAST_LINE.match(last):
            inside = False
            if "sub-exception" not in last:
                found.append(last)
    return found

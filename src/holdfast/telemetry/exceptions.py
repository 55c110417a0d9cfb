"""Exceptions as log lines show them: where they come from, without the data that they were raised over.

A database quotes the row it refuses, and a validation the input that is wrong. Both say what is wrong in their first
line, and only that is logged. Of an exception of graph code, whose message may be made of anything, only the kind and
the place are: the whole of it is kept with the run.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg
import pydantic

# What the code of a graph can raise into ours. Not CancelledError, which may be meant for us.
ESCAPING = (Exception, SystemExit, KeyboardInterrupt)
LONGEST = 20_000
# How many causes of an exception a run's traceback has.
LONGEST_CHAIN = 20
_OURS = f"{Path(__file__).parents[1]}/"
# The standard library, and what was installed. The second may be inside of the first.
_PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
# What runs graphs, and is never what is wrong with one.
_RUNNERS = re.compile(r"/(?:langgraph|langchain_core|langsmith|uvloop|structlog)/")


def message_of(error: BaseException) -> str:
    """What an exception says, as text that can be stored and sent. Exceptions of graph code may say anything: the
    message is shortened, lone surrogates are replaced, and an exception whose `__str__` fails has a message that says
    so."""
    try:
        text = str(error)
    except BaseException:
        return "(no message: its __str__ fails)"
    cut = "" if len(text) <= LONGEST else f"… ({len(text)} characters)"
    return clean(text[:LONGEST]) + cut


def clean(text: str) -> str:
    """The same with U+FFFD for lone surrogates, which UTF-8 has no room for."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def run_traceback(error: BaseException) -> str:
    """The traceback that is kept with a run. It is formatted link by link, because a chain of causes may be long."""
    chain: list[tuple[BaseException, str]] = []
    current: BaseException | None = error
    because = ""
    while current is not None and len(chain) < LONGEST_CHAIN and all(current is not seen for seen, _ in chain):
        chain.append((current, because))
        if current.__cause__ is not None:
            current, because = current.__cause__, traceback._cause_message  # type: ignore[attr-defined]
        elif current.__context__ is not None and not current.__suppress_context__:
            current, because = current.__context__, traceback._context_message  # type: ignore[attr-defined]
        else:
            current = None
    try:
        parts = ["".join(traceback.format_exception(link, chain=False)) + after for link, after in reversed(chain)]
    except Exception:
        return "(no traceback: formatting it fails)"
    return clean("".join(parts)[-LONGEST:])


def in_words(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {_message(error)}".strip().removesuffix(":")


def kind_and_place(error: BaseException) -> str:
    """An exception of graph code: what it is, and the line of the project that it came through last."""
    where = place_of(error.__traceback__)
    return type(error).__name__ if where is None else f"{type(error).__name__} at {clean(where)}"


def place_of(trace: TracebackType | None) -> str | None:
    found = None
    for frame, line in traceback.walk_tb(trace):
        if is_project(frame.f_code.co_filename):
            found = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return found


def is_package(file: str) -> bool:
    """Whether a file was installed: not with Python, and not as what runs graphs."""
    return _is_installed(file) and not _RUNNERS.search(file) and not file.startswith(_OURS)


def is_project(file: str) -> bool:
    """Whether a file is the project's own: neither Python's, nor installed, nor a part of Holdfast."""
    return not _is_installed(file) and not file.startswith(("<", _OURS, *_PYTHON))


def _is_installed(file: str) -> bool:
    return file.startswith(_PACKAGES) or "/site-packages/" in file or "/dist-packages/" in file


def trace_text(error: BaseException) -> str:
    """A traceback with its causes, as Python prints it. No variables: they hold what runs work with."""
    whole = traceback.TracebackException.from_exception(error, capture_locals=False, compact=True)
    _shorten(whole, error, set())
    return clean("".join(whole.format())[-LONGEST:]).rstrip()


def as_fields(error: BaseException) -> dict[str, str]:
    """An exception for programs that read logs."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return {"type": name, "message": _message(error), "traceback": trace_text(error)}


def exception_of(line: Mapping[str, Any]) -> BaseException | None:
    """The exception that a log line is about, in whichever form it was given."""
    given = line.get("exc_info")
    if isinstance(given, BaseException):
        return given
    if isinstance(given, tuple):
        return given[1] if len(given) == 3 and isinstance(given[1], BaseException) else None
    return sys.exc_info()[1] if given else None


def _message(error: BaseException) -> str:
    text = message_of(error)
    if isinstance(error, psycopg.Error | pydantic.ValidationError):
        return text.strip().partition("\n")[0]
    return text


def _shorten(whole: traceback.TracebackException | None, error: BaseException | None, seen: set[int]) -> None:
    """Leave of each message of a chain what `_message` leaves."""
    if whole is None or error is None or id(error) in seen:
        return
    if len(seen) >= LONGEST_CHAIN:
        # Cut off, and what is cut off is not shown.
        whole.__cause__ = whole.__context__ = None
        return
    seen.add(id(error))
    if isinstance(error, psycopg.Error | pydantic.ValidationError):
        whole._str = _message(error)  # type: ignore[attr-defined]
    _shorten(whole.__cause__, error.__cause__, seen)
    _shorten(whole.__context__, error.__context__, seen)
    if isinstance(error, BaseExceptionGroup):
        for inside, one in zip(whole.exceptions or (), error.exceptions, strict=False):
            _shorten(inside, one, seen)

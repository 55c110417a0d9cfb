"""Describes exceptions for logs without the data that caused them.

A database error quotes the refused row, and a validation error the wrong input. The first line of both names the
problem, and only that line is logged. The message of an exception of graph code may contain any data. Only its type and
line are logged; the full message and traceback are stored with the run.
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

# The exceptions that graph code can raise into Holdfast's code. CancelledError is not one of them, because Holdfast may
# have cancelled the task itself.
GRAPH_CODE_EXCEPTIONS = (Exception, SystemExit, KeyboardInterrupt)
# The maximum length of a message and of a traceback.
MAX_TEXT_CHARACTERS = 20_000
# The maximum number of chained exceptions in a traceback.
MAX_CAUSES = 20
_HOLDFAST_PATH = f"{Path(__file__).parents[1]}/"
# The directories of the standard library and of installed packages. The second may be inside the first.
_PYTHON = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
# The packages that run graphs. Their frames never are the cause of a problem.
_RUNNERS = re.compile(r"/(?:langgraph|langchain_core|langsmith|uvloop|structlog)/")


def message_of(error: BaseException) -> str:
    """The message of an exception as text that can be stored and sent. Exceptions of graph code may have any message:
    it is truncated, lone surrogates are replaced, and if `__str__` fails, a fixed text is returned."""
    try:
        text = str(error)
    except BaseException:
        return "(no message: its __str__ fails)"
    cut = "" if len(text) <= MAX_TEXT_CHARACTERS else f"… ({len(text)} characters)"
    return replace_surrogates(text[:MAX_TEXT_CHARACTERS]) + cut


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def run_traceback(error: BaseException) -> str:
    """The traceback that is stored with a run. Chained exceptions are formatted one by one and limited in number."""
    chain: list[tuple[BaseException, str]] = []
    current: BaseException | None = error
    link_text = ""
    while current is not None and len(chain) < MAX_CAUSES and all(current is not seen for seen, _ in chain):
        chain.append((current, link_text))
        if current.__cause__ is not None:
            current, link_text = current.__cause__, traceback._cause_message  # type: ignore[attr-defined]
        elif current.__context__ is not None and not current.__suppress_context__:
            current, link_text = current.__context__, traceback._context_message  # type: ignore[attr-defined]
        else:
            current = None
    try:
        parts = ["".join(traceback.format_exception(link, chain=False)) + after for link, after in reversed(chain)]
    except Exception:
        return "(no traceback: formatting it fails)"
    return replace_surrogates("".join(parts)[-MAX_TEXT_CHARACTERS:])


def describe(error: BaseException) -> str:
    """Describe an exception in one line: its type and message."""
    return f"{type(error).__name__}: {_message(error)}".strip().removesuffix(":")


def type_and_place(error: BaseException) -> str:
    """Describe an exception of graph code: its type, and the innermost line of the project's code."""
    where = project_line_of(error.__traceback__)
    return type(error).__name__ if where is None else f"{type(error).__name__} at {replace_surrogates(where)}"


def project_line_of(trace: TracebackType | None) -> str | None:
    found = None
    for frame, line in traceback.walk_tb(trace):
        if is_project(frame.f_code.co_filename):
            found = f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return found


def is_package(file: str) -> bool:
    """Whether a file belongs to an installed package, other than those that run graphs."""
    return _is_installed(file) and not _RUNNERS.search(file) and not file.startswith(_HOLDFAST_PATH)


def is_project(file: str) -> bool:
    """Whether a file belongs to the project: not to Python, an installed package or Holdfast."""
    return not _is_installed(file) and not file.startswith(("<", _HOLDFAST_PATH, *_PYTHON))


def _is_installed(file: str) -> bool:
    return file.startswith(_PACKAGES) or "/site-packages/" in file or "/dist-packages/" in file


def traceback_text(error: BaseException) -> str:
    """A traceback with its causes, as Python prints it. Without local variables, which contain the data of runs."""
    whole = traceback.TracebackException.from_exception(error, capture_locals=False, compact=True)
    _shorten(whole, error, set())
    return replace_surrogates("".join(whole.format())[-MAX_TEXT_CHARACTERS:]).rstrip()


def exception_fields(error: BaseException) -> dict[str, str]:
    """An exception as the fields of a JSON log line."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return {"type": name, "message": _message(error), "traceback": traceback_text(error)}


def exception_of(line: Mapping[str, Any]) -> BaseException | None:
    """The exception of a log line, from any of the forms that `exc_info` accepts."""
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
    """Shorten each message of a chain as `_message` does."""
    if whole is None or error is None or id(error) in seen:
        return
    if len(seen) >= MAX_CAUSES:
        # Omit the rest of the chain.
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
